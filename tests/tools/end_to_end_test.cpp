// Compares the end-to-end evaluation by layers with the decoder, which runs token by token.
#include "engine/evaluation/end_to_end.hpp"

#include <cmath>
#include <memory>

#include "engine/backend.hpp"
#include "engine/decoder.hpp"
#include "sim/access/feature_traces.hpp"
#include "tests/catch.hpp"
#include "tests/conformance.hpp"
#include "tests/error_of.hpp"
#include "tests/eval_fixture.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"
#include "traces/extras.hpp"

namespace kvlab {
namespace {

const std::string kModel = KVLAB_SOURCE_DIR "/engine/models/tiny";

/// -ln p of the token that follows each decoded token except the last, from the decoder.
std::vector<double> decode(const Model& model, const std::vector<std::int32_t>& ids,
                           std::uint32_t prompt, const CacheConfig& config) {
  const auto length = static_cast<std::uint32_t>(ids.size());
  Decoder decoder(model, resolve(config.at_prompt(prompt), length, 0, model.config().heads()), 1);
  decoder.feed(std::span(ids).first(prompt), SegmentKind::prompt);
  std::vector<double> nll;
  for (std::size_t i = prompt; i + 1 < ids.size(); ++i) {
    const auto logits = decoder.feed(std::span(ids).subspan(i, 1), SegmentKind::decode);
    double sum = 0, largest = logits[0];
    for (const float l : logits) largest = std::max(largest, static_cast<double>(l));
    for (const float l : logits) sum += std::exp(static_cast<double>(l) - largest);
    nll.push_back(largest + std::log(sum) -
                  static_cast<double>(logits[static_cast<std::size_t>(ids[i + 1])]));
  }
  return nll;
}

TEST_CASE("The end-to-end evaluation by layers gives every token the decoder's log-likelihood") {
  const Model model = Model::load(kModel, 2);
  const std::vector<std::int32_t> ids = some_tokens(180);
  const std::uint32_t prompt = 60;
  const CacheShape heads = model.config().heads();
  const auto configs =
      put_full_first(test::covering({.beside = {"h2o:prompt", "lru*value_norm"},
                                     .tier_plans = {"", "16@12t+4@100%", "8@40%+k4v2@60%"},
                                     .budgets = test::budgets_about(36, heads)},
                                    &kDecoder, 180, heads));
  const auto scores =
      evaluate_by_layers(model, ids, configs, {.prompt_tokens = prompt, .threads = 2});
  for (std::size_t c = 0; c < configs.size(); ++c) {
    INFO(test::text_of(configs[c]));
    const std::vector<double> expected = decode(model, ids, prompt, configs[c]);
    REQUIRE(scores[c].nll.size() == expected.size());
    double worst = 0;
    for (std::size_t i = 0; i < expected.size(); ++i)
      worst = std::max(worst, std::fabs(scores[c].nll[i] - expected[i]));
    CHECK(worst <= 1e-4);
  }
}

TEST_CASE("The end-to-end evaluation runs KIVI, and counts its bytes") {
  const Model model = Model::load(kModel, 2);
  const auto configs = put_full_first(
      {{.policy = parse_policy("full:tiers=kivi4")}, {.policy = parse_policy("full:tiers=kivi2")}});
  const auto scores =
      evaluate_by_layers(model, some_tokens(180), configs, {.prompt_tokens = 140, .threads = 1});
  const auto worst = [&](std::size_t c) { return std::ranges::max(scores[c].kl); };
  CHECK(worst(1) > 0);
  CHECK(worst(1) < worst(2));
  // The peak is at the end of the prompt, whose tokens are not quantized yet.
  CHECK(scores[2].kv_bytes_peak == 8 * 140 * 2 * 64 * 4);
}

TEST_CASE("The end-to-end evaluation counts the bytes of budgets by layer and KV head") {
  const Model model = Model::load(kModel, 2);
  CacheConfig config = config_of("h2o", 40, Prefill{1}, Positions::original);
  config.budget = budget_of_heads({{20, 25}, {30, 35}, {40, 45}, {50, 55}});
  const std::vector<CacheConfig> configs = put_full_first({config});
  const auto scores =
      evaluate_by_layers(model, some_tokens(120), configs, {.prompt_tokens = 50, .threads = 1});
  CHECK(scores[1].kv_bytes_peak == (20 + 25 + 30 + 35 + 40 + 45 + 50 + 55) * 2 * 64 * 4);
}

TEST_CASE("On tiers, the end-to-end evaluation gives the decoder's log-likelihood and bytes") {
  const Model model = Model::load(kModel, 2);
  const std::vector<std::int32_t> ids = some_tokens(120);
  std::vector<CacheConfig> configs{{}};
  for (const char* policy :
       {"full:tiers=8", "h2o:tiers=16@8t+4@100%", "window:every=9:tiers=fp8@50%+k4v2@50%"})
    for (const Prefill prefill : {Prefill{0}, Prefill{7}, Prefill{1}})
      configs.push_back(
          {.policy = parse_policy(policy), .budget = {.extent = tokens(16)}, .prefill = prefill});
  for (const char* policy : {"full:tiers=4:centre=prompt", "h2o:tiers=16@8t+4@100%:centre=prompt"})
    configs.push_back({.policy = parse_policy(policy), .budget = {.extent = tokens(16)}});
  for (const Prefill prefill : {Prefill{0}, Prefill{1}}) {
    configs.push_back({.policy = parse_policy("h2o:tiers=4:centre=@c.safetensors"),
                       .budget = {.extent = tokens(16)},
                       .prefill = prefill});
    configs.back().policy.centre.constants = test::some_centres(model.config().heads());
  }
  const auto scores = evaluate_by_layers(model, ids, configs, {.prompt_tokens = 50, .threads = 1});
  const auto backend = cpu_backend(model, 1);
  const auto by_tokens =
      evaluate_by_tokens(*backend, ids, configs, {.prompt_tokens = 50, .threads = 1});
  for (std::size_t c = 1; c < configs.size(); ++c) {
    INFO(configs[c].policy.text() << " prefill " << configs[c].prefill.text());
    const std::vector<double> expected = decode(model, ids, 50, configs[c]);
    for (std::size_t i = 0; i < expected.size(); ++i)
      REQUIRE(std::fabs(scores[c].nll[i] - expected[i]) <= 1e-4);
    CHECK(scores[c].kv_bytes_peak == by_tokens[c].kv_bytes_peak);
    CHECK(scores[c].kv_bytes_peak < scores[0].kv_bytes_peak);
  }
}

TEST_CASE(
    "Equal tiers give the bits of one tier, in the end-to-end evaluation and in the decoder") {
  const Model model = Model::load(kModel, 2);
  const std::vector<std::int32_t> ids = some_tokens(120);
  const auto backend = cpu_backend(model, 1);
  std::vector<CacheConfig> configs{{}};
  for (const std::string policy : {"h2o", "random:every=6", "lru:sinks=2:scope=layer"})
    for (const char* tier_plan : {"16", "16@50%+16@50%", "4", "4@50%+4@50%"})
      configs.push_back({.policy = parse_policy(policy + ":tiers=" + tier_plan),
                         .budget = {.extent = tokens(17)}});
  const SequenceOptions options{.prompt_tokens = 50, .threads = 1};
  for (const auto& scores : {evaluate_by_layers(model, ids, configs, options),
                             evaluate_by_tokens(*backend, ids, configs, options)})
    for (std::size_t c = 1; c < configs.size(); c += 2) {
      INFO(configs[c].policy.text());
      CHECK(scores[c].nll == scores[c + 1].nll);
      CHECK(scores[c].nll != scores[0].nll);
    }
}

/// Writes a trace of `ids` with the feature `mine`, the norm of a token's key.
void write_trace(Backend& backend, std::span<const std::int32_t> ids,
                 const std::filesystem::path& path) {
  TraceWriter writer(path, backend.trace_header({}));
  const auto decoder = backend.capturing_decoder(
      ResolvedConfig{}, static_cast<std::uint32_t>(ids.size()), writer, {});
  decoder->feed(ids, SegmentKind::prompt);
  decoder->flush();
  writer.finish();
  const TraceReader trace = TraceReader::open(path);
  const std::uint32_t size = trace.shape().head_size;
  FeatureMaker maker({"key_norm"}, size);
  std::vector<float> key(size);
  write_feature(path, "mine", [&](std::uint32_t layer, std::uint32_t head, std::uint32_t token) {
    trace.read(Part::k, layer, head, token, 1, key.data());
    return *maker.append({key.data(), key.data(), size, 1}, nullptr, 0);
  });
}

CacheConfig feature_config(const std::string& policy, std::shared_ptr<const FeatureSource> source) {
  CompiledPolicies known;
  known.feature_source = std::move(source);
  return {.policy = parse_policy(policy, {}, known), .budget = {.extent = tokens(16)}};
}

TEST_CASE(
    "A feature from a trace of the prompt gives the same results as the computed feature, in both "
    "evaluations") {
  const Model model = Model::load(kModel, 1);
  const auto backend = cpu_backend(model, 1);
  const std::vector<std::int32_t> ids = some_tokens(90);
  const test::TemporaryFolder folder;
  const std::string path = folder.path() / "trace";
  write_trace(*backend, std::span(ids).first(60), path);
  const auto source = std::make_shared<const FeatureTraces>(std::vector{path}, 1);
  std::vector<CacheConfig> configs{{}};
  for (const Prefill prefill : {Prefill{0}, Prefill{7}})
    for (const char* policy :
         {"knorm:once", "feature:name=mine:keep=-1:once", "feature:name=mine:once"}) {
      configs.push_back(feature_config(policy, source));
      configs.back().prefill = prefill;
    }
  const SequenceOptions options{.prompt_tokens = 50, .threads = 1};
  for (const auto& scores : {evaluate_by_layers(model, ids, configs, options),
                             evaluate_by_tokens(*backend, ids, configs, options)})
    for (const std::size_t c : {1u, 4u}) {
      CHECK(scores[c].nll == scores[c + 1].nll);
      CHECK(scores[c].nll != scores[c + 2].nll);
      CHECK(scores[c].nll != scores[0].nll);
    }

  const auto refused = [&](const std::string& policy, std::uint32_t prompt, std::int32_t first) {
    std::vector<std::int32_t> own = ids;
    own[0] = first;
    const std::vector<CacheConfig> one{feature_config(policy, source)};
    return test::error_of<std::invalid_argument>(
        [&] { evaluate_by_layers(model, own, one, {.prompt_tokens = prompt, .threads = 1}); });
  };
  const std::string mine = "feature:name=mine:once", trace = "--features: the trace " + path;
  CHECK(refused(mine, 60, ids[0]) == "");
  CHECK(refused(mine, 61, ids[0]) ==
        "--features: none of the 1 traces begins with the prompt of 61 tokens; capture exactly "
        "this text");
  CHECK(refused(mine, 50, ids[0] + 1).starts_with("--features: none of the 1 traces begins"));
  CHECK(refused("feature:name=other:once", 50, ids[0]) ==
        trace + " has no feature other; python -m kvlab.hf features or Trace.add_feature adds it");
  CHECK(refused("feature:name=mine", 50, ids[0]) ==
        "policy feature: feature mine: decoded tokens have no such feature, so they cannot be "
        "ranked; use feature:once");
  for (const CacheShape& heads : {CacheShape{3, 2, 64}, CacheShape{4, 1, 64}, CacheShape{4, 2, 32}})
    CHECK(test::error_of<std::invalid_argument>([&] {
            source->reader_of(std::span(ids).first(50), {"mine"}, heads);
          }).starts_with(trace + " has 4 layers without a window, 2 KV heads and head size 64"));
}

TEST_CASE("A product of a rank and a feature equals a policy that computes this product itself") {
  const Model model = Model::load(kModel, 1);
  const auto backend = cpu_backend(model, 1);
  const std::vector<std::int32_t> ids = some_tokens(90);
  std::vector<CacheConfig> configs{{}};
  for (const char* policy :
       {"vatp", "h2o*value_norm1", "vatp:every=5:scope=layer:smooth=1",
        "h2o*value_norm1:every=5:scope=layer:smooth=1", "feature*key_norm:name=value_norm1",
        "feature*value_norm1:name=key_norm", "vatp*key_norm", "h2o*value_norm1"})
    configs.push_back(feature_config(policy, nullptr));
  const SequenceOptions options{.prompt_tokens = 50, .threads = 1};
  for (const auto& scores : {evaluate_by_layers(model, ids, configs, options),
                             evaluate_by_tokens(*backend, ids, configs, options)})
    for (std::size_t c = 1; c < configs.size(); c += 2) {
      INFO(configs[c].policy.text());
      CHECK((scores[c].nll == scores[c + 1].nll) == (c < 7));
      CHECK(scores[c].nll != scores[0].nll);
    }
}

TEST_CASE("A sequence without tokens to score is refused") {
  const Model model = Model::load(kModel, 1);
  const std::vector<std::int32_t> ids{0, 5, 6};
  const std::vector<CacheConfig> configs{config_of("full", 1, Prefill{1}, Positions::original)};
  CHECK_THROWS_AS(evaluate_by_layers(model, ids, configs, {.prompt_tokens = 3}),
                  std::invalid_argument);
}

}  // namespace
}  // namespace kvlab
