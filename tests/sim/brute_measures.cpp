// The brute force's metrics: plain sums over the results of each query.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <stdexcept>
#include <utility>

#include "tests/sim/brute_force.hpp"

namespace kvlab::brute {
namespace {

/// Bytes of a policy's state per token.
std::uint32_t slot_bytes(const std::string& policy) {
  if (policy == "lru") return 4;
  return policy == "h2o" || policy == "streaming_h2o" || policy.starts_with("oracle_") ? 8 : 0;
}

/// The metrics of one outcome over some queries.
class Measures {
 public:
  Measures(const Sequence& s, const Outcome& outcome, Queries queries, std::uint32_t stride)
      : s_(s), outcome_(outcome), stride_(stride) {
    for (const Segment& segment : s.segments)
      for (std::uint32_t t = segment.start; t < segment.start + segment.tokens; ++t)
        if (queries == Queries::all || segment.kind == SegmentKind::decode) queries_.push_back(t);
    if (queries_.empty()) throw std::invalid_argument("no queries");
  }

  MetricValues all() {
    std::vector<Head> everything;
    for (int layer = 0; layer < static_cast<int>(s_.layers); ++layer) {
      std::vector<Head> layer_heads;
      for (int g = 0; g < static_cast<int>(s_.kv_heads); ++g) {
        std::vector<Head> group_heads;
        for (std::uint32_t i = 0; i < s_.group(); ++i) group_heads.push_back(&head_at(layer, g, i));
        layer_heads.insert(layer_heads.end(), group_heads.begin(), group_heads.end());
        rows(layer, g, group_heads);
      }
      everything.insert(everything.end(), layer_heads.begin(), layer_heads.end());
      rows(layer, -1, layer_heads);
    }
    rows(-1, -1, everything);
    if (has_outputs()) layer_errors();
    if (has_outputs() && !s_.norm2.empty()) residual_errors();
    if (has_outputs() && !s_.gradient.empty()) kl_estimates();
    if (!outcome_.caches[0].empty()) counters(), held();
    std::erase_if(metric_values_, [](const auto& row) {
      return std::get<2>(row.first) == "zero_outputs" && row.second.value == 0;
    });
    return std::move(metric_values_);
  }

 private:
  using Head = const std::vector<AtQuery>*;
  enum class Counted { queries, terms };  ///< terms: queries with a nonzero denominator
  static constexpr std::size_t kNoBlock = static_cast<std::size_t>(-1);
  static constexpr std::size_t kDirections = 32;  ///< of the residual stream

  bool has_outputs() const { return outcome_.config.policy != "oracle_topk"; }
  std::size_t blocks() const { return std::min<std::size_t>(16, queries_.size()); }
  std::size_t block_of(std::size_t i) const { return i * blocks() / queries_.size(); }

  /// The jackknife's standard error. `statistic(b)`: the statistic without block b. `there[b]`:
  /// whether block b has queries.
  template <class Statistic>
  double jackknife(const std::vector<bool>& there, Statistic statistic) const {
    Vector without;
    for (std::size_t b = 0; b < blocks(); ++b)
      if (there[b]) without.push_back(statistic(b));
    const double n = static_cast<double>(without.size());
    if (without.size() < 8) return std::numeric_limits<double>::quiet_NaN();
    double mean = 0, sum = 0;
    for (double x : without) mean += x / n;
    for (double x : without) sum += (x - mean) * (x - mean);
    return std::sqrt((n - 1) / n * sum);
  }

  /// The mean over heads of a ratio of sums over queries. `term(at)` returns the terms that one
  /// query adds to the numerator and the denominator. Heads whose denominator is 0 are left out.
  template <class Term>
  void add_ratio(int layer, int head, const std::string& metric, const std::vector<Head>& heads,
                 std::uint32_t stride, Counted counted, Term term) {
    const auto mean_without = [&](std::size_t block) {
      double sum = 0, used = 0;
      for (Head h : heads) {
        double above = 0, below = 0;
        for (std::size_t i = 0; i < queries_.size(); i += stride) {
          if (block_of(i) == block) continue;
          const auto [a, b] = term((*h)[queries_[i]]);
          above += a;
          below += b;
        }
        if (below == 0) continue;
        sum += above / below;
        used += 1;
      }
      return sum / used;
    };
    std::vector<bool> filled(blocks());
    std::uint64_t terms = 0, used = 0;
    for (Head h : heads) {
      const std::uint64_t before = terms;
      for (std::size_t i = 0; i < queries_.size(); i += stride)
        if (term((*h)[queries_[i]]).second > 0) {
          filled[block_of(i)] = true;
          ++terms;
        }
      used += terms > before ? 1 : 0;
    }
    if (used == 0) return;
    metric_values_[{layer, head, metric}] = {
        mean_without(kNoBlock), jackknife(filled, mean_without),
        counted == Counted::queries ? used * queries_.size() : terms};
  }

  /// The mean over heads of the 10% quantile of recall, which is the lowest value such that at
  /// least a tenth of the queries have at most this recall.
  void add_recall_p10(int layer, int head, const std::vector<Head>& heads) {
    const auto p10 = [&](std::size_t block, double sum = 0) {
      for (Head h : heads) {
        Vector values;
        for (std::size_t i = 0; i < queries_.size(); ++i)
          if (block_of(i) != block) values.push_back((*h)[queries_[i]].recall);
        std::sort(values.begin(), values.end());
        sum += values.empty() ? std::nan("") : values[(values.size() - 1) / 10];
      }
      return sum / static_cast<double>(heads.size());
    };
    const double error = jackknife(std::vector<bool>(blocks(), true), p10);
    metric_values_[{layer, head, "recall_p10"}] = {p10(kNoBlock), error,
                                                   heads.size() * queries_.size()};
  }

  void rows(int layer, int head, const std::vector<Head>& heads) {
    using Pair = std::pair<double, double>;
    const auto recall = [](const AtQuery& at) { return Pair{at.recall, 1}; };
    const auto nll = [](const AtQuery& at) {
      return Pair{-std::log(std::max(at.recall, 1e-9)), 1};
    };
    const auto misses = [](const AtQuery& at) { return Pair{at.missed, at.requested}; };
    const auto error = [](const AtQuery& at) {
      return at.out2 > 0 ? Pair{std::sqrt(at.error2 / at.out2), 1} : Pair{0, 0};
    };
    add_ratio(layer, head, "recall", heads, 1, Counted::queries, recall);
    add_recall_p10(layer, head, heads);
    add_ratio(layer, head, "nll_recall", heads, 1, Counted::queries, nll);
    if (outcome_.attention_oracle)
      add_ratio(layer, head, "regret_recall", heads, 1, Counted::queries, [](const AtQuery& at) {
        return Pair{
            std::log(std::max(at.oracle_recall, 1e-9)) - std::log(std::max(at.recall, 1e-9)), 1};
      });
    add_ratio(layer, head, "miss_rate", heads, 1, Counted::queries, misses);
    if (!has_outputs()) return;
    add_ratio(layer, head, "output_error", heads, stride_, Counted::terms, error);
    for (std::size_t s = 0; s < s_.passages.size(); ++s)
      add_ratio(layer, head, "passage_recall:" + s_.passages[s].name, heads, 1, Counted::terms,
                [s](const AtQuery& at) { return at.passages[s]; });
  }

  /// √(Σ_h ‖o − ô‖² / Σ_h ‖o‖²) of a layer at one query; negative if all o are zero.
  double layer_error(std::size_t layer, std::uint32_t t) const {
    double error2 = 0, out2 = 0;
    for (const auto& head : outcome_.queries[layer]) {
      error2 += head[t].error2;
      out2 += head[t].out2;
    }
    return out2 > 0 ? std::sqrt(error2 / out2) : -1;
  }

  void layer_errors() {
    const auto mean_of = [&](std::size_t layer, std::size_t without) {
      double sum = 0, n = 0;
      for (std::size_t i = 0; i < queries_.size(); i += stride_) {
        const double error = layer_error(layer, queries_[i]);
        if (error < 0 || block_of(i) == without) continue;
        sum += error;
        n += 1;
      }
      return sum / n;
    };
    std::vector<bool> there_any(blocks());
    std::uint64_t count_all = 0;
    for (std::size_t layer = 0; layer < s_.layers; ++layer) {
      std::vector<bool> there(blocks());
      std::uint64_t count = 0;
      for (std::size_t i = 0; i < queries_.size(); i += stride_)
        if (layer_error(layer, queries_[i]) >= 0) {
          there[block_of(i)] = there_any[block_of(i)] = true;
          ++count;
        }
      count_all += count;
      metric_values_[{static_cast<int>(layer), -1, "layer_error"}] = {
          mean_of(layer, kNoBlock),
          jackknife(there, [&](std::size_t b) { return mean_of(layer, b); }),
          count * s_.query_heads};
    }
    const auto mean_of_layers = [&](std::size_t without) {
      double sum = 0;
      for (std::size_t layer = 0; layer < s_.layers; ++layer) sum += mean_of(layer, without);
      return sum / s_.layers;
    };
    metric_values_[{-1, -1, "layer_error"}] = {
        mean_of_layers(kNoBlock), jackknife(there_any, mean_of_layers), count_all * s_.query_heads};
  }

  /// ‖Σ_h W_o (o - ô)‖² / ‖x‖² of some query heads of a layer at one query, estimated from one of
  /// the sketch's directions.
  double residual_error(std::size_t layer, std::size_t first, std::size_t count, std::uint32_t t,
                        std::size_t direction) const {
    double sum = 0;
    for (std::size_t h = first; h < first + count; ++h)
      for (std::size_t d = 0; d < s_.head_size; ++d)
        sum += outcome_.queries[layer][h][t].off[d] * s_.sketch[layer][h][d][direction];
    return kDirections * sum * sum / s_.norm2[layer][t];
  }

  /// The mean over directions. The directions are random, so the standard error includes the
  /// variance over them.
  void residual_errors() {
    std::vector<MetricValues> by_direction;
    for (std::size_t direction = 0; direction < kDirections; ++direction) {
      sums_of_layers("residual_error", stride_,
                     [&](std::size_t layer, std::size_t first, std::size_t count, std::uint32_t t) {
                       return residual_error(layer, first, count, t, direction);
                     });
      by_direction.push_back(metric_values_);
    }
    sums_of_layers("residual_error", stride_,
                   [&](std::size_t layer, std::size_t first, std::size_t count, std::uint32_t t) {
                     double sum = 0;
                     for (std::size_t i = 0; i < kDirections; ++i)
                       sum += residual_error(layer, first, count, t, i) / kDirections;
                     return sum;
                   });
    for (auto& [row, metric_value] : metric_values_) {
      if (std::get<2>(row) != "residual_error") continue;
      double variance = 0;
      for (const MetricValues& own : by_direction)
        variance +=
            std::pow(own.at(row).value - metric_value.value, 2) / kDirections / (kDirections - 1);
      metric_value.standard_error = std::hypot(metric_value.standard_error, std::sqrt(variance));
    }
  }

  /// Σ_h g (ô - o) of some query heads of a layer at one query.
  double change(std::size_t layer, std::size_t first, std::size_t count,
                std::size_t gradient_sample, std::uint32_t t) const {
    double sum = 0;
    for (std::size_t h = first; h < first + count; ++h)
      sum -= dot(s_.gradient[layer][h][gradient_sample][t], outcome_.queries[layer][h][t].off);
    return sum;
  }

  void kl_estimates() {
    const std::size_t gradient_samples = s_.gradient[0][0].size();
    const auto half_square = [&](auto change_of) {
      double sum = 0;
      for (std::size_t gradient_sample = 0; gradient_sample < gradient_samples; ++gradient_sample)
        sum += 0.5 * change_of(gradient_sample) * change_of(gradient_sample) /
               static_cast<double>(gradient_samples);
      return sum;
    };
    sums_of_layers("kl_estimate", 1,
                   [&](std::size_t layer, std::size_t first, std::size_t count, std::uint32_t t) {
                     return half_square([&](std::size_t gradient_sample) {
                       return change(layer, first, count, gradient_sample, t);
                     });
                   });
    const auto joint_at = [&](std::uint32_t t) {
      return half_square([&](std::size_t gradient_sample) {
        double sum = 0;
        for (std::size_t l = 0; l < s_.layers; ++l)
          sum += change(l, 0, s_.query_heads, gradient_sample, t);
        return sum;
      });
    };
    const double d = static_cast<double>(gradient_samples),
                 factor = std::tgamma(d / 2) * std::sqrt(d / 2) / std::tgamma((d + 1) / 2);
    const auto acceptance_at = [&](std::uint32_t t) {
      return std::max(0.0, 1 - factor * std::sqrt(joint_at(t) / std::numbers::pi));
    };
    const auto put_mean = [&](const char* metric, auto at) {
      const auto mean = [&](std::size_t without) { return mean_of_queries(1, without, at); };
      metric_values_[{-1, -1, metric}] = {mean(kNoBlock), jackknife(filled_blocks(1), mean),
                                          queries_.size() * s_.query_heads * s_.layers};
    };
    put_mean("kl_estimate_joint", joint_at);
    put_mean("acceptance", acceptance_at);
  }

  /// For each block, whether it contains one of the queries that count: every `stride`-th measured
  /// query.
  std::vector<bool> filled_blocks(std::uint32_t stride) const {
    std::vector<bool> there(blocks());
    for (std::size_t i = 0; i < queries_.size(); i += stride) there[block_of(i)] = true;
    return there;
  }
  template <class AtQuery>
  double mean_of_queries(std::uint32_t stride, std::size_t without, AtQuery at) const {
    double sum = 0, n = 0;
    for (std::size_t i = 0; i < queries_.size(); i += stride) {
      if (block_of(i) == without) continue;
      sum += at(queries_[i]);
      n += 1;
    }
    return sum / n;
  }

  /// Adds a metric whose aggregate is the sum over layers, from every `stride`-th query.
  /// `at(layer, first, count, t)`: its value for some query heads of a layer at one query.
  template <class At>
  void sums_of_layers(const char* metric, std::uint32_t stride, At at) {
    const std::vector<bool> there = filled_blocks(stride);
    const std::uint64_t samples = (queries_.size() + stride - 1) / stride;
    const auto mean_of = [&](std::size_t layer, std::size_t first, std::size_t count,
                             std::size_t without) {
      return mean_of_queries(stride, without,
                             [&](std::uint32_t t) { return at(layer, first, count, t); });
    };
    const auto put = [&](int layer, int head, std::uint64_t count, auto statistic) {
      metric_values_[{layer, head, metric}] = {statistic(kNoBlock), jackknife(there, statistic),
                                               count};
    };
    const std::uint32_t group = s_.group();
    for (std::size_t layer = 0; layer < s_.layers; ++layer) {
      const int l = static_cast<int>(layer);
      for (std::uint32_t g = 0; g < s_.kv_heads; ++g)
        put(l, static_cast<int>(g), samples * group, [&, g](std::size_t without) {
          return mean_of(layer, std::size_t{g} * group, group, without);
        });
      put(l, -1, samples * s_.query_heads,
          [&](std::size_t without) { return mean_of(layer, 0, s_.query_heads, without); });
    }
    put(-1, -1, samples * s_.query_heads * s_.layers, [&](std::size_t without) {
      double sum = 0;
      for (std::size_t layer = 0; layer < s_.layers; ++layer)
        sum += mean_of(layer, 0, s_.query_heads, without);
      return sum;
    });
  }

  void counters() {
    const std::uint32_t state =
        slot_bytes(outcome_.config.policy) + 4 + (outcome_.config.cache_positions ? 4 : 0);
    for (int layer = 0; layer < static_cast<int>(s_.layers); ++layer)
      for (int g = 0; g < static_cast<int>(s_.kv_heads); ++g) {
        const Cache& cache =
            outcome_.caches[static_cast<std::size_t>(layer)][static_cast<std::size_t>(g)];
        for (const auto& [l, h] : {std::pair{layer, g}, std::pair{layer, -1}, std::pair{-1, -1}}) {
          add(l, h, "evictions", static_cast<double>(cache.evictions));
          add(l, h, "kv_bytes", 4.0 * cache.live_end * s_.head_size);
          add(l, h, "state_bytes", static_cast<double>(cache.live_end) * state);
          MetricValue& live_max = add(l, h, "live_max", 0);
          live_max.value = std::max(live_max.value, static_cast<double>(cache.live_max));
          add(l, h, "zero_outputs", zero_outputs(layer, g));
        }
      }
  }

  /// The number of tokens in a KV head's cache at a query, the query's token included.
  double live_at(int layer, int g, std::uint32_t query) const {
    return static_cast<double>(
        outcome_.caches[static_cast<std::size_t>(layer)][static_cast<std::size_t>(g)]
            .kept[query]
            .size());
  }

  /// Adds the bytes of keys and values in 16 bits, over decoded queries.
  void held() {
    const double token = 2.0 * s_.head_size * 2;
    for (int layer = 0; layer < static_cast<int>(s_.layers); ++layer)
      for (int g = 0; g < static_cast<int>(s_.kv_heads); ++g) {
        double sum = 0, count = 0, peak = 0;
        for (const Segment& segment : s_.segments)
          for (std::uint32_t i = 0; segment.kind == SegmentKind::decode && i < segment.tokens;
               ++i) {
            const double live = live_at(layer, g, segment.start + i);
            sum += live, ++count, peak = std::max(peak, live);
          }
        if (count == 0) sum = peak = live_at(layer, g, s_.tokens - 1), count = 1;
        for (const auto& [l, h] : {std::pair{layer, g}, std::pair{layer, -1}, std::pair{-1, -1}}) {
          add(l, h, "kv_bytes_mean", token * sum / count);
          add(l, h, "kv_bytes_peak", token * peak);
        }
      }
  }

  /// The number of sampled rows of a KV head that have no output_error.
  double zero_outputs(int layer, int kv_head) const {
    double zeros = 0;
    for (std::uint32_t i = 0; i < s_.group(); ++i)
      for (std::size_t t = 0; t < queries_.size(); t += stride_)
        zeros += head_at(layer, kv_head, i)[queries_[t]].out2 > 0 ? 0 : 1;
    return zeros;
  }

  const std::vector<AtQuery>& head_at(int layer, int kv_head, std::uint32_t group_head) const {
    return outcome_.queries[static_cast<std::size_t>(layer)]
                           [static_cast<std::size_t>(kv_head) * s_.group() + group_head];
  }

  MetricValue& add(int layer, int head, const char* metric, double value) {
    MetricValue& metric_value = metric_values_[{layer, head, metric}];
    metric_value.value += value;
    metric_value.standard_error = std::numeric_limits<double>::quiet_NaN();
    ++metric_value.count;
    return metric_value;
  }

  const Sequence& s_;
  const Outcome& outcome_;
  std::uint32_t stride_;
  std::vector<std::uint32_t> queries_;  // positions of the queries
  MetricValues metric_values_;
};

}  // namespace

MetricValues Simulator::measure(const Outcome& outcome, Queries queries,
                                std::uint32_t error_stride) const {
  return Measures(s_, outcome, queries, error_stride).all();
}

}  // namespace kvlab::brute
