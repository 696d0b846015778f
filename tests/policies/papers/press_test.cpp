// Compares policies with other projects' code on the same queries, keys and values. kvpress's
// presses must rank a prompt's tokens in the same order. The caches of H2O's and StreamingLLM's
// authors must keep the same sets at every query. tests/fixtures/make_press_fixtures.py ran that
// code and recorded its results.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "sim/replay.hpp"
#include "tests/catch.hpp"
#include "tests/sim/brute_force.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/traces/extra_files.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using Tokens = std::vector<std::uint32_t>;

const nlohmann::json& fixture() {
  static const std::string path = KVLAB_SOURCE_DIR "/tests/data/policies/presses.json";
  static const nlohmann::json read = parse_json(read_text_file(path, 1 << 20), path);
  return read;
}

/// A prompt's data: tensors (if random), scores and features.
const nlohmann::json& random_prompt() { return fixture().at("random"); }
const nlohmann::json& captured_prompt() { return fixture().at("captured"); }

std::uint32_t length_of(const nlohmann::json& prompt) {
  return prompt.at("prompt").get<std::uint32_t>();
}

/// One layer: a prompt, then decoding.
brute::Sequence sequence(std::vector<brute::Matrix> q, std::vector<brute::Matrix> k,
                         std::vector<brute::Matrix> v, std::vector<float> inv_freq,
                         std::uint32_t prompt) {
  brute::Sequence s;
  s.query_heads = static_cast<std::uint32_t>(q.size());
  s.kv_heads = static_cast<std::uint32_t>(k.size());
  s.tokens = static_cast<std::uint32_t>(k[0].size());
  s.head_size = static_cast<std::uint32_t>(k[0][0].size());
  s.scale = 1 / std::sqrt(static_cast<double>(s.head_size));
  s.inv_freq = std::move(inv_freq);
  s.segments = {{0, prompt, SegmentKind::prompt}, {prompt, s.tokens - prompt, SegmentKind::decode}};
  s.q = {std::move(q)}, s.k = {std::move(k)}, s.v = {std::move(v)};
  return s;
}

/// The random tensors with every `stride`-th query head. With a stride of 2, each KV head has one
/// query head.
brute::Sequence random_sequence(std::size_t stride) {
  const nlohmann::json& sampled = random_prompt();
  const double unit = sampled.at("unit").get<double>();
  const auto heads = [&](const char* name, std::size_t every) {
    std::vector<brute::Matrix> picked;
    const auto all = sampled.at(name).get<std::vector<brute::Matrix>>();
    for (std::size_t head = 0; head < all.size(); head += every) picked.push_back(all[head]);
    for (brute::Matrix& head : picked)
      for (brute::Vector& row : head)
        for (double& x : row) x /= unit;
    return picked;
  };
  return sequence(heads("q", stride), heads("k", 1), heads("v", 1),
                  sampled.at("inv_freq").get<std::vector<float>>(), length_of(sampled));
}

/// The first tokens of one layer of the sample trace as a prompt, and one decoded token.
brute::Sequence captured_sequence() {
  const TraceReader sample = TraceReader::open(KVLAB_SOURCE_DIR "/traces/samples/tiny-story");
  const auto layer = captured_prompt().at("layer").get<std::uint32_t>();
  const std::uint32_t count = length_of(captured_prompt()) + 1, size = sample.shape().head_size;
  const auto heads = [&](Part part, std::uint32_t number) {
    std::vector<brute::Matrix> all(number, brute::Matrix(count));
    std::vector<float> read(std::size_t{count} * size);
    for (std::uint32_t head = 0; head < number; ++head) {
      sample.read(part, layer, head, 0, count, read.data());
      for (std::uint32_t t = 0; t < count; ++t)
        all[head][t].assign(read.begin() + t * size, read.begin() + (t + 1) * size);
    }
    return all;
  };
  return sequence(heads(Part::q, sample.shape().query_heads),
                  heads(Part::k, sample.shape().kv_heads), heads(Part::v, sample.shape().kv_heads),
                  sample.header().rope.inv_freq, count - 1);
}

/// Converts [head][token, dim] to [token, head, dim], for the tokens of a segment.
std::vector<float> interleave(const std::vector<brute::Matrix>& parts, const Segment& segment) {
  std::vector<float> all;
  for (std::uint32_t t = segment.start; t < segment.start + segment.tokens; ++t)
    for (const brute::Matrix& head : parts)
      for (const double x : head[t]) all.push_back(static_cast<float>(x));
  return all;
}

void write(const std::filesystem::path& directory, const brute::Sequence& s) {
  TraceHeader header;
  header.shape = {s.layers, s.query_heads, s.kv_heads, s.head_size, Dtype::f32};
  header.rope.inv_freq = s.inv_freq;
  header.softmax_scale = static_cast<float>(s.scale);
  const brute::Simulator exact(s);
  std::vector<brute::Matrix> out, lse;
  for (std::uint32_t head = 0; head < s.query_heads; ++head) {
    out.push_back(exact.outputs(0, head));
    brute::Matrix& sums = lse.emplace_back();
    for (std::uint32_t t = 0; t < s.tokens; ++t) sums.push_back({exact.log_sum(0, head, t)});
  }
  TraceWriter writer(directory, header);
  for (const Segment& segment : s.segments) {
    writer.begin(std::vector<std::int32_t>(segment.tokens, 7), segment.kind, true);
    writer.layer(0, interleave(s.q[0], segment), interleave(s.k[0], segment),
                 interleave(s.v[0], segment), interleave(out, segment), interleave(lse, segment));
    writer.end();
  }
  writer.finish();
}

/// Writes the features that the policies read, as kvpress computes them; 0 for decoded tokens.
void add_trace_features(const std::filesystem::path& directory, const nlohmann::json& prompt) {
  for (const auto& [name, by_head] : prompt.at("features").items()) {
    const auto values = by_head.get<std::vector<std::vector<float>>>();
    test::write_feature(directory, name, [&](auto, std::uint32_t kv_head, std::uint32_t token) {
      return token < values[kv_head].size() ? values[kv_head][token] : 0.0f;
    });
  }
}

/// The order in which the policy evicts the prompt's tokens, first victim first. To find it, the
/// budget is lowered by one token at a time, down to the protected tokens. At each budget, the
/// token that the first decoded query no longer sees is the next victim.
Tokens eviction_order(const TraceReader& trace, const std::string& policy, std::uint32_t kv_head) {
  const PolicySpec spec = parse_policy(policy);
  const std::uint32_t prompt = trace.prompt_tokens(), query[] = {prompt};
  const std::uint32_t sinks = spec.sinks.resolve(prompt), recent = spec.recent.resolve(prompt);
  Tokens order, before(prompt);
  std::iota(before.begin(), before.end(), 0u);
  for (std::uint32_t budget = prompt; budget >= std::max(sinks + recent, sinks + 1); --budget) {
    const CacheConfig config{.policy = spec, .budget = {.extent = tokens(budget)}};
    Tokens kept = kept_sets(trace, 0, config, {.plain = true}, 0, kv_head, query)[0].positions;
    REQUIRE(kept.size() == budget);  // the query's token included
    REQUIRE(kept.back() == prompt);
    kept.pop_back();
    std::set_difference(before.begin(), before.end(), kept.begin(), kept.end(),
                        std::back_inserter(order));
    // A token that is evicted at a larger budget is not kept at a smaller one.
    REQUIRE(order.size() + kept.size() == prompt);
    before = kept;
  }
  return order;
}

/// The same tokens ordered by score, lowest first; at equal scores the older one first.
Tokens by_scores(Tokens order, const std::vector<double>& scores) {
  std::sort(order.begin(), order.end());
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return scores[a] < scores[b]; });
  return order;
}

/// Whether scores ascend in this order. Small descents are allowed, because scores are rounded to
/// float32 and to multiples of 2^-32.
bool ascends(const Tokens& order, const std::vector<double>& scores) {
  double max_score = std::numeric_limits<double>::lowest();
  return std::ranges::all_of(order, [&](std::uint32_t token) {
    max_score = std::max(max_score, scores[token]);
    return max_score - scores[token] <= 1e-5 * std::fabs(max_score) + 1e-8;
  });
}

struct Pair {
  std::string press, policy;
  /// Whether the two tokens at each end of the pooled range may have other ranks than in the press;
  /// see pairs().
  bool pooled = false;
};

/// The pairs of a press and a policy. Their differences are explained here and in
/// docs/reference/policies.md. All have `once`, because a press scores a prompt once.
std::vector<Pair> pairs() {
  return {
      // kvpress never evicts the prompt's last token; here it is protected.
      {"tova", "tova:once:scope=layer:recent=2"},
      {"snapkv", "snapkv:smooth=0:window=8:recent=9"},
      // At the ends of the pooled range, kvpress counts missing neighbours as zeros. kvlab leaves
      // them out, and it counts the window's tokens as neighbours.
      {"snapkv_pooled", "snapkv:window=8:recent=9", true},
      {"observed_attention", "h2o:preset=kvpress"},
      {"observed_attention", "h2o_mean:once:recent=0"},
      {"knorm", "knorm:once"},
      // The press was given keys before RoPE, because kvlab compares those.
      {"keydiff", "keydiff:once"},
      // For the recorded scores, the press used sums over queries instead of means, and its first
      // stage and its epsilon were turned off.
      {"criticalkv", "criticalkv:once:recent=0:epsilon=0"},
      {"lagkv", "lagkv:once:sinks=4:recent=0"},
      {"expected_attention", "expected_attention:once:sinks=4"},
      {"streaming_llm", "sink:once:sinks=4"},
  };
}

struct Ranked {
  Tokens order;                ///< kvlab's eviction order
  std::vector<double> scores;  ///< of the press, by token
};

Ranked ranked(const TraceReader& trace, const nlohmann::json& prompt, const Pair& pair,
              std::uint32_t kv_head) {
  Tokens order = eviction_order(trace, pair.policy, kv_head);
  if (pair.pooled) {
    const auto last = static_cast<std::uint32_t>(order.size()) - 1;
    std::erase_if(order, [&](std::uint32_t t) { return t < 2 || t > last - 2; });
  }
  REQUIRE(order.size() >= trace.prompt_tokens() / 2);
  return {order, prompt.at("scores").at(pair.press).at(kv_head).get<std::vector<double>>()};
}

TEST_CASE("kvpress ranks a prompt's tokens as our policies do") {
  const test::TemporaryFolder folder;
  write(folder / "trace", random_sequence(1));
  add_trace_features(folder / "trace", random_prompt());
  const TraceReader trace = open_verified_trace(folder / "trace", 1);
  for (const Pair& pair : pairs()) DYNAMIC_SECTION(pair.press << " and " << pair.policy) {
      for (std::uint32_t kv_head = 0; kv_head < trace.shape().kv_heads; ++kv_head) {
        const auto [order, scores] = ranked(trace, random_prompt(), pair, kv_head);
        CHECK(order == by_scores(order, scores));
      }
    }
}

TEST_CASE("kvpress ranks the tokens of a captured prompt as our policies do") {
  const test::TemporaryFolder folder;
  write(folder / "trace", captured_sequence());
  add_trace_features(folder / "trace", captured_prompt());
  const TraceReader trace = open_verified_trace(folder / "trace", 1);
  for (const Pair& pair : pairs()) DYNAMIC_SECTION(pair.press << " and " << pair.policy) {
      for (std::uint32_t kv_head = 0; kv_head < trace.shape().kv_heads; ++kv_head) {
        const auto [order, scores] = ranked(trace, captured_prompt(), pair, kv_head);
        CHECK(ascends(order, scores));
      }
    }
}

/// A feature as the decoders compute it for one KV head, append by append: [token].
std::vector<float> scored(const brute::Sequence& s, const char* name, std::uint32_t kv_head,
                          std::vector<std::uint32_t> appends) {
  const nlohmann::json& settings = fixture().at("settings");
  const auto setting = [&](const char* key) { return settings.at(key).get<std::uint32_t>(); };
  ScoredFeatures features(s.head_size, {setting("sinks"), setting("lag"), setting("future")});
  std::vector<float> all;
  for (std::uint32_t first = 0; const std::uint32_t count : appends) {
    const Segment own{first, count, SegmentKind::prompt};
    const auto k = interleave({s.k[0][kv_head]}, own), v = interleave({s.v[0][kv_head]}, own);
    const auto group = s.q[0].begin() + kv_head * s.group();
    const auto q = interleave({group, group + s.group()}, own);
    const KeyValueRows rows{.k = k.data(),
                            .v = v.data(),
                            .stride = s.head_size,
                            .tokens = count,
                            .q = q.data(),
                            .q_head_stride = s.head_size,
                            .q_stride = std::size_t{s.head_size} * s.group(),
                            .group = s.group(),
                            .inv_freq = s.inv_freq,
                            .softmax_scale = static_cast<float>(s.scale)};
    features.add(rows);
    all.resize(first + count);
    features.write(scored_feature(name).value(), rows, all.data() + first, 1);
    first += count;
  }
  return all;
}

TEST_CASE("Decoders score a prompt's tokens as kvpress does") {
  for (const bool sampled : {true, false}) {
    const brute::Sequence s = sampled ? random_sequence(1) : captured_sequence();
    const nlohmann::json& prompt = sampled ? random_prompt() : captured_prompt();
    for (const char* name : {"lagkv", "expected_attention"})
      for (std::uint32_t kv_head = 0; kv_head < s.kv_heads; ++kv_head) {
        CAPTURE(sampled, name, kv_head);
        const auto press = prompt.at("features").at(name).at(kv_head).get<std::vector<float>>();
        const auto ours = scored(s, name, kv_head, {length_of(prompt)});
        REQUIRE(ours.size() == press.size());
        for (std::size_t t = std::string_view(name) == "lagkv" ? 0 : 4; t < ours.size(); ++t)
          CHECK(ours[t] == Approx(press[t]).epsilon(1e-4));
      }
  }
}

TEST_CASE("Appending more tokens does not change the scores of earlier ones") {
  const brute::Sequence s = random_sequence(1);
  const std::vector<std::uint32_t> parts{9, 12, 1, 1, 5};
  for (const char* name : {"lagkv", "expected_attention", "redundancy"}) {
    const auto whole = scored(s, name, 0, parts);
    for (std::size_t n = 1; n < parts.size(); ++n) {
      const auto some = scored(s, name, 0, {parts.begin(), parts.begin() + n});
      CHECK(std::equal(some.begin(), some.end(), whole.begin()));
    }
  }
  // LagKV's partitions have 8 tokens each, from token 4 on. A token has a score below 1 only if the
  // whole next partition is in the cache when the token's append ends. In the first partition this
  // is so only for tokens 9 to 11.
  const auto places = scored(s, "lagkv", 0, parts);
  CHECK(std::ranges::count_if(places, [](float place) { return place < 1; }) == 3);
  // The redundancy is the softmax over each token's mean cosine with the other tokens.
  const auto redundant = scored(s, "redundancy", 0, {9, 1});
  std::vector<double> e;
  for (std::uint32_t a = 0; a < 10; ++a) {
    double mean = 0;
    for (std::uint32_t b = 0; b < 10; ++b) {
      const brute::Vector &x = s.k[0][0][a], &y = s.k[0][0][b];
      const auto dot = [](const auto& u, const auto& w) {
        return std::inner_product(u.begin(), u.end(), w.begin(), 0.0);
      };
      if (a != b) mean += dot(x, y) / std::sqrt(dot(x, x) * dot(y, y)) / 10;
    }
    e.push_back(std::exp(mean));
  }
  CHECK(redundant[9] == Approx(e[9] / std::accumulate(e.begin(), e.end(), 0.0)).epsilon(1e-6));
}

TEST_CASE("kvpress lets the heads of a layer compete as ada() does") {
  for (const bool sampled : {true, false}) {
    const test::TemporaryFolder folder;
    write(folder / "trace", sampled ? random_sequence(1) : captured_sequence());
    const TraceReader trace = TraceReader::open(folder / "trace");
    const std::uint32_t query[] = {trace.prompt_tokens()};
    for (const auto& [mean, theirs] :
         (sampled ? random_prompt() : captured_prompt()).at("ada").items()) {
      // kvlab's budget also counts the next token.
      const std::string budget = "ada(" + std::to_string(std::stoul(mean) + 1) + ")";
      const CacheConfig config{.policy = parse_policy("h2o:preset=kvpress"),
                               .budget = parse_budget(budget)};
      for (std::uint32_t kv_head = 0; kv_head < trace.shape().kv_heads; ++kv_head) {
        INFO((sampled ? "random " : "captured ") << budget << " head " << kv_head);
        auto wanted = theirs.at(kv_head).get<Tokens>();
        wanted.push_back(query[0]);
        CHECK(kept_sets(trace, 0, config, {.plain = true}, 0, kv_head, query)[0].positions ==
              wanted);
      }
    }
  }
}

/// A cache of another project as a policy. `budget`: the number of tokens that a query sees under
/// the policy.
struct Cache {
  std::string policy;
  std::uint32_t budget;
};

Cache as_ours(const nlohmann::json& cache) {
  const std::uint32_t recent = cache.at("recent").get<std::uint32_t>();
  if (cache.at("code") == "streaming-llm") {
    const auto start = cache.at("start").get<std::uint32_t>();
    return {"sink:sinks=" + std::to_string(start), start + recent + 1};
  }
  const auto heavy = cache.at("heavy").get<std::uint32_t>();
  const std::string preset = "h2o:preset=real_drop";
  // The preset protects half of the budget as recent tokens, including the query's token.
  if (heavy == recent + 1) return {preset, heavy + recent + 1};
  return {preset + ":recent=" + std::to_string(recent + 1), heavy + recent + 1};
}

TEST_CASE("the caches of H2O's and StreamingLLM's authors keep the same sets as our policies") {
  const test::TemporaryFolder folder;
  write(folder / "trace", random_sequence(2));  // H2O's cache has one query head per KV head
  const TraceReader trace = TraceReader::open(folder / "trace");
  for (const auto& theirs : fixture().at("caches")) {
    const Cache ours = as_ours(theirs);
    const CacheConfig config{.policy = parse_policy(ours.policy),
                             .budget = {.extent = tokens(ours.budget)},
                             .prefill = {theirs.at("chunk").get<std::uint32_t>()}};
    for (std::uint32_t kv_head = 0; kv_head < trace.shape().kv_heads; ++kv_head)
      for (const bool plain : {true, false}) {
        INFO(ours.policy << " budget " << ours.budget << " plain " << plain << " head " << kv_head);
        check_sets(every_set(trace, 0, config, {.plain = plain}, 0, kv_head),
                   theirs.at("kept").at(kv_head).get<Sets>());
      }
  }
}

}  // namespace
}  // namespace kvlab
