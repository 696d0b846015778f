// Tests of the end-to-end evaluation and of verify on a model with sliding windows in most layers.

#include "engine/backend.hpp"
#include "engine/decoder.hpp"
#include "engine/evaluation/end_to_end.hpp"
#include "engine/evaluation/verify.hpp"
#include "engine/sampler.hpp"
#include "sim/head_view.hpp"
#include "sim/live_counts.hpp"
#include "tests/catch.hpp"
#include "tests/engine/windows/gemma_mini.hpp"

using namespace kvlab;
using test::gemma, test::kPrompt, test::kTokens, test::window_ids;

namespace {

CacheConfig config_of(const std::string& policy, Prefill prefill,
                      Positions positions = Positions::original) {
  return {.policy = parse_policy(policy),
          .budget = parse_budget("24"),
          .prefill = prefill,
          .positions = positions};
}

/// -ln p of the token that follows each decoded token except the last, from the decoder.
std::vector<double> decoded(const CacheConfig& config) {
  const auto ids = window_ids();
  Decoder decoder(gemma(), resolve(config, kTokens, 0, gemma().config().heads()), 1);
  decoder.feed(std::span(ids).first(kPrompt), SegmentKind::prompt);
  std::vector<double> nll;
  for (std::size_t i = kPrompt; i + 1 < kTokens; ++i) {
    const auto logits = decoder.feed(std::span(ids).subspan(i, 1), SegmentKind::decode);
    nll.push_back(score_row(logits, logits, ids[i + 1]).nll);
  }
  return nll;
}

}  // namespace

TEST_CASE("The end-to-end evaluation by layers equals the decoder's bits with sliding windows") {
  for (const Prefill prefill : {Prefill{0}, Prefill{7}, Prefill{1}})
    for (const Positions positions : {Positions::original, Positions::cache}) {
      std::vector<CacheConfig> configs{config_of("full", prefill)};
      for (const char* policy :
           {"window", "h2o", "lru", "snapkv:recent=8", "h2o:scope=layer", "criticalkv"})
        configs.push_back(config_of(policy, prefill, positions));
      const auto scores = evaluate_by_layers(gemma(), window_ids(), configs,
                                             {.prompt_tokens = kPrompt, .threads = 2});
      for (std::size_t c = 0; c < configs.size(); ++c) {
        CAPTURE(configs[c].policy.text(), prefill.text(), name_of(positions));
        CHECK(scores[c].nll == decoded(configs[c]));
      }
      CHECK(scores[2].nll != scores[0].nll);
    }
}

TEST_CASE("The engine evicts the simulator's tokens if layers have sliding windows") {
  const auto backend = cpu_backend(gemma(), 2);
  const auto ids = window_ids();
  const std::vector<VerifyTurn> turns{{{ids.begin(), ids.begin() + 50}, 40},
                                      {{ids.begin() + 50, ids.end()}, 20}};
  for (const char* policy :
       {"full", "window", "h2o", "lru", "h2o:scope=layer", "feature:name=key_norm"})
    for (const Prefill prefill : {Prefill{0}, Prefill{16}, Prefill{1}})
      for (const Positions positions : {Positions::original, Positions::cache}) {
        CAPTURE(policy, prefill.text(), name_of(positions));
        const ResolvedConfig cache =
            resolve(config_of(policy, prefill, positions), 150, 0, gemma().config().heads());
        const VerifyReport report =
            verify_decoder(*backend, cache, turns, {.temperature = 1, .seed = 5},
                           {.threads = 2, .reference = &gemma()});
        CHECK(report.first_difference == "");
        CHECK(report.ok());
        CHECK(report.outputs.rows > 0);
        CHECK(report.logits.rows > 0);
        CHECK(report.partings.empty());
        CHECK(report.heads == 8);
        CHECK(report.evictions > 0);  // also under full, because sliding windows evict
      }
}

TEST_CASE("The memory metric counts the layers that a policy acts on") {
  const auto own = [&](const char* policy) {
    ResolvedConfig config =
        resolve(config_of(policy, {}), segments_of(kTokens, kPrompt), 0, gemma().config().heads());
    return memory_of(config, gemma().config().heads());
  };
  // One layer with two heads of size 16, in 16 bit: a token takes 4 * 16 bytes in each head.
  CHECK(own("h2o").peak == 2 * 24 * 4 * 16);
  CHECK(own("full").peak == 2 * kTokens * 4 * 16);
}
