// Compares configuration batches with the plain replay, which runs one configuration at a time.
#include <random>

#include "policies/observation.hpp"
#include "policies/ops/make_ops.hpp"
#include "tests/catch.hpp"
#include "tests/policies/sample.hpp"
#include "tests/sim/differential.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/traces/temporary_folder.hpp"

namespace kvlab {
namespace {

/// The traces of group_shapes(), with a longer third one.
std::vector<RandomTrace> shapes() {
  std::vector<RandomTrace> all = group_shapes();
  all[2].segments[1].tokens = 100;
  return all;
}

void check_equal(const TraceReader& trace, const std::vector<CacheConfig>& configs, Queries queries,
                 bool every_error) {
  ReplayOptions options{.queries = queries, .every_output_error = every_error, .threads = 2};
  const ReplayResult config_batches = replay(trace, kSequence, configs, options);
  options.plain = true;
  check_measured(config_batches, replay(trace, kSequence, configs, options), 1e-6,
                 [&](std::size_t c) { return test::text_of(configs[c]); });
}

void check_equal_sets(const TraceReader& trace, const std::vector<CacheConfig>& configs) {
  for (const CacheConfig& config : configs) {
    if (config.policy.name == "oracle_topk") continue;
    INFO(test::text_of(config));
    check_sets(every_set(trace, kSequence, config, {}, 0, 0),
               every_set(trace, kSequence, config, {.plain = true}, 0, 0));
  }
}

TEST_CASE("configuration batches give the plain replay's metrics and kept sets") {
  for (const RandomTrace& wanted : shapes()) {
    const Traced traced(wanted);
    const std::vector<CacheConfig> configs = replay_configs(whole_sweep(traced.trace.tokens()));
    check_equal(traced.trace,
                replay_configs(by_head_sweep(traced.trace.shape(), traced.trace.tokens())),
                Queries::decode, false);
    for (const Queries queries : {Queries::decode, Queries::all}) {
      RandomTrace own = wanted;
      own.gradients_of = queries;
      check_equal(Traced(own).trace, configs, queries, queries == Queries::all);
    }
    check_equal_sets(traced.trace, configs);
  }
}

TEST_CASE(
    "configuration batches give the plain replay's metrics and kept sets, for every "
    "configuration") {
  const test::Choices choices{.beside = {"h2o:prompt", "knorm*value_norm1", "snapkv*value_norm"},
                              .tier_plans = {"", "4", "fp8@30%+4@70%", "16@5t+8@20%+k4v2@80%",
                                             "16@50%+16@50%", "q8_0/q5_1@50%+3@50%"}};
  for (const std::size_t shape : {1, 2}) {
    RandomTrace wanted = shapes()[shape];
    wanted.head_size = 32;
    const test::TemporaryFolder folder;
    const TraceReader trace = write_with_features(folder / "trace", wanted);
    const auto configs = configs_of(choices, nullptr, trace, 37);
    check_equal(trace, configs, Queries::decode, true);
    check_equal_sets(trace, configs);
  }
}

TEST_CASE(
    "a layer that a budget exempts keeps all tokens exact, in configuration batches and "
    "plain") {
  RandomTrace wanted = shapes()[0];
  wanted.layers = 2;
  wanted.head_size = 32;
  const Traced traced(wanted);
  std::vector<CacheConfig> configs;
  for (const char* policy :
       {"h2o:tiers=4", "window:scope=layer", "sink", "oracle_attention", "oracle_topk"})
    configs.push_back(
        {.policy = parse_policy(policy, replay_oracles()),
         .budget = budget_of_heads({{kNoBudget}, {9}}),
         .prefill = {1},
         .positions = std::string(policy) == "sink" ? Positions::cache : Positions::original});
  check_equal(traced.trace, configs, Queries::decode, true);
  check_equal_sets(traced.trace, configs);
  const auto result = replay(traced.trace, kSequence, configs, {});
  std::size_t exempt = 0, policy_layers = 0;
  for (const Measurement& one : result.measurements)
    if (one.metric == "nll_recall" && one.head < 0 && one.layer >= 0) {
      INFO(test::text_of(configs[one.config]));
      ++(one.layer == 0 ? exempt : policy_layers);
      CHECK((one.value > 1e-3) == (one.layer == 1));
    }
  CHECK(exempt == configs.size());
  CHECK(policy_layers == configs.size());
  for (const Measurement& one : result.measurements)
    if (one.metric == "kv_bytes_peak" && one.layer == 0 && one.head < 0)
      CHECK(one.value == 2 * 65 * 4 * 32);
}

// --- claims --------------------------------------------------------------------------------------

/// Whether the live sets of all budgets are nested at every step. The random observations differ
/// between budgets, as they do in real caches.
bool stays_nested(const PolicyOps& ops, std::span<const double> params) {
  std::vector<std::byte> packed(ops.params_bytes);
  ops.write_params(params, packed.data());
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    std::mt19937_64 rng(seed);
    std::vector<LiveSet> sets;
    for (const std::uint32_t budget : {3u, 5u, 12u, 20u})
      sets.emplace_back(ops, packed, budget, ProtectedTokens{}, LiveSet::Identity{seed, 0, 0, 0});
    for (std::uint32_t now = 0; now < 120;) {
      const std::uint32_t count = now == 0 ? 9 : now % 40 == 0 ? 4 : 1;
      for (LiveSet& set : sets) {
        set.evict_to_budget(now);
        set.append(now, count, sample_features(now, count, set.features().size()).data());
        std::vector<Observation> seen(set.size());
        for (Observation& one : seen)
          one = {rng() % 1000, static_cast<std::uint32_t>(rng() % 2), now, 1};
        set.observe(seen);
      }
      for (std::size_t i = 1; i < sets.size(); ++i)
        if (!std::includes(sets[i].positions().begin(), sets[i].positions().end(),
                           sets[i - 1].positions().begin(), sets[i - 1].positions().end()))
          return false;
      now += count;
    }
  }
  return true;
}

/// A policy that claims to be nested, although its ranks depend on the budget.
struct FalseClaim {
  static constexpr PolicyInfo kInfo{
      .name = "false_claim", .summary = "", .citation = "", .order = Order::nested};
  struct Params {};
  struct Slot {};
  static constexpr void append(Slot&, Token, const Params&, const Step&) {}
  static constexpr std::uint64_t rank(const Slot&, Token token, const Params&, const Step& step) {
    return (token.position ^ step.budget) * 2654435761u;
  }
};

TEST_CASE("a policy that claims a nested order keeps nested sets; false claims are detected") {
  for (const PolicyEntry& entry : policy_catalogue()) {
    INFO(entry.info.name);
    std::vector<double> params;
    for (const ParamInfo& param : entry.params) params.push_back(param.standard);
    if (entry.info.order != Order::nested) continue;
    CHECK(entry.info.needs == Needs::nothing);
    CHECK(stays_nested(entry, params));
  }
  const auto h2o = parse_policy("h2o").entry;
  CHECK(!stays_nested(*h2o, {}));
  CHECK(!stays_nested(make_ops<FalseClaim>(), {}));
}

}  // namespace
}  // namespace kvlab
