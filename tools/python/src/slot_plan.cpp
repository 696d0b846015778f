// What caches of slots on a device hold under a policy, for who keeps them: kvlab.hf on CUDA.
#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "tools/python/src/array.hpp"
#include "tools/python/src/bindings.hpp"
#include "tools/python/src/cache_request.hpp"

namespace kvlab::python {

namespace {

using Counts = nb::ndarray<const std::uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

class SlotPlan {
 public:
  explicit SlotPlan(const CacheRequest& asked)
      : config_(resolve(asked, kKernelLibrary)),
        layers_(asked.model.layers),
        kv_heads_(asked.model.kv_heads),
        length_(asked.length) {
    const PolicySpec& policy = config_.policy;
    if (policy.entry->source || policy.entry->host)
      throw std::invalid_argument(
          fmt::format("policy {}: {} holds registered policies; {} runs others", policy.name,
                      kKernelLibrary.name, kKernelLibrary.instead));
  }

  const ResolvedConfig& config() const { return config_; }
  std::uint32_t length() const { return length_; }
  const Modifiers& modifiers() const { return config_.policy.modifiers; }

  /// [layer, KV head] of what `of` says of a head's budget.
  template <class Of>
  Array<std::uint32_t> by_head(Of of) const {
    std::vector<std::uint32_t> all;
    for (std::uint32_t layer = 0; layer < layers_; ++layer)
      for (std::uint32_t head = 0; head < kv_heads_; ++head)
        all.push_back(of(config_.budget_of(layer, head)));
    return array_of(std::move(all), {layers_, kv_heads_});
  }
  Guards guards(std::uint32_t budget) const {
    return budget == kNoBudget ? Guards{} : resolve_guards(config_.policy, budget);
  }
  std::uint32_t slots(std::uint32_t budget) const {
    if (budget == kNoBudget || modifiers().once) return length_;
    return static_cast<std::uint32_t>(
        std::min<std::uint64_t>(modifiers().capacity(budget, 1), length_));
  }
  /// How many of so many live tokens, [layer, KV head], leave before the next admission.
  Array<std::uint32_t> surplus(const Counts& live, bool after_prompt) const {
    if (live.shape(0) != layers_ || live.shape(1) != kv_heads_)
      throw std::invalid_argument(fmt::format("live: [{}, {}]; [{}, {}] is expected", live.shape(0),
                                              live.shape(1), layers_, kv_heads_));
    const std::uint32_t* now = live.data();
    return by_head([&](std::uint32_t budget) {
      const std::uint32_t tokens = *now++;
      return budget == kNoBudget ? 0 : modifiers().surplus(tokens, budget, after_prompt);
    });
  }

 private:
  ResolvedConfig config_;
  std::uint32_t layers_, kv_heads_, length_;
};

}  // namespace

void bind_slot_plan(nb::module_& module) {
  using Plan = SlotPlan;
  constexpr auto kOwned = nb::rv_policy::automatic;  // arrays
  const auto by_head = [](auto member) {
    return [member](const Plan& plan) {
      return plan.by_head([&](std::uint32_t budget) { return member(plan, budget); });
    };
  };
  nb::class_<Plan>(module, "SlotPlan",
                   "What caches of slots hold under a policy, by layer and KV head.")
      .def(nb::init<const CacheRequest&>(), nb::arg("asked"))
      .def_prop_ro("policy", [](const Plan& p) { return p.config().policy.name; })
      .def_prop_ro("params", [](const Plan& p) { return p.config().policy.params; })
      .def_prop_ro("columns", [](const Plan& p) { return p.config().policy.columns; })
      .def_prop_ro("length", &Plan::length, "Tokens that a sequence may have.")
      .def_prop_ro("squeezed",
                   [](const Plan& p) { return p.config().positions == Positions::cache; })
      .def_prop_ro(
          "chunk", [](const Plan& p) { return p.config().prefill.chunk; },
          "Tokens of a prompt that come together; 0: all.")
      .def_prop_ro("threshold16", [](const Plan& p) { return p.config().threshold16(); })
      .def_prop_ro("seed", [](const Plan& p) { return p.config().seed; })
      .def_prop_ro("budgets", by_head([](const Plan&, std::uint32_t budget) { return budget; }),
                   kOwned, "2**32 - 1: nobody leaves.")
      .def_prop_ro("sinks", by_head([](const Plan& p, std::uint32_t budget) {
                     return p.guards(budget).sinks;
                   }),
                   kOwned)
      .def_prop_ro("recent", by_head([](const Plan& p, std::uint32_t budget) {
                     return p.guards(budget).recent;
                   }),
                   kOwned)
      .def_prop_ro("slots", by_head([](const Plan& p, std::uint32_t b) { return p.slots(b); }),
                   kOwned)
      .def_prop_ro("room_at",
                   by_head([](const Plan& p, std::uint32_t b) { return p.modifiers().room_at(b); }),
                   kOwned, "Live tokens at which room is made by a shrink.")
      .def_prop_ro(
          "steps_make_room", [](const Plan& p) { return p.modifiers().steps_make_room(); },
          "Else a shrink before a step does.")
      .def_prop_ro("once", [](const Plan& p) { return p.modifiers().once; })
      .def_prop_ro("by_layer",
                   [](const Plan& p) { return p.modifiers().scope == Modifiers::Scope::layer; })
      .def_prop_ro("group_max",
                   [](const Plan& p) { return p.modifiers().group == Modifiers::Group::max; })
      .def_prop_ro("pool_max",
                   [](const Plan& p) { return p.modifiers().pool == Modifiers::Pool::max; })
      .def(
          "smooth",
          [](const Plan& p, bool after_prompt) {
            return p.modifiers().smooths(after_prompt) ? p.modifiers().smooth : 0;
          },
          nb::arg("after_prompt"))
      .def("surplus", &Plan::surplus, nb::arg("live"), nb::arg("after_prompt"));
}

}  // namespace kvlab::python
