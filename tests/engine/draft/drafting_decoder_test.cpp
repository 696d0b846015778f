#include "engine/draft/drafting_decoder.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "policies/executor.hpp"
#include "sim/cache/growing_rope.hpp"
#include "sim/cache/layer_cache.hpp"
#include "tests/catch.hpp"
#include "tests/conformance.hpp"
#include "tests/engine/windows/gemma_mini.hpp"

using namespace kvlab;

namespace {

constexpr std::uint32_t kPromptTokens = 70, kTurnTokens = 20, kAnswer = 30;
constexpr std::uint32_t kLength = kPromptTokens + kTurnTokens + 2 * kAnswer;

const Model& tiny() {
  static const Model model = Model::load(KVLAB_SOURCE_DIR "/engine/models/tiny", 1);
  return model;
}

std::vector<std::int32_t> some_ids(std::size_t count, std::uint32_t vocab) {
  std::vector<std::int32_t> ids{0};
  for (std::uint32_t x = 1; ids.size() < count;) {
    x = x * 1664525u + 1013904223u;
    ids.push_back(static_cast<std::int32_t>((x >> 8) % vocab));
  }
  return ids;
}

/// The ids of two turns' answers, the second of which stops at its tenth token.
std::vector<std::int32_t> answers(SequenceDecoder& decoder, const Model& model,
                                  SamplingOptions sampling = {}) {
  const auto ids = some_ids(kPromptTokens + kTurnTokens, model.config().vocab);
  Sampler sampler(sampling);
  std::vector<std::int32_t> answer;
  decoder.feed(std::span(ids).first(kPromptTokens), SegmentKind::prompt);
  decoder.extend(sampler, kAnswer, [&](std::int32_t id) { return answer.push_back(id), true; });
  CHECK(answer.size() == kAnswer);
  CHECK(decoder.tokens() == kPromptTokens + kAnswer - 1);
  decoder.feed({&answer.back(), 1}, SegmentKind::decode);
  decoder.feed(std::span(ids).subspan(kPromptTokens), SegmentKind::prompt);
  decoder.extend(sampler, kAnswer, [&](std::int32_t id) {
    answer.push_back(id);
    return answer.size() < kAnswer + 10;
  });
  CHECK(answer.size() == kAnswer + 10);
  CHECK(decoder.tokens() == kPromptTokens + kAnswer + kTurnTokens + 9);
  return answer;
}

ResolvedConfig drafter_of(const Model& model, const std::string& policy, std::uint32_t budget,
                          Prefill prefill = {}) {
  CacheConfig config{.policy = parse_policy(policy), .prefill = prefill};
  config.budget = {.extent = tokens(budget)};
  config.positions = config.policy.entry->info.positions;
  return resolve(config, kLength, 0, model.config().heads());
}

/// Collects a decoder's queries, keys and values [layer][token, heads, dim].
class Rows : public DecoderObserver {
 public:
  struct Layer {
    std::vector<float> q, k, v;
  };
  explicit Rows(std::uint32_t count) : layers(count) {}
  void layer(std::uint32_t layer, std::span<const float> q, std::span<const float> k,
             std::span<const float> v, std::span<const float>, std::span<const float>) override {
    Layer& own = layers[layer];
    own.q.insert(own.q.end(), q.begin(), q.end());
    own.k.insert(own.k.end(), k.begin(), k.end());
    own.v.insert(own.v.end(), v.begin(), v.end());
  }
  std::vector<Layer> layers;
};

}  // namespace

TEST_CASE("Greedy text with drafts is the full cache's, token for token, for every policy") {
  Decoder full(tiny(), {}, 1);
  const auto expected = answers(full, tiny());
  const CacheShape heads = tiny().config().heads();
  const test::Choices choices{
      .modifiers = {"own", ":every=16:smooth=3:pool=max", ":scope=layer:every=5"},
      .tier_plans = {"", "4", "16@12t+4@100%"},
      .budgets = {parse_budget("24"), parse_budget("ada(24)")}};
  const std::vector<TreeShape> shapes{chain(1), chain(3), chain(7), {{0, 0, 0, 1, 1, 2, 3}}};
  std::size_t next = 0;
  for (const CacheConfig& config : test::covering(choices, &kDecoder, kLength, heads)) {
    const TreeShape& shape = shapes[next++ % shapes.size()];
    CAPTURE(test::text_of(config), shape.parents);
    DraftingDecoder drafting(tiny(), resolve(config, kLength, 0, heads), {.shape = shape}, 1);
    CHECK(answers(drafting, tiny()) == expected);
    const DraftStats stats = drafting.stats();
    CHECK(stats.verifications > 0);
    CHECK(stats.accepted <= stats.verifications * shape.depth());
  }
}

TEST_CASE("Greedy text with a planned tree is the full cache's, and threads do not change it",
          "[threads]") {
  Decoder full(tiny(), {}, 1);
  const auto expected = answers(full, tiny());
  DraftingDecoder drafting(tiny(), drafter_of(tiny(), "h2o", 24), {.planned_nodes = 8}, 3);
  CHECK(answers(drafting, tiny()) == expected);
}

TEST_CASE("Drafts work in models with sliding windows") {
  const Model& model = test::gemma();
  Decoder full(model, {}, 1);
  const auto expected = answers(full, model);
  const TreeShape shape = GENERATE(chain(4), chain(14), TreeShape{{0, 0, 0, 1, 2, 2}});
  DraftingDecoder drafting(model, drafter_of(model, "sink", 20), {.shape = shape}, 1);
  CHECK(answers(drafting, model) == expected);
}

TEST_CASE("A drafter with the full cache is always accepted") {
  const double temperature = GENERATE(0.0, 1.0);
  DraftingDecoder drafting(tiny(), drafter_of(tiny(), "h2o", kLength), {.shape = chain(3)}, 1);
  answers(drafting, tiny(), {.temperature = temperature, .seed = 7});
  const DraftStats stats = drafting.stats();
  REQUIRE(stats.by_depth.size() == 3);
  for (const DraftStats::Count& depth : stats.by_depth) CHECK(depth.accepted == depth.tested);
  CHECK(stats.acceptance() == 1);
  CHECK(stats.tokens_per_verification() > 3);
}

TEST_CASE("What a drafter keeps depends on the text alone: it is what a replay of the text keeps") {
  const std::string policy = GENERATE("h2o", "tova", "lru", "random", "sink", "h2o:scope=layer");
  const Prefill prefill = GENERATE(Prefill{0}, Prefill{16}, Prefill{1});
  CAPTURE(policy, prefill.text());
  const Model& model = tiny();
  const ModelConfig& config = model.config();
  const ResolvedConfig cache = drafter_of(model, policy, 24, prefill);
  DraftingDecoder drafting(model, cache, {.shape = chain(3)}, 1);
  const auto prompt = some_ids(kPromptTokens, config.vocab);
  std::vector<std::int32_t> text = prompt;
  Sampler sampler({.temperature = 1, .seed = 3});
  drafting.feed(prompt, SegmentKind::prompt);
  drafting.extend(sampler, kAnswer, [&](std::int32_t id) { return text.push_back(id), true; });
  text.pop_back();  // the last token is not fed
  REQUIRE(drafting.tokens() == text.size());
  CHECK(drafting.stats().accepted < 3 * drafting.stats().verifications);

  Rows rows(config.layers);
  Decoder full(model, {}, 1);
  full.watch(&rows);
  full.feed(text, SegmentKind::prompt);
  for (std::uint32_t layer = 0; layer < config.layers; ++layer) {
    const RowSpec& row = config.rows[layer];
    LayerCache replay(cache,
                      {.head_size = config.head_size,
                       .group = config.query_heads / config.kv_heads,
                       .positions = cache.positions_of(layer),
                       .softmax_scale = row.scale,
                       .threshold16 = cache.threshold16()},
                      config.kv_heads, layer);
    GrowingRope rope(row.rope);
    const Rows::Layer& own = rows.layers[layer];
    const auto step = [&](std::uint32_t first, std::uint32_t count) {
      const std::size_t kv = std::size_t{first} * config.kv_heads * config.head_size;
      replay.step({.first = first,
                   .tokens = count,
                   .q = &own.q[std::size_t{first} * config.query_heads * config.head_size],
                   .k = &own.k[kv],
                   .v = &own.v[kv],
                   .out = nullptr},
                  rope.covering(first + count), 1);
    };
    const std::uint32_t chunk = prefill.chunk ? prefill.chunk : kPromptTokens;
    for (std::uint32_t first = 0; first < kPromptTokens; first += chunk)
      step(first, std::min(chunk, kPromptTokens - first));
    replay.end_prompt();
    for (std::uint32_t first = kPromptTokens; first < text.size(); ++first) step(first, 1);
    for (std::uint32_t head = 0; head < config.kv_heads; ++head) {
      const LiveSet& expected = replay.heads()[head].live();
      const LiveSet& found = drafting.drafter().live(layer, head);
      REQUIRE(std::ranges::equal(found.positions(), expected.positions()));
      for (std::size_t age = 0; age < found.size(); ++age)
        CHECK(found.has_state(age, expected.state(age)));
    }
  }
}

TEST_CASE("The logits of a tree's nodes have the bits of their paths") {
  const Model& model = tiny();
  const auto ids = some_ids(40, model.config().vocab);
  const TreeShape shape{{0, 0, 0, 1, 1, 2, 4}};
  const std::vector<std::int32_t> drafts{5, 9, 17, 4, 9, 31, 2};
  Decoder decoder(model, {}, 1);
  decoder.feed(ids, SegmentKind::prompt);
  DraftRows rows;
  const auto found = decoder.draft(rows, drafts, shape.parents);
  CHECK(decoder.tokens() == ids.size());
  for (std::size_t node = 0; node < drafts.size(); ++node) {
    Decoder alone(model, {}, 1);
    alone.feed(ids, SegmentKind::prompt);
    std::span<const float> expected;
    for (const std::uint32_t each : rows.paths[node])
      expected = alone.feed({&drafts[each], 1}, SegmentKind::decode);
    CHECK(std::ranges::equal(found.subspan(node * model.config().vocab, model.config().vocab),
                             expected));
  }
}

TEST_CASE("The same seed gives the same sampled text") {
  const auto sampled = [&](std::uint64_t seed) {
    DraftingDecoder drafting(tiny(), drafter_of(tiny(), "h2o", 24), {.shape = chain(3)}, 1);
    return answers(drafting, tiny(), {.temperature = 1, .seed = seed});
  };
  CHECK(sampled(1) == sampled(1));
  CHECK(sampled(1) != sampled(2));
}

TEST_CASE("A drafting decoder refuses trees that are too large, and to extend nothing") {
  const ResolvedConfig drafter = drafter_of(tiny(), "h2o", 24);
  CHECK_THROWS_WITH(DraftingDecoder(tiny(), drafter, {.shape = chain(kMaxTreeNodes)}, 1),
                    "draft: a tree of 257 nodes is too large; it should have at most 256");
  CHECK_THROWS_AS(DraftingDecoder(tiny(), drafter, {.planned_nodes = 4096}, 1),
                  std::invalid_argument);
  DraftingDecoder drafting(tiny(), drafter, {}, 1);
  Sampler sampler({});
  CHECK_THROWS_AS(drafting.extend(sampler, 1, [](std::int32_t) { return true; }),
                  std::invalid_argument);
  CHECK_THROWS_AS(drafting.feed({}, SegmentKind::prompt), std::invalid_argument);
}
