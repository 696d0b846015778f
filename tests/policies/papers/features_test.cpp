// Tests the policies that read features, in the plain replay and in configuration batches. They are
// compared with the formulas of their papers, on features that are computed here.
#include <cmath>
#include <map>
#include <random>

#include "tests/catch.hpp"
#include "tests/policies/papers/naive_cache.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/traces/extra_files.hpp"
#include "tests/traces/temporary_folder.hpp"

namespace kvlab::papers {
namespace {

using Values = std::vector<float>;                // [token]
using Vectors = std::vector<std::vector<float>>;  // [token][dim]

/// One KV head of a trace, and the end of each token's append.
struct Head {
  Vectors k, v;
  std::vector<std::uint32_t> end;
};

Head head_of(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head,
             std::uint32_t chunk) {
  Head head;
  const std::uint32_t dim = trace.shape().head_size;
  for (std::uint32_t t = 0; t < trace.tokens(); ++t) {
    head.k.emplace_back(dim), head.v.emplace_back(dim);
    trace.read(Part::k, layer, kv_head, t, 1, head.k.back().data());
    trace.read(Part::v, layer, kv_head, t, 1, head.v.back().data());
  }
  for (const Segment& segment : trace.segments())
    for (std::uint32_t i = 0; i < segment.tokens; ++i) {
      const std::uint32_t each = segment.kind == kDecode ? 1 : chunk ? chunk : segment.tokens;
      head.end.push_back(segment.start + std::min(segment.tokens, (i / each + 1) * each));
    }
  return head;
}

float length(const std::vector<float>& x) {
  float squares = 0;
  for (const float one : x) squares += one * one;
  return std::sqrt(squares);
}

float magnitude(const std::vector<float>& x) {
  float sum = 0;
  for (const float one : x) sum += std::fabs(one);
  return sum;
}

/// The cosine of each key with the mean of the unit keys up to the end of its append.
Values cosines(const Head& head) {
  Values values;
  for (std::size_t t = 0; t < head.k.size(); ++t) {
    std::vector<float> sum(head.k[t].size());
    for (std::size_t j = 0; j < head.end[t]; ++j)
      for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += head.k[j][d] / length(head.k[j]);
    float product = 0;
    for (std::size_t d = 0; d < sum.size(); ++d) product += head.k[t][d] * sum[d];
    values.push_back(product / (length(head.k[t]) * length(sum)));
  }
  return values;
}

template <class Value>
Values each(const Vectors& vectors, Value value) {
  Values values;
  for (const auto& x : vectors) values.push_back(value(x));
  return values;
}

/// All features of one KV head that the policies read, by name. Features that are not computed here
/// are read from the trace.
std::map<std::string, Values> features_of(const TraceReader& trace, std::uint32_t layer,
                                          std::uint32_t kv_head, std::uint32_t chunk) {
  const Head head = head_of(trace, layer, kv_head, chunk);
  std::map<std::string, Values> all{{"key_norm", each(head.k, length)},
                                    {"value_norm", each(head.v, length)},
                                    {"value_norm1", each(head.v, magnitude)},
                                    {"key_cosine", cosines(head)}};
  for (const auto& feature : trace.extras().features) {
    all[feature.name].resize(trace.tokens());
    trace.feature(feature.name, layer, kv_head, all[feature.name].data());
  }
  return all;
}

double mass_of(const History& history, std::uint32_t token) {
  std::uint64_t sum = 0;
  for (std::size_t q = token; q < history.queries.size(); ++q)
    sum += history.queries[q].mass(token);
  return static_cast<double>(sum);
}

Formula by(const Values& feature, double sign) {
  return [&feature, sign](const History&, std::uint32_t token, const Moment&) {
    return Worth{0, sign * static_cast<double>(feature[token])};
  };
}

/// The feature times (the attention so far plus `epsilon` for each query that saw the token).
Formula weighed(const Values& feature, double epsilon) {
  return [&feature, epsilon](const History& history, std::uint32_t token, const Moment&) {
    const auto queries = static_cast<double>(history.queries.size() - token);
    return Worth{0, (mass_of(history, token) + epsilon * 4294967296.0 * queries) *
                        static_cast<double>(feature[token])};
  };
}

/// `mix` times the mean attention of the latest queries, minus (1 - `mix`) times the redundancy.
/// Each query has 7/8 of the weight of the query after it.
Formula redundant(const Values& feature, double mix) {
  return [&feature, mix](const History& history, std::uint32_t token, const Moment&) {
    double attention = 0, weight = 1;
    for (std::size_t q = history.queries.size(); q-- > token; weight *= 0.875)
      for (const auto& row : history.queries[q].p)
        attention += weight * static_cast<double>(row[token]);
    return Worth{0, mix * attention / 8 - (1 - mix) * static_cast<double>(feature[token])};
  };
}

struct FeaturePaper {
  std::string text, feature;
  std::function<Formula(const Values&)> formula;
};

std::vector<FeaturePaper> papers_of_features() {
  const auto lowest = [](const Values& c) { return by(c, 1); };
  const auto highest = [](const Values& c) { return by(c, -1); };
  const auto plain = [](const Values& c) { return weighed(c, 0); };
  return {
      {"knorm", "key_norm", highest},
      {"knorm:sinks=2:recent=25%", "key_norm", highest},
      {"keydiff", "key_cosine", highest},
      {"keydiff:recent=3", "key_cosine", highest},
      {"keydiff:name=lagkv", "lagkv", highest},
      {"vatp", "value_norm1", plain},
      {"vatp:sinks=4:recent=2", "value_norm1", plain},
      {"criticalkv", "value_out_norm1", [](const Values& c) { return weighed(c, 1e-4); }},
      {"criticalkv:epsilon=0:recent=1", "value_out_norm1", plain},
      {"lagkv", "lagkv", lowest},
      {"expected_attention", "expected_attention", lowest},
      {"r_kv", "redundancy", [](const Values& c) { return redundant(c, 0.1); }},
      {"r_kv:mix=0.7:recent=4", "redundancy", [](const Values& c) { return redundant(c, 0.7); }},
      {"feature", "value_norm", lowest},
      {"feature:name=key_cosine:keep=-1", "key_cosine", highest},
      {"feature:name=lagkv:recent=5", "lagkv", lowest}};
}

void check_features(const FeaturePaper& paper, const TraceReader& trace, std::uint32_t budget,
                    std::uint32_t chunk, std::uint32_t layer, std::uint32_t kv_head) {
  const CacheConfig config{
      .policy = parse_policy(paper.text), .budget = {.extent = tokens(budget)}, .prefill = {chunk}};
  const auto features = features_of(trace, layer, kv_head, chunk);
  const auto wanted =
      kept_by(paper.formula(features.at(paper.feature)), trace, 0, config, layer, kv_head);
  for (const bool plain : {true, false}) {
    INFO(paper.text << " budget " << budget << " chunk " << chunk << " plain " << plain);
    check_sets(every_set(trace, 0, config, {.plain = plain}, layer, kv_head), wanted);
  }
}

/// Adds features with arbitrary values to the trace. Other tests check the values that kvlab
/// computes.
void add_trace_features(const std::filesystem::path& trace) {
  std::mt19937 rng(3);
  std::uniform_real_distribution<float> uniform(0, 1);
  for (const char* name : {"value_out_norm1", "lagkv", "expected_attention"})
    test::write_feature(trace, name, [&](auto, auto, auto) { return uniform(rng); });
  // The values are about as large as the attention with which r_kv combines them.
  test::write_feature(trace, "redundancy", [&](auto, auto, auto) { return uniform(rng) / 40; });
}

TEST_CASE("policies with features keep the tokens of their papers' formulas, on random traces") {
  const test::TemporaryFolder folder;
  write_random_trace(
      folder / "trace",
      {.layers = 2,
       .query_heads = 6,
       .kv_heads = 2,
       .head_size = 16,
       .segments = {{0, 70, kPrompt}, {70, 90, kDecode}, {160, 23, kPrompt}, {183, 40, kDecode}},
       .seed = 17});
  add_trace_features(folder / "trace");
  const TraceReader trace = open_verified_trace(folder / "trace", 1);
  for (const FeaturePaper& paper : papers_of_features()) DYNAMIC_SECTION(paper.text) {
      for (const std::uint32_t budget : {12u, 41u})
        for (const std::uint32_t chunk : {0u, 1u, 9u})
          check_features(paper, trace, budget, chunk, 1, 1);
    }
}

TEST_CASE("policies with features keep the tokens of their papers' formulas, on a captured trace") {
  const test::TemporaryFolder folder;
  std::filesystem::copy(KVLAB_SOURCE_DIR "/traces/samples/tiny-story", folder / "trace");
  test::make_format_2(folder / "trace");
  add_trace_features(folder / "trace");
  const TraceReader trace = open_verified_trace(folder / "trace", 1);
  for (const FeaturePaper& paper : papers_of_features()) DYNAMIC_SECTION(paper.text) {
      check_features(paper, trace, 48, 0, 2, 1);
    }
}

}  // namespace
}  // namespace kvlab::papers
