// Compares the replay with a brute force that shares no code with it, and tests general invariants.
#include "sim/replay.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <initializer_list>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>

#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/sim/differential.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/traces/temporary_folder.hpp"

namespace kvlab {
namespace {

using test::error_of;

constexpr double kTolerance = 1e-5;
constexpr auto kPrompt = SegmentKind::prompt, kDecode = SegmentKind::decode;

RandomTrace single_heads() {
  return {.query_heads = 3,
          .kv_heads = 3,
          .head_size = 8,
          .segments = {{0, 37, kPrompt}, {37, 70, kDecode}},
          .passages = {{"first", 0, 3}, {"late", 60, 11}, {"at the end", 100, 7}}};
}

RandomTrace two_turns_in_bf16() {
  return {.head_size = 16,
          .dtype = Dtype::bf16,
          .rounding = Rounding::model_dtype,
          .segments = {{0, 30, kPrompt}, {30, 27, kDecode}, {57, 23, kPrompt}, {80, 31, kDecode}},
          .passages = {{"across", 25, 40}},
          .seed = 2};
}

RandomTrace prompt_only_in_groups_of_four() {
  return {.layers = 1,
          .query_heads = 8,
          .kv_heads = 2,
          .head_size = 64,
          .rope_factor = 1.1f,
          .segments = {{0, 103, kPrompt}},
          .seed = 3};
}

RandomTrace half_precision_not_rounded() {
  return {.layers = 1,
          .query_heads = 4,
          .kv_heads = 1,
          .head_size = 8,
          .dtype = Dtype::f16,
          .segments = {{0, 20, kPrompt}, {20, 60, kDecode}},
          .silent_first = true,
          .seed = 4};
}

RandomTrace enable_all_gradients(RandomTrace wanted) {
  wanted.gradients_of = Queries::all;
  return wanted;
}

ReplayResult replay_all(const TraceReader& trace, const std::vector<Case>& cases,
                        Queries queries = Queries::decode, unsigned threads = 2) {
  return replay(trace, kSequence, replay_configs(cases), {.queries = queries, .threads = threads});
}

/// The metric of one configuration over all layers and heads.
double overall(const ReplayResult& result, std::size_t config, const std::string& metric) {
  for (const Measurement& m : result.measurements)
    if (m.config == config && m.layer == -1 && m.metric == metric) return m.value;
  throw std::runtime_error("no such metric: " + metric);
}

Sets kept_of(const TraceReader& trace, const Case& c, std::uint32_t layer, std::uint32_t head) {
  return every_set(trace, kSequence, c.replay, {.queries = Queries::all}, layer, head);
}

TEST_CASE("random traces verify") {
  for (const RandomTrace& wanted :
       {single_heads(), two_turns_in_bf16(), prompt_only_in_groups_of_four(),
        half_precision_not_rounded()}) {
    const Traced traced(wanted);
    const TraceCheck check = verify_trace(traced.trace, 2);
    INFO((check.problems.empty() ? "" : check.problems[0]));
    CHECK(check.ok);
    CHECK(traced.trace.segments() == wanted.segments);
  }
}

TEST_CASE("replay agrees with the brute force on the decoded queries: heads, turns and roundings") {
  for (const RandomTrace& wanted :
       {single_heads(), two_turns_in_bf16(), half_precision_not_rounded()}) {
    const Traced traced(wanted);
    check_agreement(traced.trace, whole_sweep(traced.trace.tokens()), {.threads = 2}, kTolerance);
  }
}

TEST_CASE(
    "replay agrees with the brute force on all queries, also for a prompt without an answer") {
  for (const RandomTrace& wanted :
       {single_heads(), two_turns_in_bf16(), prompt_only_in_groups_of_four()}) {
    const Traced traced(enable_all_gradients(wanted));
    check_agreement(traced.trace, whole_sweep(traced.trace.tokens()),
                    {.queries = Queries::all, .threads = 2}, kTolerance);
  }
}

TEST_CASE("replay agrees with the brute force on errors at every query, including a zero output") {
  const Traced traced(enable_all_gradients(half_precision_not_rounded()));
  const ReplayOptions options{.queries = Queries::all, .every_output_error = true, .threads = 2};
  std::vector<Case> cases = whole_sweep(traced.trace.tokens());
  for (Case& c : cases) c.replay.threshold = 0.1;
  check_agreement(traced.trace, cases, options, kTolerance);
  CHECK(overall(replay_all(traced.trace, {make_case("h2o", 8, 0, false)}, Queries::all), 0,
                "zero_outputs") == 4);
}

TEST_CASE("replay agrees with the brute force for logits up to 80") {
  RandomTrace wanted = single_heads();
  wanted.spread = 30;
  wanted.pull = 0;
  // With other seeds, rows with nearly all probability on one token often differ by only a few
  // units of 2^-32, so that rounding decides. With this seed no decision is close.
  wanted.seed = 17;
  const Traced traced(wanted);
  const brute::Simulator exact(brute::load(traced.trace));
  double largest = 0;
  for (std::uint32_t head = 0; head < 3; ++head)
    for (std::uint32_t t = 0; t < traced.trace.tokens(); ++t)
      largest = std::max(largest, exact.log_sum(0, head, t));
  CHECK(largest > 80);
  const auto cases = whole_sweep(traced.trace.tokens());
  for (const Measurement& m : replay_all(traced.trace, cases).measurements)
    if (std::isnan(m.value)) FAIL(cases[m.config].text << " " << m.metric << " is NaN");
  check_agreement(traced.trace, cases, {.threads = 2}, kTolerance);
}

TEST_CASE("replay agrees with the brute force of each head alone under budgets by head") {
  for (RandomTrace wanted : {single_heads(), two_turns_in_bf16()}) {
    wanted.gradients_of = Queries::all;
    const Traced traced(wanted);
    const auto cases = by_head_sweep(traced.trace.shape(), traced.trace.tokens());
    for (const bool plain : {true, false})
      check_agreement(traced.trace, cases, {.queries = Queries::all, .plain = plain, .threads = 2},
                      kTolerance);
  }
}

TEST_CASE("budgets by layer, and PyramidKV's, apply to every head of a layer") {
  const Traced traced(two_turns_in_bf16());
  const ModelShape& shape = traced.trace.shape();
  REQUIRE(shape.layers == 2);
  std::vector<Case> cases{make_case_by_head("h2o", {{37, 37}, {3, 3}}, 0, false), {}, {}, {}};
  for (std::size_t c = 1; c < 4; ++c) cases[c] = cases[0];
  cases[1].replay.budget = budget_of_heads({{37}, {3}});
  cases[2].replay.budget = parse_budget("pyramid(20)");
  cases[3].replay.budget = parse_budget("pyramid(18.02%)");  // 20 of 111 tokens
  cases[2].heads = cases[3].heads = {{39, 39}, {1, 1}};
  check_agreement(traced.trace, cases, {.threads = 2}, kTolerance);
  const ReplayResult result = replay_all(traced.trace, cases);
  CHECK(result.budget_tokens == std::vector<std::uint32_t>{20, 20, 20, 20});
}

TEST_CASE("estimates of KL use every query, errors of outputs every eighth") {
  const Traced traced(single_heads());
  const std::vector<Case> cases{make_case("h2o", 16, 0, false), make_case("sink", 9, 0, true)};
  for (const bool plain : {true, false}) {
    ReplayOptions options{.plain = plain, .threads = 2};
    const ReplayResult sampled = replay(traced.trace, kSequence, replay_configs(cases), options);
    options.every_output_error = true;
    const ReplayResult all = replay(traced.trace, kSequence, replay_configs(cases), options);
    REQUIRE(sampled.measurements.size() == all.measurements.size());
    for (std::size_t i = 0; i < all.measurements.size(); ++i) {
      const Measurement &a = sampled.measurements[i], &b = all.measurements[i];
      INFO(a.metric << " layer " << a.layer << " head " << a.head);
      CHECK((a.value == b.value && a.count == b.count) == !a.metric.ends_with("_error"));
    }
  }
}

TEST_CASE("gradients of queries that the replay does not measure are left out") {
  const std::vector<Case> cases{make_case("h2o", 16, 0, false)};
  const auto has_estimates = [&](RandomTrace wanted, Queries gradient_queries, Queries queries) {
    wanted.gradients_of = gradient_queries;
    std::size_t estimates = 0, residual = 0;
    for (const Measurement& m : replay_all(Traced(wanted).trace, cases, queries).measurements) {
      estimates += m.metric.starts_with("kl_estimate");
      residual += m.metric == "residual_error";
    }
    CHECK(residual > 0);
    return estimates > 0;
  };
  for (const RandomTrace& wanted : {single_heads(), two_turns_in_bf16()}) {
    CHECK(has_estimates(wanted, Queries::decode, Queries::decode));
    CHECK(has_estimates(wanted, Queries::all, Queries::all));
    CHECK_FALSE(has_estimates(wanted, Queries::decode, Queries::all));
  }
  // Gradients of all queries can be used for decoded queries only if no prompt follows the decoded
  // tokens.
  CHECK(has_estimates(single_heads(), Queries::all, Queries::decode));
  CHECK_FALSE(has_estimates(two_turns_in_bf16(), Queries::all, Queries::decode));
}

TEST_CASE("the full cache has recall and acceptance 1, no errors, misses or evictions, exactly") {
  std::size_t acceptances = 0;
  for (RandomTrace wanted : {single_heads(), two_turns_in_bf16(), half_precision_not_rounded()}) {
    wanted.gradients_of = Queries::all;
    const Traced traced(wanted);
    std::vector<Case> cases;
    for (const std::uint32_t chunk : {0u, 1u, 7u}) {
      cases.push_back(make_case("full", 1, chunk, false));
      for (const char* policy : {"window", "lru", "h2o", "random"})
        cases.push_back(make_case(policy, traced.trace.tokens(), chunk, false));
    }
    const ReplayResult result = replay_all(traced.trace, cases, Queries::all);
    for (const Measurement& m : result.measurements) {
      INFO(cases[m.config].text << " " << m.metric << " layer " << m.layer << " head " << m.head);
      if (m.metric == "recall" || m.metric == "acceptance") CHECK(m.value == 1);
      acceptances += m.metric == "acceptance";
      for (const char* zero :
           {"nll_recall", "miss_rate", "output_error", "layer_error", "evictions"})
        if (m.metric == zero) CHECK(m.value == 0);
    }
    CHECK(result.budget_tokens[0] == traced.trace.tokens());
  }
  CHECK(acceptances > 0);
}

TEST_CASE("oracle_topk bounds every policy's recall and misses, row by row") {
  for (const RandomTrace& wanted :
       {single_heads(), two_turns_in_bf16(), half_precision_not_rounded()}) {
    const Traced traced(wanted);
    for (const std::uint32_t chunk : {0u, 1u})
      for (const std::uint32_t budget : {5u, 12u, 30u}) {
        std::vector<Case> cases{make_case("oracle_topk", budget, chunk, false)};
        for (const char* policy :
             {"window", "sink", "lru", "h2o", "streaming_h2o", "random", "oracle_attention"})
          for (const bool cache_positions : {false, true})
            if (!cache_positions || std::string(policy) != "oracle_attention")
              cases.push_back(make_case(policy, budget, chunk, cache_positions));
        std::map<std::tuple<int, int, std::string>, double> bound;
        for (const Measurement& m : replay_all(traced.trace, cases).measurements) {
          INFO(cases[m.config].text << " " << m.metric << " layer " << m.layer << " head "
                                    << m.head);
          const std::tuple key{m.layer, m.head, m.metric};
          if (m.config == 0)
            bound[key] = m.value;
          else if (m.metric == "recall")
            CHECK(m.value <= bound.at(key) + 1e-6);
          else if (m.metric == "miss_rate" || m.metric == "nll_recall")
            CHECK(m.value >= bound.at(key) - 1e-6);
        }
      }
  }
}

TEST_CASE("measurements have the same bytes for any number of threads", "[threads]") {
  const Traced traced(two_turns_in_bf16());
  const auto cases = whole_sweep(traced.trace.tokens());
  const auto once = replay_all(traced.trace, cases, Queries::decode, 1).measurements;
  for (const unsigned threads : {2u, 5u}) {
    const auto again = replay_all(traced.trace, cases, Queries::decode, threads).measurements;
    REQUIRE(again.size() == once.size());
    for (std::size_t i = 0; i < once.size(); ++i) {
      const Measurement &a = once[i], &b = again[i];
      const bool same =
          a.config == b.config && a.layer == b.layer && a.head == b.head && a.metric == b.metric &&
          a.count == b.count &&
          std::bit_cast<std::uint64_t>(a.value) == std::bit_cast<std::uint64_t>(b.value) &&
          std::bit_cast<std::uint64_t>(a.standard_error) ==
              std::bit_cast<std::uint64_t>(b.standard_error);
      if (!same) FAIL(cases[a.config].text << " " << a.metric << " with " << threads << " threads");
    }
  }
}

TEST_CASE("a configuration's metrics do not depend on the others of the sweep") {
  const Traced traced(single_heads());
  const auto cases = whole_sweep(traced.trace.tokens());
  const auto together = replay_all(traced.trace, cases);
  for (std::size_t c = 0; c < cases.size(); c += 29) {
    const auto alone = replay_all(traced.trace, {cases[c]});
    INFO(cases[c].text);
    for (const Measurement& m : alone.measurements)
      if (m.layer == -1) CHECK(m.value == overall(together, c, m.metric));
  }
}

TEST_CASE("under uniform attention h2o keeps the first tokens, as sink does with as many sinks") {
  // Token j receives the attention Σ 1/(t + 1) over the queries t ≥ j. This is about ln(n / j), so
  // older tokens receive more.
  RandomTrace wanted = two_turns_in_bf16();
  wanted.spread = 0;
  wanted.pull = 0;
  const Traced traced(wanted);
  for (const std::uint32_t budget : {2u, 9u, 20u})
    for (const std::uint32_t chunk : {0u, 1u, 7u}) {
      const std::uint32_t heavy = budget - budget / 2;
      const Case h2o = make_case("h2o", budget, chunk, false);
      const Case sink = make_case("sink", budget, chunk, false, heavy);
      INFO(h2o.text);
      CHECK(kept_of(traced.trace, h2o, 1, 1) == kept_of(traced.trace, sink, 1, 1));
    }
}

TEST_CASE("nested policies recall more with a larger budget") {
  const Traced traced(single_heads());
  for (const char* policy : {"window", "sink"}) {
    std::vector<Case> cases;
    for (std::uint32_t budget = 5; budget <= 107; budget += 6)
      cases.push_back(make_case(policy, budget, 0, false));
    const ReplayResult result = replay_all(traced.trace, cases);
    for (std::size_t c = 1; c < cases.size(); ++c) {
      CHECK(overall(result, c, "recall") >= overall(result, c - 1, "recall") - 1e-7);
      CHECK(overall(result, c, "evictions") < overall(result, c - 1, "evictions"));
    }
  }
}

/// Describes the first violation of an invariant of the eviction rule in these kept sets; "" if
/// there is none.
std::string broken_promise(const TraceReader& trace, const brute::Config& config,
                           const Sets& kept) {
  std::vector<bool> gone(trace.tokens());
  for (const Segment& segment : trace.segments()) {
    const std::uint32_t prompt_step = config.chunk ? config.chunk : segment.tokens;
    const std::uint32_t step = segment.kind == kDecode ? 1 : prompt_step;
    for (std::uint32_t t = segment.start; t < segment.start + segment.tokens; ++t) {
      // The position of the first token of the append that contains token t.
      const std::uint32_t now = t - (t - segment.start) % step;
      const std::string at = " at query " + std::to_string(t);
      std::vector<bool> live(t + 1);
      for (const std::uint32_t position : kept[t]) live.at(position) = true;
      if (!live[t]) return "the newest token is not live" + at;
      if (kept[t].size() > config.budget + (t - now)) return "over budget" + at;
      if (kept[t].size() < std::min(t + 1, config.budget)) return "under budget" + at;
      for (std::uint32_t j = 0; j <= t; ++j) {
        if (live[j] && gone[j]) return "an evicted token is live again" + at;
        gone[j] = !live[j];
        if (gone[j] && j < config.sinks) return "a sink is evicted" + at;
        if (gone[j] && j + config.recent > now) return "a recent token is evicted" + at;
      }
    }
  }
  return "";
}

TEST_CASE("kept sets have the newest and protected tokens, use the budget, and only lose tokens") {
  const Traced traced(two_turns_in_bf16());
  for (const Case& c : whole_sweep(traced.trace.tokens())) {
    if (c.brute.policy == "oracle_topk" || c.brute.policy == "full") continue;
    INFO(c.text);
    CHECK(broken_promise(traced.trace, c.brute, kept_of(traced.trace, c, 0, 1)) == "");
  }
}

TEST_CASE("recall is at most 1") {
  const Traced traced(prompt_only_in_groups_of_four());
  const auto cases = whole_sweep(traced.trace.tokens());
  for (const Measurement& m : replay_all(traced.trace, cases, Queries::all).measurements) {
    if (m.metric == "recall") CHECK(m.value <= 1);
    if (m.metric == "nll_recall") CHECK(m.value >= 0);
  }
}

TEST_CASE("random depends only on the seed, the sequence, the layer and the head") {
  const Traced traced(two_turns_in_bf16());
  Case c = make_case("random", 12, 0, false);
  const auto kept = kept_of(traced.trace, c, 0, 0);
  CHECK(kept == kept_of(traced.trace, c, 0, 0));
  CHECK(kept != kept_of(traced.trace, c, 0, 1));
  CHECK(kept != kept_of(traced.trace, c, 1, 0));
  c.replay.seed += 1;
  CHECK(kept != kept_of(traced.trace, c, 0, 0));
}

TEST_CASE("a replay of some layers gives their rows and the mean over them") {
  const Traced traced(single_heads());
  const std::vector<Case> cases{make_case("h2o", 12, 0, false)};
  const auto whole = replay_all(traced.trace, cases).measurements;
  ReplayOptions options;
  options.layers = {1};
  const auto part = replay(traced.trace, kSequence, replay_configs(cases), options).measurements;
  for (const Measurement& m : part) {
    CHECK((m.layer == 1 || m.layer == -1));
    for (const Measurement& w : whole)
      if (w.layer == 1 && w.head == m.head && w.metric == m.metric) CHECK(w.value == m.value);
  }
}

std::string refusal(const TraceReader& trace, const Case& c, const ReplayOptions& options = {}) {
  return error_of<std::invalid_argument>(
      [&] { replay(trace, kSequence, replay_configs({c}), options); });
}

bool mentions(const std::string& message, std::initializer_list<const char*> words) {
  return std::all_of(words.begin(), words.end(),
                     [&](const char* word) { return message.find(word) != std::string::npos; });
}

TEST_CASE("configurations that cannot be replayed are refused by name") {
  const Traced traced(single_heads());
  const Case window = make_case("window", 8, 0, false);

  const Traced prompt(prompt_only_in_groups_of_four());
  CHECK(mentions(refusal(prompt.trace, window), {"queries", "all"}));
  CHECK(mentions(refusal(traced.trace, make_case("h2o", 8, 0, false, 5, 4)),
                 {"sinks", "recent", "budget"}));
  CHECK(mentions(refusal(traced.trace, make_case("sink", 4, 0, false)), {"sinks"}));
  for (const char* reference : {"oracle_topk", "oracle_attention"})
    CHECK(mentions(refusal(traced.trace, make_case(reference, 8, 0, true)), {"original"}));
  ReplayOptions options;
  options.layers = {0, 2};
  CHECK(mentions(refusal(traced.trace, window, options), {"layer 2"}));

  const std::vector<std::uint32_t> first{0};
  CHECK_THROWS_AS(kept_sets(traced.trace, 0, window.replay, {}, 2, 0, first), std::logic_error);
  CHECK_THROWS_AS(kept_sets(traced.trace, 0, window.replay, {}, 0, 3, first), std::logic_error);
  const Case top = make_case("oracle_topk", 8, 0, false);
  CHECK_THROWS_AS(kept_sets(traced.trace, 0, top.replay, {}, 0, 0, first), std::invalid_argument);
}

}  // namespace
}  // namespace kvlab
