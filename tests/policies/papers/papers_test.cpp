// Compares each policy in the plain replay with its paper's formula, which is computed from the
// whole history. The kept sets must be equal at every query.
#include <cmath>

#include "policies/ops/make_ops.hpp"
#include "tests/catch.hpp"
#include "tests/policies/leaky.hpp"
#include "tests/policies/papers/scores.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/traces/temporary_folder.hpp"

namespace kvlab::papers {
namespace {

struct Paper {
  std::string text;  ///< as on the command line
  Formula formula;
  CompiledPolicies compiled = nullptr;
};

/// Variants of the test policy `leaky`, which needs mass and requests. Each parameter differs from
/// its default in one variant. In some variants requests have more weight than mass, in others
/// less.
std::vector<Paper> that_need_both() {
  const CompiledPolicies compiled{
      std::make_shared<const PolicyEntry>(PolicyEntry{make_ops<Leaky>()})};
  return {{"leaky", leaky(0.9, 0.125, 64), compiled},
          {"leaky:keep=0.5:slope=2:span=5:recent=0", leaky(0.5, 2, 5), compiled},
          {"leaky:slope=0:span=1e6:recent=3", leaky(0.9, 0, 1'000'000), compiled}};
}

/// Each policy with its defaults, with other values of its parameters, and with other protected
/// tokens.
std::vector<Paper> papers() {
  return {{"tova", tova()},
          {"tova:sinks=2:recent=25%", tova()},
          {"lfu", lfu()},
          {"lfu:recent=0", lfu()},
          {"a2sf", a2sf(0.98)},
          {"a2sf:keep=0.9", a2sf(0.9)},
          {"a2sf:keep=0.995:sinks=3:recent=4", a2sf(0.995)},
          {"a2sf:keep=1:recent=0", a2sf(1)},
          {"a2sf:keep=0:recent=0", tova()},
          {"h2o_mean", h2o_mean()},
          {"h2o_mean:recent=1", h2o_mean()},
          {"roco", roco(1)},
          {"roco:spread=0:recent=50%", roco(0)},
          {"roco:spread=4:recent=2", roco(4)},
          {"scissorhands", scissorhands(400)},
          {"scissorhands:window=40:recent=3", scissorhands(40)},
          {"lazy_eviction", lazy_eviction()},
          {"lazy_eviction:recent=2:sinks=1", lazy_eviction()},
          {"snapkv:recent=8:once=no:smooth=0", snapkv(32)},
          {"snapkv:window=5:recent=5:once=no:smooth=0", snapkv(5)},
          {"nacl:once=no", nacl(32, 0.35)},
          {"nacl:proxy=6:random=0.8:sinks=0:once=no", nacl(6, 0.8)}};
}

void check(const Paper& paper, const TraceReader& trace, std::uint32_t budget, std::uint32_t chunk,
           std::uint32_t layer, std::uint32_t kv_head) {
  constexpr std::uint32_t kSequence = 2;
  const CacheConfig config{.policy = parse_policy(paper.text, {}, paper.compiled),
                           .budget = {.extent = tokens(budget)},
                           .prefill = {chunk},
                           .seed = 5};
  INFO(paper.text << " budget " << budget << " chunk " << chunk << " layer " << layer << " head "
                  << kv_head);
  check_sets(every_set(trace, kSequence, config, {.plain = true}, layer, kv_head),
             kept_by(paper.formula, trace, kSequence, config, layer, kv_head));
}

TEST_CASE("each policy keeps the tokens of its paper's formula, on random traces") {
  const test::TemporaryFolder folder;
  const TraceReader trace = write_random_trace(
      folder / "trace",
      {.layers = 2,
       .query_heads = 6,
       .kv_heads = 2,
       .head_size = 16,
       .segments = {{0, 70, kPrompt}, {70, 90, kDecode}, {160, 23, kPrompt}, {183, 40, kDecode}},
       .seed = 31});
  for (const Paper& paper : papers()) DYNAMIC_SECTION(paper.text) {
      for (const std::uint32_t budget : {12u, 41u})
        for (const std::uint32_t chunk : {0u, 1u, 9u}) check(paper, trace, budget, chunk, 1, 1);
    }
}

TEST_CASE("each policy keeps the tokens of its paper's formula, on a captured trace") {
  const TraceReader trace = TraceReader::open(KVLAB_SOURCE_DIR "/traces/samples/tiny-story");
  for (const Paper& paper : papers()) DYNAMIC_SECTION(paper.text) {
      check(paper, trace, 48, 0, 2, 1);
    }
}

TEST_CASE("a policy that needs mass and requests gets both, plain and in configuration batches") {
  const test::TemporaryFolder folder;
  const TraceReader trace = write_random_trace(
      folder / "trace", {.layers = 1,
                         .query_heads = 6,
                         .kv_heads = 1,
                         .segments = {{0, 50, kPrompt}, {50, 60, kDecode}, {110, 20, kPrompt}},
                         .seed = 32});
  for (const Paper& paper : that_need_both())
    for (const std::uint32_t budget : {14u, 37u})
      for (const std::uint32_t chunk : {0u, 1u, 9u}) {
        check(paper, trace, budget, chunk, 0, 0);
        for (const Positions positions : {Positions::original, Positions::cache}) {
          const CacheConfig config{.policy = parse_policy(paper.text, {}, paper.compiled),
                                   .budget = {.extent = tokens(budget)},
                                   .prefill = {chunk},
                                   .positions = positions};
          INFO(paper.text << " budget " << budget << " chunk " << chunk);
          check_sets(every_set(trace, 0, config, {}, 0, 0),
                     every_set(trace, 0, config, {.plain = true}, 0, 0));
        }
      }
}

TEST_CASE("a2sf's integers equal the paper's sum except for rounding") {
  const TraceReader trace = TraceReader::open(KVLAB_SOURCE_DIR "/traces/samples/tiny-story");
  const double keep = 0.98;
  double worst = 0;
  const Formula both = [&](const History& history, std::uint32_t token, const Moment& at) {
    const Worth worth = a2sf(keep)(history, token, at);
    const double sum = forgetting_sum(history, token, keep);
    worst = std::max(worst, std::fabs(worth.second / 4294967296.0 - sum));
    return worth;
  };
  const CacheConfig config{.policy = parse_policy("a2sf"), .budget = {.extent = tokens(48)}};
  kept_by(both, trace, 0, config, 1, 0);
  CHECK(worst > 0);
  CHECK(worst < 1e-6);  // one unit is 2.3e-10: 50 queries are rounded, and weights are float32
}

}  // namespace
}  // namespace kvlab::papers
