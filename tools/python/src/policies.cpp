#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "policies/catalogue.hpp"
#include "sim/report/describe_policy.hpp"
#include "sim/source/policy_source.hpp"
#include "tools/python/src/long_call.hpp"
#include "tools/python/src/own_policy.hpp"
#include "traces/base/json.hpp"

namespace kvlab::python {
namespace {

std::string json_of(const PolicyEntry& entry) { return json_text(describe_policy(entry)); }

std::vector<std::string> registered() {
  std::vector<std::string> all;
  for (const PolicyEntry& entry : policy_catalogue()) all.push_back(json_of(entry));
  return all;
}

Policy compile(const std::string& path) {
  return result_of_long([&] { return Policy{compile_policy_source(path)}; });
}

Policy own(const std::string& name, const std::string& summary, const std::string& path,
           const std::string& text, const std::string& needs,
           const std::vector<std::string>& columns, const std::string& defaults,
           const std::string& positions, std::size_t state_bytes, const std::vector<float>& weights,
           nb::object function, nb::object sight) {
  return make_own_policy({.name = name,
                          .summary = summary,
                          .path = path,
                          .text = text,
                          .needs = needs,
                          .columns = columns,
                          .defaults = defaults,
                          .positions = positions,
                          .state_bytes = state_bytes,
                          .weights = weights,
                          .function = std::move(function),
                          .sight = std::move(sight)});
}

}  // namespace

CompiledPolicies compiled_from(const std::vector<Policy>& policies) {
  CompiledPolicies compiled;
  for (const Policy& policy : policies) compiled.entries.push_back(policy.entry);
  return compiled;
}

void bind_policies(nb::module_& module) {
  nb::class_<Policy>(module, "Policy", "A policy beside the registry's.")
      .def_static("compile", compile, nb::arg("path"),
                  "The policy of a header, compiled by the host's compiler.")
      .def_static("own", own, nb::arg("name"), nb::arg("summary"), nb::arg("path"), nb::arg("text"),
                  nb::arg("needs"), nb::arg("columns"), nb::arg("defaults"), nb::arg("positions"),
                  nb::arg("state_bytes"), nb::arg("weights"), nb::arg("function"),
                  nb::arg("sight").none(), "A policy whose ranks a Python function gives.")
      .def_prop_ro("name", [](const Policy& p) { return std::string(p.entry->info.name); })
      .def_prop_ro(
          "json", [](const Policy& p) { return json_of(*p.entry); },
          "What `kvlab policies --json` says of it.");
  module.def("registered_policies", registered, "Of each registered policy, the same.");
  module.def("is_taken", is_taken, nb::arg("name"),
             "Whether a policy or a reference has the name.");
}

}  // namespace kvlab::python
