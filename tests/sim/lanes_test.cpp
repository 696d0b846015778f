// The lanes against the plain replay, which takes one configuration at a time.
#include <cmath>
#include <numeric>
#include <random>
#include <tuple>

#include "policies/observation.hpp"
#include "policies/ops/make_ops.hpp"
#include "tests/catch.hpp"
#include "tests/policies/draw.hpp"
#include "tests/sim/differential.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/traces/temporary_folder.hpp"

namespace kvlab {
namespace {

constexpr auto kPrompt = SegmentKind::prompt, kDecode = SegmentKind::decode;

struct Traced {
  explicit Traced(const RandomTrace& wanted)
      : trace(write_random_trace(folder / "trace", wanted)) {}
  test::TemporaryFolder folder;
  TraceReader trace;
};

/// Group sizes below, at and above a quad; two turns; ragged lengths.
std::vector<RandomTrace> shapes() {
  return {
      {.layers = 1,
       .query_heads = 2,
       .kv_heads = 2,
       .head_size = 8,
       .segments = {{0, 1, kPrompt}, {1, 64, kDecode}},
       .seed = 4},
      {.layers = 1,
       .query_heads = 6,
       .kv_heads = 2,
       .head_size = 24,
       .dtype = Dtype::bf16,
       .rounding = Rounding::model_dtype,
       .segments = {{0, 33, kPrompt}, {33, 95, kDecode}, {128, 17, kPrompt}, {145, 50, kDecode}},
       .draws = 5,
       .spans = {{"early", 20, 5}, {"across", 130, 30}},
       .seed = 5},
      {.layers = 1,
       .query_heads = 7,
       .kv_heads = 1,
       .head_size = 16,
       .segments = {{0, 48, kPrompt}, {48, 100, kDecode}},
       .seed = 6},
      // Heavy tokens that leave take all of the row's exponentials with them.
      {.layers = 1,
       .query_heads = 4,
       .kv_heads = 1,
       .head_size = 16,
       .segments = {{0, 20, kPrompt}, {20, 80, kDecode}},
       .pull = 90,
       .seed = 7}};
}

using test::text_of;
using Key = std::tuple<std::size_t, int, int, std::string>;

void check_equal(const TraceReader& trace, const std::vector<CacheConfig>& configs, Span span,
                 bool every_error) {
  ReplayOptions options{.span = span, .every_output_error = every_error, .threads = 2};
  const ReplayResult lanes = replay(trace, kSequence, configs, options);
  options.plain = true;
  const ReplayResult plain = replay(trace, kSequence, configs, options);
  REQUIRE(lanes.measurements.size() == plain.measurements.size());
  for (std::size_t i = 0; i < plain.measurements.size(); ++i) {
    const Measurement &got = lanes.measurements[i], &wanted = plain.measurements[i];
    INFO(text_of(configs[wanted.config])
         << " " << wanted.metric << " layer " << wanted.layer << " head " << wanted.head << ": "
         << got.value << ", plain " << wanted.value);
    REQUIRE(Key(got.config, got.layer, got.head, got.metric) ==
            Key(wanted.config, wanted.layer, wanted.head, wanted.metric));
    CHECK(got.count == wanted.count);
    CHECK(std::abs(got.value - wanted.value) <= 1e-6 * std::max(1.0, std::abs(wanted.value)));
    CHECK(std::isnan(got.standard_error) == std::isnan(wanted.standard_error));
    if (!std::isnan(wanted.standard_error))
      CHECK(std::abs(got.standard_error - wanted.standard_error) <= 1e-6);
  }
}

void check_equal_sets(const TraceReader& trace, const std::vector<CacheConfig>& configs) {
  std::vector<std::uint32_t> every(trace.tokens());
  std::iota(every.begin(), every.end(), 0u);
  for (const CacheConfig& config : configs) {
    if (config.policy.name == "oracle_topk") continue;
    ReplayOptions options;
    const auto kept = kept_sets(trace, kSequence, config, options, 0, 0, every);
    options.plain = true;
    const auto plain = kept_sets(trace, kSequence, config, options, 0, 0, every);
    REQUIRE(kept.size() == plain.size());
    for (std::size_t t = 0; t < plain.size(); ++t) {
      INFO(text_of(config) << " query " << t);
      REQUIRE(kept[t].positions == plain[t].positions);
    }
  }
}

TEST_CASE("lanes measure what the plain replay measures, and keep the very sets that it keeps") {
  for (const RandomTrace& wanted : shapes()) {
    const Traced traced(wanted);
    const std::vector<CacheConfig> configs = replay_configs(whole_grid(traced.trace.tokens()));
    check_equal(traced.trace,
                replay_configs(by_head_grid(traced.trace.shape(), traced.trace.tokens())),
                Span::decode, false);
    for (const Span span : {Span::decode, Span::all}) {
      RandomTrace own = wanted;
      own.gradients_of = span;
      check_equal(Traced(own).trace, configs, span, span == Span::all);
    }
    check_equal_sets(traced.trace, configs);
  }
}

TEST_CASE("lanes measure and keep what the plain replay does, whatever is asked for") {
  const test::Choices choices{
      .beside = {"h2o:prompt", "knorm*value_norm1", "snapkv*value_norm"},
      .ladders = {"", "4", "fp8@30%+4@70%", "16@5t+8@20%+k4v2@80%", "16@50%+16@50%"}};
  for (const std::size_t shape : {1, 2}) {
    RandomTrace wanted = shapes()[shape];
    wanted.head_size = 32;
    const test::TemporaryFolder folder;
    const TraceReader trace = write_with_columns(folder / "trace", wanted);
    const auto configs = configs_of(choices, nullptr, trace, 37);
    check_equal(trace, configs, Span::decode, true);
    check_equal_sets(trace, configs);
  }
}

TEST_CASE("in a layer that a budget exempts all tokens stay, exact, in lanes and plainly") {
  RandomTrace wanted = shapes()[0];
  wanted.layers = 2;
  wanted.head_size = 32;
  const Traced traced(wanted);
  std::vector<CacheConfig> configs;
  for (const char* policy :
       {"h2o:ladder=4", "window:scope=layer", "sink", "oracle_mass", "oracle_topk"})
    configs.push_back(
        {.policy = parse_policy(policy, replay_references()),
         .budget = budget_of_heads({{kNoBudget}, {9}}),
         .prefill = {1},
         .positions = std::string(policy) == "sink" ? Positions::cache : Positions::original});
  check_equal(traced.trace, configs, Span::decode, true);
  check_equal_sets(traced.trace, configs);
  const auto result = replay(traced.trace, kSequence, configs, {});
  std::size_t exempt = 0, acted_on = 0;
  for (const Measurement& one : result.measurements)
    if (one.metric == "nll_recall" && one.head < 0 && one.layer >= 0) {
      INFO(text_of(configs[one.config]));
      ++(one.layer == 0 ? exempt : acted_on);
      CHECK((one.value > 1e-3) == (one.layer == 1));
    }
  CHECK(exempt == configs.size());
  CHECK(acted_on == configs.size());
  for (const Measurement& one : result.measurements)
    if (one.metric == "kv_bytes_peak" && one.layer == 0 && one.head < 0)
      CHECK(one.value == 2 * 65 * 4 * 32);
}

// --- claims --------------------------------------------------------------------------------------

/// Whether the live sets of all budgets are nested at every step, under random observations that
/// differ from budget to budget, as those of real caches do.
bool stays_nested(const PolicyOps& ops, std::span<const double> params) {
  std::vector<std::byte> packed(ops.params_bytes);
  ops.write_params(params, packed.data());
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    std::mt19937_64 draw(seed);
    std::vector<LiveSet> sets;
    for (const std::uint32_t budget : {3u, 5u, 12u, 20u})
      sets.emplace_back(ops, packed, budget, Guards{}, LiveSet::Identity{seed, 0, 0, 0});
    for (std::uint32_t now = 0; now < 120;) {
      const std::uint32_t count = now == 0 ? 9 : now % 40 == 0 ? 4 : 1;
      for (LiveSet& set : sets) {
        set.make_room(now);
        set.admit(now, count, draw_columns(now, count, set.columns().size()).data());
        std::vector<Observation> seen(set.size());
        for (Observation& one : seen)
          one = {draw() % 1000, static_cast<std::uint32_t>(draw() % 2), now, 1};
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

/// Claims to be nested, and looks at the budget.
struct FalseClaim {
  static constexpr PolicyInfo kInfo{
      .name = "false_claim", .summary = "", .citation = "", .order = Order::nested};
  struct Params {};
  struct Slot {};
  static constexpr void admit(Slot&, Token, const Params&, const Step&) {}
  static constexpr std::uint64_t rank(const Slot&, Token token, const Params&, const Step& step) {
    return (token.position ^ step.budget) * 2654435761u;
  }
};

TEST_CASE("a policy that claims a nested order keeps nested sets; false claims are found out") {
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
