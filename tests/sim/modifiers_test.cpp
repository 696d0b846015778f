// Compares the modifiers of the eviction rule with those of the brute force.
#include <fmt/format.h>

#include <algorithm>

#include "tests/catch.hpp"
#include "tests/sim/differential.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/traces/temporary_folder.hpp"

namespace kvlab {
namespace {

constexpr auto kPrompt = SegmentKind::prompt, kDecode = SegmentKind::decode;
constexpr std::uint32_t kFirst = 30;  // tokens in the first prompt

/// A case for `two_turns()`. `keeps_prompt`: whether the first prompt is kept in addition to the
/// budget.
Case case_of(brute::Config requested, bool keeps_prompt) {
  const std::string text = fmt::format(
      "{}:sinks={}:recent={}:every={}:smooth={}{}{}{}{}{}", requested.policy, requested.sinks,
      requested.recent, requested.every, requested.smooth, requested.once ? ":once" : "",
      requested.max_pool ? ":pool=max" : "", requested.by_layer ? ":scope=layer" : "",
      requested.max_group ? ":group=max" : "", keeps_prompt ? ":prompt" : "");
  const CacheConfig config{.policy = parse_policy(text),
                           .budget = {.extent = tokens(requested.budget)},
                           .prefill = {requested.chunk}};
  if (keeps_prompt) requested.budget += kFirst, requested.sinks = kFirst;
  return {fmt::format("{} chunk {}", text, requested.chunk), config, requested};
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const std::vector<brute::Config> modifiers{
      {.every = 2},
      {.every = 16},
      {.every = 1000},
      {.smooth = 2},
      {.every = 8, .smooth = 3},
      {.every = 8, .smooth = 500, .max_pool = true},
      {.once = true},
      {.smooth = 3, .once = true, .max_pool = true},
      {.by_layer = true},
      {.every = 5, .smooth = 1, .by_layer = true},
      {},
      {.every = 5, .by_layer = true},
  };
  for (std::size_t m = 0; m < modifiers.size(); ++m)
    for (const std::string policy : {"h2o", "lru", "window"})
      for (const std::uint32_t chunk : {0u, 7u, 1u}) {
        brute::Config requested = modifiers[m];
        requested.policy = policy, requested.budget = 12, requested.chunk = chunk;
        all.push_back(case_of(requested, m >= 10));
        requested.sinks = 3, requested.recent = 4;
        if (policy != "window") all.push_back(case_of(requested, m >= 10));
      }
  for (const std::uint32_t every : {1u, 9u})
    for (const bool by_layer : {false, true})
      for (const std::uint32_t chunk : {0u, 7u})
        all.push_back(case_of({.policy = "h2o",
                               .budget = 12,
                               .recent = 6,
                               .chunk = chunk,
                               .every = every,
                               .smooth = by_layer ? 2u : 0u,
                               .by_layer = by_layer,
                               .max_group = true},
                              false));
  return all;
}

RandomTrace two_turns() {
  return {
      .query_heads = 6,
      .kv_heads = 2,
      .segments = {{0, kFirst, kPrompt}, {30, 45, kDecode}, {75, 13, kPrompt}, {88, 20, kDecode}},
      .residuals = false,
      .gradient_samples = 0,
      .seed = 21};
}

TEST_CASE("kept sets and metrics under every modifier agree with the brute force") {
  const Traced traced(two_turns());
  for (const bool plain : {true, false})
    check_agreement(traced.trace, cases(), {.plain = plain, .threads = 2}, 1e-5);
}

/// The largest number of live tokens of any cache.
double live_max(const TraceReader& trace, const CacheConfig& config) {
  double highest = 0;
  for (const Measurement& m : replay(trace, 0, {&config, 1}, {}).measurements)
    if (m.metric == "live_max") highest = std::max(highest, m.value);
  return highest;
}

TEST_CASE("the number of live tokens reaches the rule's capacity and never exceeds it") {
  const Traced traced(two_turns());
  for (const Case& c : cases()) {
    if (c.brute.once) continue;
    const double capacity =
        c.brute.budget - 2.0 + c.brute.every + (c.brute.chunk ? c.brute.chunk : kFirst);
    INFO(c.text);
    const double highest = live_max(traced.trace, c.replay);
    CHECK(highest <= capacity);
    if (c.brute.chunk == 1) CHECK(highest == std::min<double>(capacity, traced.trace.tokens()));
  }
}

TEST_CASE("modifiers with neutral values give the same result as no modifiers") {
  const Traced traced(two_turns());
  for (const std::string policy : {"h2o", "lru", "window", "sink", "random"}) {
    const CacheConfig none{.policy = parse_policy(policy), .budget = {.extent = tokens(12)}};
    CacheConfig written = none;
    written.policy =
        parse_policy(policy + ":every=1:once=no:smooth=0:pool=mean:scope=head:group=sum");
    CHECK(written.policy.text() == none.policy.text());
    const auto one = replay(traced.trace, 0, {&none, 1}, {}).measurements;
    const auto two = replay(traced.trace, 0, {&written, 1}, {}).measurements;
    REQUIRE(one.size() == two.size());
    for (std::size_t i = 0; i < one.size(); ++i)
      CHECK((one[i].metric == two[i].metric &&
             (one[i].value == two[i].value || std::isnan(one[i].value))));
  }
}

}  // namespace
}  // namespace kvlab
