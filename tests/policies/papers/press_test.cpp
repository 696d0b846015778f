// Policies against code that is not ours, on the same small random queries, keys and values:
// kvpress's presses rank a prompt's tokens as ours do, and the caches of H2O's and StreamingLLM's
// authors keep the same sets at every query. tests/fixtures/make_press_fixtures.py ran them.
#include <algorithm>
#include <map>
#include <numeric>

#include "sim/replay.hpp"
#include "tests/catch.hpp"
#include "tests/sim/brute_force.hpp"
#include "tests/traces/column_files.hpp"
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

std::uint32_t prompt_tokens() { return fixture().at("prompt").get<std::uint32_t>(); }

/// Every `stride`-th head of a tensor of the fixture.
std::vector<brute::Matrix> heads(const char* name, std::size_t stride = 1) {
  const double unit = fixture().at("unit").get<double>();
  std::vector<brute::Matrix> picked;
  const auto all = fixture().at(name).get<std::vector<brute::Matrix>>();
  for (std::size_t head = 0; head < all.size(); head += stride) picked.push_back(all[head]);
  for (brute::Matrix& head : picked)
    for (brute::Vector& row : head)
      for (double& x : row) x /= unit;
  return picked;
}

/// The drawn tensors as one layer: a prompt, then decoding. `stride`: 2 leaves each KV head one
/// query head.
brute::Sequence sequence(std::size_t stride) {
  brute::Sequence s;
  s.q = {heads("q", stride)}, s.k = {heads("k")}, s.v = {heads("v")};
  s.query_heads = static_cast<std::uint32_t>(s.q[0].size());
  s.kv_heads = static_cast<std::uint32_t>(s.k[0].size());
  s.tokens = static_cast<std::uint32_t>(s.k[0][0].size());
  s.head_size = static_cast<std::uint32_t>(s.k[0][0][0].size());
  s.scale = 1 / std::sqrt(static_cast<double>(s.head_size));
  s.inv_freq = fixture().at("inv_freq").get<std::vector<float>>();
  const std::uint32_t prompt = prompt_tokens();
  s.segments = {{0, prompt, SegmentKind::prompt}, {prompt, s.tokens - prompt, SegmentKind::decode}};
  return s;
}

/// [head][token, dim] as [token, head, dim], the tokens of a segment.
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

/// The numbers that the policies read, as kvpress computes them; decoded tokens have 0.
void bring_columns(const std::filesystem::path& directory) {
  for (const auto& [name, by_head] : fixture().at("columns").items()) {
    const auto values = by_head.get<std::vector<std::vector<float>>>();
    test::write_column(directory, name, [&](auto, std::uint32_t kv_head, std::uint32_t token) {
      return token < values[kv_head].size() ? values[kv_head][token] : 0.0f;
    });
  }
}

/// The first decoded query sees one token less with each smaller budget: who left, the first to go
/// first, down to what guards hold.
Tokens leaving_order(const TraceReader& trace, const std::string& policy, std::uint32_t kv_head) {
  const PolicySpec spec = parse_policy(policy);
  const std::uint32_t prompt = prompt_tokens(), query[] = {prompt};
  const std::uint32_t sinks = spec.sinks.resolve(prompt), recent = spec.recent.resolve(prompt);
  Tokens order, before(prompt);
  std::iota(before.begin(), before.end(), 0u);
  for (std::uint32_t budget = prompt; budget >= std::max(sinks + recent, sinks + 1); --budget) {
    const CacheConfig config{.policy = spec, .budget = {.extent = tokens(budget)}};
    Tokens kept = kept_sets(trace, 0, config, {.plain = true}, 0, kv_head, query)[0].positions;
    REQUIRE(kept.size() == budget);  // itself included
    REQUIRE(kept.back() == prompt);
    kept.pop_back();
    std::set_difference(before.begin(), before.end(), kept.begin(), kept.end(),
                        std::back_inserter(order));
    REQUIRE(order.size() + kept.size() == prompt);  // who left for a larger budget stays away
    before = kept;
  }
  return order;
}

/// The same tokens by a press's scores, the lowest first; at equal scores the older.
Tokens by_scores(Tokens order, const std::string& press, std::uint32_t kv_head) {
  const auto scores = fixture().at("scores").at(press).at(kv_head).get<std::vector<double>>();
  std::sort(order.begin(), order.end());
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return scores[a] < scores[b]; });
  return order;
}

struct Pair {
  std::string press, policy;
  Tokens apart = {};  ///< ranked differently, as stated
};

/// What is stated, here and in docs/policies.md. All: a press scores a prompt once, so `once`.
std::vector<Pair> pairs() {
  return {
      // kvpress lets the prompt's last token never leave: a guard here.
      {"tova", "tova:once:scope=layer:recent=2"},
      {"snapkv", "snapkv:once:window=8:recent=9"},
      // At the ends of what is pooled, kvpress takes zeros for neighbours; here the window's own
      // tokens are neighbours, and what is not there does not count.
      {"snapkv_pooled", "snapkv:once:window=8:recent=9:smooth=2", {0, 1, 18, 19}},
      {"observed_attention", "h2o:preset=kvpress"},
      {"observed_attention", "h2o_mean:once:recent=0"},
      {"knorm", "knorm:once"},
      // The press was given keys before RoPE: ours compares them so.
      {"keydiff", "keydiff:once"},
      // On sums over queries, without kvpress's first stage and its epsilon.
      {"criticalkv", "criticalkv:once:recent=0:epsilon=0"},
      {"lagkv", "lagkv:once:sinks=4:recent=0"},
      {"expected_attention", "expected_attention:once:sinks=4"},
      {"streaming_llm", "sink:once:sinks=4"},
  };
}

TEST_CASE("kvpress ranks a prompt's tokens as our policies do") {
  const test::TemporaryFolder folder;
  write(folder / "trace", sequence(1));
  bring_columns(folder / "trace");
  const TraceReader trace = open_verified_trace(folder / "trace", 1);
  for (const Pair& pair : pairs()) DYNAMIC_SECTION(pair.press << " and " << pair.policy) {
      for (std::uint32_t kv_head = 0; kv_head < trace.shape().kv_heads; ++kv_head) {
        Tokens order = leaving_order(trace, pair.policy, kv_head);
        std::erase_if(order, [&](std::uint32_t t) { return std::ranges::count(pair.apart, t); });
        CHECK(order.size() >= prompt_tokens() / 2);
        CHECK(order == by_scores(order, pair.press, kv_head));
      }
    }
}

/// `budget`: what their query sees.
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
  // The preset is half recent, the query's own token included.
  if (heavy == recent + 1) return {preset, heavy + recent + 1};
  return {preset + ":recent=" + std::to_string(recent + 1), heavy + recent + 1};
}

TEST_CASE("the caches of H2O's and StreamingLLM's authors keep our policies' sets") {
  const test::TemporaryFolder folder;
  write(folder / "trace", sequence(2));  // H2O's has one query head for each KV head
  const TraceReader trace = TraceReader::open(folder / "trace");
  Tokens every(trace.tokens());
  std::iota(every.begin(), every.end(), 0u);
  for (const auto& theirs : fixture().at("caches")) {
    const Cache ours = as_ours(theirs);
    const CacheConfig config{.policy = parse_policy(ours.policy),
                             .budget = {.extent = tokens(ours.budget)},
                             .prefill = {theirs.at("chunk").get<std::uint32_t>()}};
    for (std::uint32_t kv_head = 0; kv_head < trace.shape().kv_heads; ++kv_head) {
      const auto wanted = theirs.at("kept").at(kv_head).get<std::vector<Tokens>>();
      const auto kept = kept_sets(trace, 0, config, {.plain = true}, 0, kv_head, every);
      REQUIRE(kept.size() == wanted.size());
      for (std::size_t t = 0; t < wanted.size(); ++t) {
        INFO(ours.policy << " budget " << ours.budget << " head " << kv_head << " query " << t);
        REQUIRE(kept[t].positions == wanted[t]);
      }
    }
  }
}

}  // namespace
}  // namespace kvlab
