// A second simulator, for tests alone: float64, explicit matrices, every formula as
// docs/reference/metrics.md has it and nothing shared with the replay. Slow and short.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "traces/trace.hpp"

namespace kvlab::brute {

using Vector = std::vector<double>;
using Matrix = std::vector<Vector>;  // [token, dim] or [query, key]

/// One captured sequence.
struct Sequence {
  std::uint32_t layers = 1, query_heads = 1, kv_heads = 1, head_size = 0, tokens = 0;
  int rounding_bits = 0;        ///< significant bits of q and k after RoPE; 0: not rounded
  double scale = 1;             ///< of logits
  std::vector<float> inv_freq;  ///< [rotated / 2]
  float rope_factor = 1;        ///< on cos and sin
  std::vector<RowSpec> rows;    ///< by layer; empty: all by the three above
  std::vector<Segment> segments;
  std::vector<Passage> passages;
  std::vector<std::vector<Matrix>> q;     ///< [layer][query head][token, dim], before RoPE
  std::vector<std::vector<Matrix>> k, v;  ///< [layer][KV head][token, dim]
  // Of format 2, or empty: the residual stream's squared norms, and 32 directions of W_o.
  Matrix norm2;                             ///< [layer, token]
  std::vector<std::vector<Matrix>> sketch;  ///< [layer][query head][dim, direction]
  std::vector<std::vector<std::vector<Matrix>>>
      gradient;  ///< [layer][query head][gradient sample][token, dim]

  std::uint32_t group() const { return query_heads / kv_heads; }
  RowSpec row(std::uint32_t layer) const;
  /// A product of query and key as a score.
  double score(std::uint32_t layer, double product) const;
};
Sequence load(const TraceReader& trace);

/// `value` to `bits` significant bits, to nearest even.
double round_to_bits(double value, int bits);

/// Cosines and sines of RoPE's angles, [position, rotated / 2], times its factor.
struct RopeAngles {
  Matrix cos, sin;
};
/// Cosines and sines of every position, in float64.
RopeAngles exact_angles(const Sequence& s, std::uint32_t layer = 0);
inline double dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (std::size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
  return sum;
}
/// A token's vector rotated to `position`: dimensions i and i + half go together.
Vector rotate(const RopeAngles& angles, const Vector& x, std::uint32_t position);
/// A token's vector at its original position, where q and k are rounded: rotated in float32, then
/// rounded once to the dtype.
Vector rotate_and_round(const Sequence& s, std::uint32_t layer, const Vector& x,
                        std::uint32_t position);

/// Probabilities of one query over `keys`, and over a sink logit where there is one, which comes
/// last and is always there: minus infinity for none.
Vector softmax(const Vector& logits, double sink);
inline constexpr double kNoSink = -std::numeric_limits<double>::infinity();
inline double sink_of(const RowSpec& row, std::uint32_t query_head) {
  return row.sinks.empty() ? kNoSink : double{row.sinks[query_head]};
}

/// One configuration. Protected tokens are in tokens.
struct Config {
  std::string policy;  ///< one of the seven names, or a reference
  std::uint32_t budget = 0;
  std::uint32_t sinks = 0, recent = 0;
  std::uint32_t chunk = 0;              ///< tokens an append of a prompt; 0: dense
  bool cache_positions = false;         ///< positions = cache
  std::uint32_t every = 1, smooth = 0;  ///< modifiers: all by the rule's names
  bool once = false, max_pool = false, by_layer = false, max_group = false;
  std::uint64_t seed = 0;
  std::uint32_t sequence = 0;
};
/// With the protected tokens that the page gives `policy` at `budget`.
Config standard(const std::string& policy, std::uint32_t budget);

/// What happened at one query of one query head.
struct AtQuery {
  double recall = 0;
  std::uint32_t requested = 0, missed = 0;  ///< |N_t| and |N_t \ S_t|
  double error2 = 0, out2 = 0;              ///< squared norms of o - ô and of o
  Vector off;                               ///< o - ô
  std::vector<std::pair<double, double>>
      passages;              ///< by passage before the query: kept mass, all of it
  double oracle_recall = 0;  ///< where the outcome has a attention_oracle
};

/// What happened to one KV head's cache.
struct Cache {
  std::vector<std::vector<std::uint32_t>> kept;  ///< [query] live positions while it attended
  std::vector<std::uint64_t> mass;               ///< [token] accumulated while live, Q32.32
  std::uint64_t evictions = 0;
  std::uint32_t live_max = 0, live_end = 0;
};

struct Outcome {
  Config config;
  std::vector<std::vector<std::vector<AtQuery>>> queries;  ///< [layer][query head][query]
  std::vector<std::vector<Cache>> caches;                  ///< [layer][KV head]
  /// The closest call: the smallest relative gap between a victim and the next in line, or between
  /// a probability and the request threshold. Under about 1e-6, float32 may decide otherwise.
  double narrowest = 1;
  /// oracle_attention beside it, for regrets, which has to outlive this; null: there is none.
  const Outcome* attention_oracle = nullptr;
};

/// One metric. `standard_error` is NaN where there is none.
struct MetricValue {
  double value = 0, standard_error = 0;
  std::uint64_t count = 0;
};
/// By (layer, KV head, metric); -1 for the aggregates.
using MetricValues = std::map<std::tuple<int, int, std::string>, MetricValue>;

enum class Queries { decode, all };

class Simulator {
 public:
  explicit Simulator(Sequence sequence, double threshold = 0.01);

  const Sequence& sequence() const { return s_; }
  Outcome run(const Config& config) const;
  /// `error_stride`: the errors are taken on every so-manieth measured query.
  MetricValues measure(const Outcome& outcome, Queries queries,
                       std::uint32_t error_stride = 8) const;

  /// Attention under the full cache, [query, key] and [query, dim].
  const Matrix& probabilities(std::uint32_t layer, std::uint32_t query_head) const {
    return full_[layer][query_head].p;
  }
  const Matrix& outputs(std::uint32_t layer, std::uint32_t query_head) const {
    return full_[layer][query_head].out;
  }
  /// ln Σ exp of the logits of query `t` under the full cache.
  double log_sum(std::uint32_t layer, std::uint32_t query_head, std::uint32_t t) const {
    const Full& full = full_[layer][query_head];
    return full.logits[t][t] - std::log(full.p[t][t]);
  }

 private:
  struct Full {
    Matrix logits, p, out;  // lower triangles
    Vector sink;            // what no token gets of a query
    std::vector<std::vector<bool>> requested;
  };
  class HeadRun;

  Full attend_in_full(std::uint32_t layer, std::uint32_t query_head) const;
  std::uint64_t future_mass(std::uint32_t layer, std::uint32_t kv_head, std::uint32_t token,
                            std::uint32_t now) const;
  static void evict_to_budget(const Config& config, std::vector<HeadRun>& heads, std::uint32_t now,
                              bool after_prompt);
  void run_layer(const Config& config, std::vector<HeadRun>& heads) const;
  void run_topk(const Config& config, std::uint32_t layer, std::uint32_t query_head,
                std::vector<AtQuery>& queries) const;

  Sequence s_;
  std::vector<RopeAngles> angles_;  // by layer
  std::uint64_t threshold16_;
  std::vector<std::vector<Full>> full_;  // [layer][query head]
  /// [layer][KV head][now][token]: what queries from `now` on give the token
  std::vector<std::vector<std::vector<std::vector<std::uint64_t>>>> future_;
};

}  // namespace kvlab::brute
