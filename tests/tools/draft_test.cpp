// Compares the measured acceptance of drafts with the acceptance in a plain model. There, attention
// is in float64, and every draft token attends to the tokens that a replay keeps.
#include <algorithm>
#include <cmath>
#include <map>

#include "engine/capture.hpp"
#include "engine/evaluation/end_to_end.hpp"
#include "sim/replay.hpp"
#include "tests/catch.hpp"
#include "tests/conformance.hpp"
#include "tests/eval_fixture.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"
#include "traces/layer_ropes.hpp"

namespace kvlab {
namespace {

using Ids = std::vector<std::int32_t>;

const Model& tiny() {
  static const Model model = Model::load(KVLAB_SOURCE_DIR "/engine/models/tiny", 2);
  return model;
}

std::vector<double> softmax(std::span<const float> logits) {
  const double max_logit = *std::ranges::max_element(logits);
  std::vector<double> p;
  double sum = 0;
  for (const float x : logits) sum += p.emplace_back(std::exp(double{x} - max_logit));
  for (double& x : p) x /= sum;
  return p;
}

/// The probability that speculative sampling accepts a token: the sum over tokens y of q(y) min(1,
/// p(y) / q(y)).
double accepted(std::span<const float> full, std::span<const float> draft) {
  const std::vector<double> p = softmax(full), q = softmax(draft);
  double sum = 0;
  for (std::size_t y = 0; y < p.size(); ++y)
    if (q[y] > 0) sum += q[y] * std::min(1.0, p[y] / q[y]);
  return sum;
}

TEST_CASE("Acceptance is that of speculative sampling") {
  const std::vector<float> full{0, 1, 2, -1, 0.5f, -3, 4, 0.25f}, peak{0, 0, 0, 0, 0, 0, 0, 90},
      other{90, 0, 0, 0, 0, 0, 0, 0};
  std::vector<float> near = full;
  near[2] += 0.5f, near[6] -= 1;
  for (const auto& draft : {full, near, peak, other})
    CHECK(acceptance_of(full, draft) == Approx(accepted(full, draft)).margin(1e-6));
  CHECK(acceptance_of(full, full) == 1);
  CHECK(acceptance_of(peak, other) < 1e-6);
  CHECK(acceptance_of(full, near) < 0.99);
}

/// Keys, after RoPE, and values of the tokens of one layer, [position][KV head, dim].
struct LayerKv {
  std::map<std::uint32_t, std::vector<float>> k, v;
};

/// A forward pass token by token.
class PlainModel {
 public:
  PlainModel(const Model& model, std::size_t tokens)
      : model_(model),
        config_(model.config()),
        ropes_(config_.rows, static_cast<std::uint32_t>(tokens)) {}

  /// `seen(layer, KV head)`: the positions that the token sees, without itself. Reads their keys
  /// and values from `kv`, and adds the token's own ones.
  template <class Seen>
  std::vector<float> logits(std::int32_t id, std::uint32_t position, Seen seen,
                            std::vector<LayerKv>& kv) const {
    const std::size_t dim = config_.head_size, group = config_.query_heads / config_.kv_heads;
    std::vector<float> x(config_.hidden), q(config_.query_heads * dim), k(config_.kv_heads * dim),
        v(k.size());
    model_.embed({&id, 1}, x.data());
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
      model_.attention_inputs(layer, x.data(), 1, q.data(), k.data(), v.data(), 1);
      for (std::vector<float>* const heads : {&q, &k})
        for (std::size_t at = 0; at < heads->size(); at += dim)
          ropes_[layer].rotate(heads->data() + at, dim, position, heads->data() + at);
      kv[layer].k[position] = k, kv[layer].v[position] = v;
      std::vector<float> out(q.size());
      for (std::size_t h = 0; h < config_.query_heads; ++h) {
        const auto kv_head = static_cast<std::uint32_t>(h / group);
        std::vector<std::uint32_t> positions = seen(layer, kv_head);
        positions.push_back(position);
        attend(kv[layer], positions, kv_head, config_.rows[layer].scale, &q[h * dim],
               &out[h * dim]);
      }
      model_.attention_output(layer, out.data(), 1, x.data(), 1);
      model_.mlp(layer, x.data(), 1, 1);
    }
    std::vector<float> logits(config_.vocab);
    model_.logits(x.data(), 1, logits.data(), 1);
    return logits;
  }

 private:
  void attend(const LayerKv& kv, const std::vector<std::uint32_t>& positions, std::size_t kv_head,
              float scale, const float* q, float* out) const {
    const std::size_t dim = config_.head_size;
    std::vector<float> scores;
    for (const std::uint32_t position : positions) {
      double score = 0;
      for (std::size_t d = 0; d < dim; ++d)
        score += double{q[d]} * double{kv.k.at(position)[kv_head * dim + d]};
      scores.push_back(static_cast<float>(score * double{scale}));
    }
    const std::vector<double> p = softmax(scores);
    for (std::size_t d = 0; d < dim; ++d) {
      double sum = 0;
      for (std::size_t i = 0; i < p.size(); ++i)
        sum += p[i] * double{kv.v.at(positions[i])[kv_head * dim + d]};
      out[d] = static_cast<float>(sum);
    }
  }

  const Model& model_;
  const ModelConfig& config_;
  LayerRopes ropes_;
};

/// A trace of `ids`, and the sets that a replay of it keeps.
class KeptSets {
 public:
  KeptSets(const Ids& ids, std::uint32_t prompt) {
    TraceWriter writer(folder_ / "trace", trace_header(tiny(), {}));
    Capture capture(writer);
    Decoder decoder(tiny(), {}, 2);
    decoder.watch(&capture);
    decoder.feed(std::span(ids).first(prompt), SegmentKind::prompt);
    decoder.feed(std::span(ids).subspan(prompt), SegmentKind::decode);
    writer.finish();
  }

  /// The tokens that each KV head holds when the token at `query` attends, without that token:
  /// [layer][KV head].
  std::vector<std::vector<std::vector<std::uint32_t>>> at(const CacheConfig& config,
                                                          std::uint32_t query) const {
    const TraceReader trace = TraceReader::open(folder_ / "trace");
    const ModelConfig& model = tiny().config();
    std::vector<std::vector<std::vector<std::uint32_t>>> kept(model.layers);
    for (std::uint32_t layer = 0; layer < model.layers; ++layer)
      for (std::uint32_t head = 0; head < model.kv_heads; ++head) {
        auto own = kept_sets(trace, 0, config, {}, layer, head, {&query, 1}).front().positions;
        REQUIRE(own.back() == query);
        own.pop_back();
        kept[layer].push_back({own.begin(), own.end()});
      }
    return kept;
  }

 private:
  test::TemporaryFolder folder_;
};

TEST_CASE("A draft attends over the tokens that a replay keeps and over the drafts before it") {
  constexpr std::uint32_t kTokens = 52, kPrompt = 40;
  const Ids ids = some_tokens(kTokens);
  const KeptSets replayed(ids, kPrompt);
  const PlainModel plain(tiny(), kTokens);
  std::vector<LayerKv> exact(tiny().config().layers);
  std::vector<std::vector<float>> full;
  for (std::uint32_t t = 0; t < kTokens; ++t)
    full.push_back(plain.logits(
        ids[t], t,
        [&](std::uint32_t, std::uint32_t) {
          std::vector<std::uint32_t> all;
          for (std::uint32_t j = 0; j < t; ++j) all.push_back(j);
          return all;
        },
        exact));
  const std::uint32_t budget = 12;
  std::vector<CacheConfig> configs = put_full_first({});
  for (const char* policy :
       {"window", "sink:sinks=2", "h2o", "snapkv:recent=4:once=no", "tova", "h2o:scope=layer"})
    configs.push_back(config_of(policy, budget, Prefill{0}, Positions::original));
  configs.push_back(config_of("h2o", budget, Prefill{1}, Positions::original));
  for (const std::uint32_t draft : {1u, 3u}) {
    const auto scores =
        evaluate_by_layers(tiny(), ids, configs, {.prompt_tokens = kPrompt, .draft = draft});
    for (std::size_t c = 1; c < configs.size(); ++c) {
      INFO(test::text_of(configs[c]) << " draft " << draft);
      double lowest = 1;
      for (std::uint32_t first = kPrompt; first + 1 < kTokens; first += draft) {
        const auto kept = replayed.at(configs[c], first);
        std::vector<LayerKv> drafted = exact;
        for (std::uint32_t t = first; t < std::min(first + draft, kTokens - 1); ++t) {
          const auto logits = plain.logits(
              ids[t], t,
              [&](std::uint32_t layer, std::uint32_t head) {
                std::vector<std::uint32_t> seen = kept[layer][head];
                for (std::uint32_t own = first; own < t; ++own) seen.push_back(own);
                return seen;
              },
              drafted);
          const double expected = accepted(full[t], logits);
          lowest = std::min(lowest, expected);
          CHECK(scores[c].acceptance[t - kPrompt] == Approx(expected).margin(1e-4));
        }
      }
      CHECK(lowest < 0.95);
    }
  }
}

TEST_CASE("The kept sets of drafts depend on the text alone") {
  constexpr std::uint32_t kTokens = 150, kPrompt = 60;
  const Ids ids = some_tokens(kTokens);
  const CacheShape heads = tiny().config().heads();
  const auto configs =
      put_full_first(test::covering({.beside = {"h2o:prompt", "lru*value_norm"},
                                     .tier_plans = {"", "16@12t+4@100%", "8@40%+k4v2@60%"},
                                     .budgets = test::budgets_about(36, heads)},
                                    &kEvaluation, kTokens, heads));
  const auto drafted = [&](std::uint32_t draft) {
    return evaluate_by_layers(tiny(), ids, configs,
                              {.prompt_tokens = kPrompt, .draft = draft, .threads = 2});
  };
  const auto one = drafted(1), five = drafted(5);
  const auto plain =
      evaluate_by_layers(tiny(), ids, configs, {.prompt_tokens = kPrompt, .threads = 2});
  for (std::size_t c = 0; c < configs.size(); ++c) {
    INFO(test::text_of(configs[c]));
    // The first draft token of a window sees the same tokens for any length of the windows.
    for (std::size_t i = 0; i < one[c].acceptance.size(); i += 5)
      CHECK(five[c].acceptance[i] == one[c].acceptance[i]);
    // After a prompt that is appended at once, the cache is that of the plain evaluation. Unlike a
    // decoded token, a draft token is in 16 bit even if the first tier is quantized.
    const bool exact = configs[c].policy.tier_plan.tiers.front().format.exact();
    if (configs[c].prefill.chunk == 0) CHECK((one[c].nll[0] == plain[c].nll[0] || !exact));
  }
}

TEST_CASE("A cache that evicts nothing drafts what the full cache predicts") {
  const Ids ids = some_tokens(120);
  const auto configs = put_full_first({config_of("window", 120, Prefill{0}, Positions::original),
                                       config_of("h2o", 120, Prefill{7}, Positions::original),
                                       config_of("h2o", 30, Prefill{0}, Positions::original)});
  const auto scores =
      evaluate_by_layers(tiny(), ids, configs, {.prompt_tokens = 50, .draft = 4, .threads = 2});
  const auto all_one = [](const TokenScores& own) {
    return std::ranges::all_of(own.acceptance, [](double x) { return x == 1; });
  };
  for (const std::size_t c : {0u, 1u, 2u}) CHECK(all_one(scores[c]));
  CHECK_FALSE(all_one(scores[3]));
  REQUIRE(scores[3].acceptance.size() == 69);
  for (const double x : scores[3].acceptance) CHECK((x > 0 && x <= 1));
}

}  // namespace
}  // namespace kvlab
