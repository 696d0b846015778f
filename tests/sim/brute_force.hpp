// A second simulator, for tests only. It uses float64, explicit matrices and every formula as
// docs/reference/metrics.md writes it, and shares no code with the replay. It is slow and short.
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
  double scale = 1;             ///< factor of the logits
  std::vector<float> inv_freq;  ///< [rotated / 2]
  float rope_factor = 1;        ///< factor of cos and sin
  std::vector<RowSpec> rows;    ///< by layer; if empty, all layers have the three values above
  std::vector<Segment> segments;
  std::vector<Passage> passages;
  std::vector<std::vector<Matrix>> q;     ///< [layer][query head][token, dim], before RoPE
  std::vector<std::vector<Matrix>> k, v;  ///< [layer][KV head][token, dim]
  // Squared norms of the residual stream, and 32 directions of W_o. Empty if the trace has format
  // 1.
  Matrix norm2;                             ///< [layer, token]
  std::vector<std::vector<Matrix>> sketch;  ///< [layer][query head][dim, direction]
  std::vector<std::vector<std::vector<Matrix>>>
      gradient;  ///< [layer][query head][gradient sample][token, dim]

  std::uint32_t group() const { return query_heads / kv_heads; }
  RowSpec row(std::uint32_t layer) const;
  /// The logit for the product of a query and a key: scaled and, if the layer has a soft cap,
  /// capped.
  double score(std::uint32_t layer, double product) const;
};
Sequence load(const TraceReader& trace);

/// `value` rounded to `bits` significant bits, to nearest even.
double round_to_bits(double value, int bits);

/// Cosines and sines of RoPE's angles, [position, rotated / 2], times RoPE's factor.
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
/// A token's vector rotated to `position`: dimensions i and i + half form a pair.
Vector rotate(const RopeAngles& angles, const Vector& x, std::uint32_t position);
/// A token's vector at its original position, for sequences with rounded q and k: it is rotated in
/// float32 and then rounded once to the dtype.
Vector rotate_and_round(const Sequence& s, std::uint32_t layer, const Vector& x,
                        std::uint32_t position);

/// The probabilities of one query: one for each logit and, last, one for the sink logit. If there
/// is no sink, `sink` is minus infinity, and the last probability is 0.
Vector softmax(const Vector& logits, double sink);
inline constexpr double kNoSink = -std::numeric_limits<double>::infinity();
inline double sink_of(const RowSpec& row, std::uint32_t query_head) {
  return row.sinks.empty() ? kNoSink : double{row.sinks[query_head]};
}

/// One configuration. Protected tokens are given as numbers of tokens.
struct Config {
  std::string policy;  ///< one of the seven names, or an oracle
  std::uint32_t budget = 0;
  std::uint32_t sinks = 0, recent = 0;
  std::uint32_t chunk = 0;              ///< tokens per append of a prompt; 0: dense
  bool cache_positions = false;         ///< positions = cache
  std::uint32_t every = 1, smooth = 0;  ///< modifiers, with the rule's names
  bool once = false, max_pool = false, by_layer = false, max_group = false;
  std::uint64_t seed = 0;
  std::uint32_t sequence = 0;
};
/// A configuration of `policy` at `budget`, with the documented default protected tokens.
Config standard(const std::string& policy, std::uint32_t budget);

/// The result of one query of one query head.
struct AtQuery {
  double recall = 0;
  std::uint32_t requested = 0, missed = 0;  ///< |N_t| and |N_t \ S_t|
  double error2 = 0, out2 = 0;              ///< squared norms of o - ô and of o
  Vector off;                               ///< o - ô
  std::vector<std::pair<double, double>>
      passages;              ///< by passage before the query: kept mass, and full mass
  double oracle_recall = 0;  ///< set if the outcome has an attention_oracle
};

/// The history of one KV head's cache.
struct Cache {
  std::vector<std::vector<std::uint32_t>> kept;  ///< [query] live positions while the query attends
  std::vector<std::uint64_t> mass;               ///< [token] accumulated while live, Q32.32
  std::uint64_t evictions = 0;
  std::uint32_t live_max = 0, live_end = 0;
};

struct Outcome {
  Config config;
  std::vector<std::vector<std::vector<AtQuery>>> queries;  ///< [layer][query head][query]
  std::vector<std::vector<Cache>> caches;                  ///< [layer][KV head]
  /// The closest decision: the smallest relative gap between a victim and the next candidate, or
  /// between a probability and the request threshold. Below about 1e-6, float32 may decide
  /// differently.
  double narrowest = 1;
  /// The outcome of oracle_attention, for regrets; it must outlive this object. Null: none.
  const Outcome* attention_oracle = nullptr;
};

/// One metric. `standard_error` is NaN if there is none.
struct MetricValue {
  double value = 0, standard_error = 0;
  std::uint64_t count = 0;
};
/// By (layer, KV head, metric). A layer or head of -1 is the aggregate over layers or heads.
using MetricValues = std::map<std::tuple<int, int, std::string>, MetricValue>;

enum class Queries { decode, all };

class Simulator {
 public:
  explicit Simulator(Sequence sequence, double threshold = 0.01);

  const Sequence& sequence() const { return s_; }
  Outcome run(const Config& config) const;
  /// `error_stride`: errors are taken at every error_stride-th measured query.
  MetricValues measure(const Outcome& outcome, Queries queries,
                       std::uint32_t error_stride = 8) const;

  /// Attention with the full cache, [query, key] and [query, dim].
  const Matrix& probabilities(std::uint32_t layer, std::uint32_t query_head) const {
    return full_[layer][query_head].p;
  }
  const Matrix& outputs(std::uint32_t layer, std::uint32_t query_head) const {
    return full_[layer][query_head].out;
  }
  /// ln Σ exp of the logits of query `t` with the full cache.
  double log_sum(std::uint32_t layer, std::uint32_t query_head, std::uint32_t t) const {
    const Full& full = full_[layer][query_head];
    return full.logits[t][t] - std::log(full.p[t][t]);
  }

 private:
  struct Full {
    Matrix logits, p, out;  // lower triangles
    Vector sink;            // [query]: the probability of the sink, which no token receives
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
  /// [layer][KV head][now][token]: mass that queries from `now` on give the token
  std::vector<std::vector<std::vector<std::vector<std::uint64_t>>>> future_;
};

}  // namespace kvlab::brute
