#include "tools/python/src/cache_request.hpp"

#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "engine/loop/policy_file.hpp"
#include "sim/budgets/budget_file.hpp"
#include "tools/python/src/bindings.hpp"

namespace kvlab::python {

namespace {

CacheConfig config_of(const CacheRequest& asked) {
  if (asked.policy.ends_with(".json")) {
    if (!asked.budget.empty() || !asked.positions.empty())
      throw std::invalid_argument(fmt::format(
          "{}: budget and positions are the file's; neither is expected beside it", asked.policy));
    const PolicyFile file = read_policy_file(asked.policy, compiled_from(asked.own));
    check_shape(file, asked.model);
    return file.cache;
  }
  GridRequest request{.policies = {asked.policy},
                      .prefills = {asked.prefill},
                      .seed = asked.seed,
                      .threshold = asked.threshold};
  if (!asked.budget.empty()) request.budgets = {asked.budget};
  if (!asked.positions.empty()) request.positions = {asked.positions};
  return make_grid(request, {}, compiled_from(asked.own)).front();
}

}  // namespace

ResolvedConfig resolve(const CacheRequest& asked, const Executor& executor) {
  ResolvedConfig config = kvlab::resolve(config_of(asked), asked.length, 0, asked.model);
  config.layer_numbers = asked.layer_numbers;
  check_held(executor, config);
  return config;
}

void bind_cache_request(nb::module_& module) {
  using Text = const std::string&;
  nb::class_<CacheRequest>(module, "CacheRequest", "A cache, as Caches and SlotPlan take it.")
      .def(
          "__init__",
          [](CacheRequest* to, Text policy, const std::vector<Policy>& own, Text budget,
             Text prefill, Text positions, std::uint64_t seed, double threshold,
             std::uint32_t length, std::uint32_t layers, std::uint32_t kv_heads,
             std::uint32_t head_size, std::vector<std::uint32_t> layer_numbers) {
            new (to) CacheRequest{policy,
                                  own,
                                  budget,
                                  prefill,
                                  positions,
                                  seed,
                                  threshold,
                                  length,
                                  {layers, kv_heads, head_size},
                                  std::move(layer_numbers)};
          },
          nb::arg("policy"), nb::arg("own"), nb::arg("budget"), nb::arg("prefill"),
          nb::arg("positions"), nb::arg("seed"), nb::arg("threshold"), nb::arg("length"),
          nb::arg("layers"), nb::arg("kv_heads"), nb::arg("head_size") = 0,
          nb::arg("layer_numbers") = std::vector<std::uint32_t>());
}

}  // namespace kvlab::python
