// Tests of model families with experts, sink logits, fused projections or partly rotated heads.
#include <nlohmann/json.hpp>

#include "engine/backend.hpp"
#include "engine/capture.hpp"
#include "engine/evaluation/end_to_end.hpp"
#include "engine/evaluation/verify.hpp"
#include "engine/sampler.hpp"
#include "sim/head_view.hpp"
#include "tests/catch.hpp"
#include "tests/engine/plain_forward.hpp"
#include "tests/engine/windows/gemma_mini.hpp"
#include "tests/traces/temporary_folder.hpp"

using namespace kvlab;
using test::kPrompt, test::kTokens, test::window_ids;

namespace {

const Model& model_of(std::string_view name) {
  static std::map<std::string, Model, std::less<>> models;
  const auto found = models.find(name);
  if (found != models.end()) return found->second;
  return models.emplace(name, Model::load(test::source_path("tests/data/models") / name, 1))
      .first->second;
}

CacheConfig family_config(const std::string& policy, Prefill prefill,
                          Positions positions = Positions::original) {
  return {.policy = parse_policy(policy),
          .budget = parse_budget("24"),
          .prefill = prefill,
          .positions = positions};
}

/// The logits of a prompt and of decoded tokens.
std::vector<float> logits_of(const Model& model, const CacheConfig& config,
                             DecoderObserver* observer = nullptr) {
  const auto ids = window_ids();
  Decoder decoder(model, resolve(config, kTokens, 0, model.config().heads()), 1);
  decoder.watch(observer);
  std::vector<float> logits, one;
  decoder.feed(std::span(ids).first(kPrompt), SegmentKind::prompt, &logits);
  for (std::size_t i = kPrompt; i < kTokens; ++i) {
    decoder.feed(std::span(ids).subspan(i, 1), SegmentKind::decode, &one);
    logits.insert(logits.end(), one.begin(), one.end());
  }
  return logits;
}

constexpr const char* kFamilies[] = {"phi3", "qwen3_moe", "gpt_oss"};

}  // namespace

TEST_CASE("A decoder of each family equals a plain forward pass, for every prefill mode") {
  for (const char* family : kFamilies) {
    CAPTURE(family);
    const Model& model = model_of(family);
    const auto whole = logits_of(model, family_config("full", {}));
    CHECK(test::relative_error(whole, test::plain_forward(model, window_ids(), 1)) < 1e-5);
    for (const std::uint32_t chunk : {1u, 4u, 29u})
      CHECK(logits_of(model, family_config("full", {chunk})) == whole);
    CHECK(logits_of(model, family_config("h2o", {})) != whole);
  }
}

TEST_CASE("A capture of each family verifies, with its sink logits") {
  for (const char* family : kFamilies) {
    CAPTURE(family);
    const test::TemporaryFolder folder;
    const Model& model = model_of(family);
    TraceWriter writer(folder / "trace", trace_header(model, {}));
    Capture capture(writer);
    logits_of(model, family_config("full", {}), &capture);
    writer.finish();
    const TraceReader trace = TraceReader::open(folder / "trace");
    const bool has_sinks = std::string(family) == "gpt_oss";
    CHECK(trace.header().format() == (has_sinks ? 3 : 2));
    for (std::uint32_t layer = 0; layer < model.config().layers; ++layer) {
      CHECK(trace.row(layer).sinks == model.config().rows[layer].sinks);
      CHECK(trace.row(layer).sinks.size() == (has_sinks ? 4 : 0));
    }
    const TraceCheck check = verify_trace(trace, 1);
    CHECK(check.ok);
    CHECK(check.worst_lse < 1e-5);
  }
}

TEST_CASE("The end-to-end evaluation by layers equals the decoder's bits in each family") {
  const auto ids = window_ids();
  for (const char* family : kFamilies)
    for (const Prefill prefill : {Prefill{0}, Prefill{7}, Prefill{1}})
      for (const Positions positions : {Positions::original, Positions::cache}) {
        const Model& model = model_of(family);
        std::vector<CacheConfig> configs{family_config("full", prefill)};
        for (const char* policy : {"window", "h2o", "lru", "snapkv:recent=8", "h2o:scope=layer"})
          configs.push_back(family_config(policy, prefill, positions));
        const auto scores =
            evaluate_by_layers(model, ids, configs, {.prompt_tokens = kPrompt, .threads = 2});
        for (std::size_t c = 0; c < configs.size(); ++c) {
          CAPTURE(family, configs[c].policy.text(), prefill.text(), name_of(positions));
          const auto logits = logits_of(model, configs[c]);
          const std::size_t vocab = model.config().vocab;
          std::vector<double> nll;
          for (std::size_t i = kPrompt; i + 1 < kTokens; ++i) {
            const auto row = std::span(logits).subspan(i * vocab, vocab);
            nll.push_back(score_row(row, row, ids[i + 1]).nll);
          }
          CHECK(scores[c].nll == nll);
        }
      }
}

TEST_CASE("The engine evicts the simulator's tokens in each family") {
  const auto ids = window_ids();
  const std::vector<VerifyTurn> turns{{{ids.begin(), ids.begin() + 50}, 40},
                                      {{ids.begin() + 50, ids.end()}, 20}};
  for (const char* family : kFamilies)
    for (const char* policy :
         {"window", "h2o", "lru", "tova", "h2o:scope=layer", "feature:name=key_norm"})
      for (const Prefill prefill : {Prefill{0}, Prefill{16}, Prefill{1}})
        for (const Positions positions : {Positions::original, Positions::cache}) {
          CAPTURE(family, policy, prefill.text(), name_of(positions));
          const Model& model = model_of(family);
          const auto backend = cpu_backend(model, 2);
          const ResolvedConfig cache =
              resolve(family_config(policy, prefill, positions), 150, 0, model.config().heads());
          const VerifyReport report =
              verify_decoder(*backend, cache, turns, {.temperature = 1, .seed = 5},
                             {.threads = 2, .reference = &model});
          CHECK(report.first_difference == "");
          CHECK(report.ok());
          CHECK(report.outputs.rows > 0);
          CHECK(report.logits.rows > 0);
          CHECK(report.partings.empty());
          CHECK(report.evictions > 0);
        }
}
