#include "tools/python/src/cache_request.hpp"

#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "engine/evaluation/policy_file.hpp"
#include "sim/budgets/budget_file.hpp"
#include "tools/python/src/array.hpp"
#include "tools/python/src/bindings.hpp"

namespace kvlab::python {

namespace {

CacheConfig config_of(const CacheRequest& requested) {
  if (requested.policy.ends_with(".json")) {
    if (!requested.budget.empty() || !requested.positions.empty())
      throw std::invalid_argument(fmt::format(
          "{}: the policy file sets budget and positions; leave both out", requested.policy));
    const PolicyFile file = read_policy_file(requested.policy, compiled_from(requested.own));
    check_shape(file, requested.model);
    return file.cache;
  }
  SweepRequest request{.policies = {requested.policy},
                       .prefills = {requested.prefill},
                       .seed = requested.seed,
                       .threshold = requested.threshold};
  if (!requested.budget.empty()) request.budgets = {requested.budget};
  if (!requested.positions.empty()) request.positions = {requested.positions};
  return make_sweep(request, {}, compiled_from(requested.own)).front();
}

}  // namespace

ResolvedConfig resolve(const CacheRequest& requested, const Executor& executor) {
  ResolvedConfig config =
      kvlab::resolve(config_of(requested), requested.length, 0, requested.model);
  config.layer_numbers = requested.layer_numbers;
  check_held(executor, config);
  return config;
}

namespace {

/// [layer, KV head]: budget, sinks, recent, group_max.
Array<std::uint32_t> rules_of(const ResolvedConfig& config, const CacheShape& model) {
  const std::uint32_t group_max = config.policy.modifiers.group == Modifiers::Group::max;
  std::vector<std::uint32_t> all;
  for (std::uint32_t layer = 0; layer < model.layers; ++layer)
    for (std::uint32_t head = 0; head < model.kv_heads; ++head) {
      const std::uint32_t budget = config.budget_of(layer, head);
      const ProtectedTokens protected_tokens =
          budget == kNoBudget ? ProtectedTokens{} : resolve_protected_tokens(config.policy, budget);
      all.insert(all.end(), {budget, protected_tokens.sinks, protected_tokens.recent, group_max});
    }
  return array_of(std::move(all), {model.layers, model.kv_heads, 4});
}

/// [layer, KV head, tier]: format and slots; no tiers if all tokens stay in 16 bit.
Array<std::uint32_t> tiers_of(const ResolvedConfig& config, const CacheShape& model) {
  const TierPlan& tier_plan = config.policy.tier_plan;
  const std::size_t tiers = tier_plan.is_plain() ? 0 : tier_plan.tiers.size();
  std::vector<std::uint32_t> all;
  for (std::uint32_t layer = 0; tiers > 0 && layer < model.layers; ++layer)
    for (std::uint32_t head = 0; head < model.kv_heads; ++head) {
      const auto* const own = config.planned_tiers(layer, config.budget_of(layer, head));
      for (std::size_t r = 0; r < tiers; ++r) {  // without tiers, a layer stays in 16 bit
        const TierSlots tier = own ? (*own)[r] : TierSlots{};
        all.insert(all.end(), {*kernel_format(tier.format), tier.slots});
      }
    }
  return array_of(std::move(all), {model.layers, model.kv_heads, tiers, 2});
}

/// The smallest and the largest budget of a KV head; empty if all tokens stay.
std::vector<std::uint32_t> budget_range(const CacheRequest& requested) {
  const ResolvedConfig config = resolve(requested, kDecoder);
  std::vector<std::uint32_t> all;
  for (std::uint32_t layer = 0; layer < requested.model.layers; ++layer)
    for (std::uint32_t head = 0; head < requested.model.kv_heads; ++head)
      if (const std::uint32_t budget = config.budget_of(layer, head); budget != kNoBudget)
        all.push_back(budget);
  if (all.empty()) return {};
  const auto [min_value, max_value] = std::ranges::minmax(all);
  return {min_value, max_value};
}

using Plan = nb::typed<nb::dict, nb::str, nb::any>;

Plan slot_plan(const CacheRequest& requested) {
  const ResolvedConfig config = resolve(requested, kKernelLibrary);
  const PolicySpec& policy = config.policy;
  const Modifiers& modifiers = policy.modifiers;
  if (policy.entry->source || policy.entry->host)
    throw std::invalid_argument(
        fmt::format("policy {}: {} runs registered policies only; {} runs this one", policy.name,
                    kKernelLibrary.name, kKernelLibrary.instead));
  Plan plan;
  plan["policy"] = policy.name;
  plan["params"] = policy.params;
  plan["features"] = policy.features;
  plan["rules"] = rules_of(config, requested.model);
  plan["tiers"] = tiers_of(config, requested.model);
  plan["tokens"] = requested.length;
  plan["chunk"] = config.prefill.chunk;
  plan["cache_positions"] = config.positions == Positions::cache;
  plan["threshold16"] = config.threshold16();
  plan["seed"] = config.seed;
  plan["every"] = modifiers.every;
  plan["smooth"] = modifiers.smooth;
  plan["once"] = modifiers.once;
  plan["by_layer"] = modifiers.scope == Modifiers::Scope::layer;
  plan["pool_max"] = modifiers.pool == Modifiers::Pool::max;
  return plan;
}

}  // namespace

void bind_cache_request(nb::module_& module) {
  module.def("slot_plan", slot_plan, nb::arg("asked"),
             "The numbers of a kvlab_kv_cache_config, by the names of its members. `chunk`: number "
             "of tokens in an append of a prompt; 0: the whole prompt.");
  module.def(
      "budget_text",
      [](const CacheRequest& requested) { return config_of(requested).budget_text(); },
      nb::arg("asked"), "The budget as the request or its policy.json gives it: 128, 20%, all.");
  module.def("budget_range", budget_range, nb::arg("asked"),
             "The smallest and the largest budget of a KV head, in tokens; empty if all tokens "
             "stay.");
  using Text = const std::string&;
  nb::class_<CacheRequest>(module, "CacheRequest",
                           "The cache that Caches or slot_plan() should make.")
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
                                  {layers, kv_heads, head_size, {}, layer_numbers},
                                  std::move(layer_numbers)};
          },
          nb::arg("policy"), nb::arg("own"), nb::arg("budget"), nb::arg("prefill"),
          nb::arg("positions"), nb::arg("seed"), nb::arg("threshold"), nb::arg("length"),
          nb::arg("layers"), nb::arg("kv_heads"), nb::arg("head_size") = 0,
          nb::arg("layer_numbers") = std::vector<std::uint32_t>());
}

}  // namespace kvlab::python
