#include "sim/run/tabulate.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <optional>
#include <string>

#include "sim/live_counts.hpp"
#include "traces/base/numeric/nan.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

void add_layer_error(LayerOutcome& layer, const MeasuredQueries& measured, std::size_t c,
                     std::uint32_t sample) {
  double error = 0, output = 0;
  for (const auto& head : layer.heads) {
    error += head[c].stats.errors[2 * sample];
    output += head[c].stats.errors[2 * sample + 1];
  }
  if (output > 0)
    layer.errors[LayerError::outputs].layer[c].add(measured.block_of_sample(sample),
                                                   std::sqrt(error / output), 1);
}

/// Whether every head has the data `what`. An oracle that computes no outputs lacks some of them.
bool has_all(const LayerOutcome& layer, std::size_t c, std::vector<float> HeadStats::*what) {
  return std::ranges::none_of(layer.heads,
                              [&](const auto& head) { return (head[c].stats.*what).empty(); });
}

/// `numbers_of` returns `count` numbers for each head. For each head, adds the squares of its
/// numbers, divided by `by`, to the head's ratio. Also sums each number over the heads, and adds
/// the squares of these sums, divided by `by`, to the layer's ratio. If a ratio has columns, each
/// square is also added to its column. A negative `by` subtracts squares that an earlier call
/// added.
template <class Numbers>
void add_squares(LayerError::Kind error, LayerOutcome& layer, std::size_t c, std::uint32_t block,
                 std::uint32_t count, double by, Numbers numbers_of) {
  LayerRatios& to = layer.errors[error];
  std::vector<double> sum(count);
  const auto add = [&](BlockedRatio& ratio, const auto* numbers) {
    double squares = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      const double x = numbers[i];
      squares += x * x;
      if (!ratio.columns.empty()) ratio.columns[i] += x * x / by;
    }
    ratio.add(block, squares / by, by > 0);
  };
  for (std::size_t h = 0; h < layer.heads.size(); ++h) {
    const float* const own = numbers_of(layer.heads[h][c].stats);
    for (std::uint32_t i = 0; i < count; ++i) sum[i] += own[i];
    add(to.heads[h][c], own);
  }
  add(to.layer[c], sum.data());
}

/// Adds the squared errors of a sample after W_o. Also adds, as the error of quantization, the
/// difference between them and the squared errors without quantization.
void add_residual(LayerOutcome& layer, const MeasuredQueries& measured, std::size_t c,
                  std::uint32_t sample, std::uint32_t columns, double norm2) {
  const std::uint32_t block = measured.block_of_sample(sample);
  const auto own = [&](HeadStats& stats) { return stats.residual_of(sample); };
  add_squares(LayerError::residual, layer, c, block, columns, norm2, own);
  if (!layer.heads.front()[c].stats.separates_quantization(columns)) return;
  add_squares(LayerError::quantization, layer, c, block, columns, norm2, own);
  add_squares(LayerError::quantization, layer, c, block, columns, -norm2, [&](HeadStats& stats) {
    float* const without = stats.residual_of(sample);
    for (std::uint32_t i = 0; i < columns; ++i) without[i] -= without[columns + i];
    return without;
  });
}

/// Adds the squared changes of log-likelihood at every measured query. Also sums the changes over
/// heads.
void add_changes(LayerOutcome& layer, const MeasuredQueries& measured, std::size_t c,
                 std::uint32_t gradient_samples) {
  std::vector<float>& changes = layer.changes[c];
  changes.resize(std::size_t{measured.size()} * gradient_samples);
  for (std::uint32_t i = 0; i < measured.size(); ++i)
    add_squares(LayerError::kl, layer, c, measured.block_of(i), gradient_samples,
                2.0 * gradient_samples, [&](HeadStats& stats) {
                  const float* const own = stats.changes_of(i, gradient_samples);
                  for (std::uint32_t gradient_sample = 0; gradient_sample < gradient_samples;
                       ++gradient_sample)
                    changes[std::size_t{i} * gradient_samples + gradient_sample] +=
                        own[gradient_sample];
                  return own;
                });
}

using Ratios = std::vector<BlockedRatio>;

/// Converts outcomes to rows of metrics, one part of the model after another. A part is a KV head,
/// a layer, or the whole model.
class Tabulator {
 public:
  explicit Tabulator(const ReplayOutcome& outcome)
      : outcome_(outcome),
        measured_(outcome.measured),
        sums_(outcome.measured.sums(outcome.shape.group())) {}

  std::vector<Measurement> rows() {
    const std::size_t layers = outcome_.layers.size();
    for (c_ = 0; c_ < outcome_.configs.size(); ++c_) {
      by_attention_ = oracle_beside(kOracleAttention);
      by_residual_ = oracle_beside(kOracleResidual);
      known_counts_.clear();
      for (std::size_t l = 0; l < layers; ++l) {
        layer_ = static_cast<std::int32_t>(outcome_.shape.number(outcome_.layer_indices[l]));
        for (std::size_t h = 0; h < outcome_.layers[l].heads.size(); ++h)
          add_rows(l, l + 1, static_cast<std::int32_t>(h));
        add_rows(l, l + 1, -1);
      }
      layer_ = -1;
      add_rows(0, layers, -1);
    }
    return std::move(rows_);
  }

 private:
  const ResolvedConfig& config() const { return outcome_.configs[c_]; }

  /// The index of the oracle `name` with the budget and the prefill mode of the current
  /// configuration, if there is one. A policy with `prompt` has none, because it keeps the prompt
  /// in addition to its budget, and an oracle does not.
  std::optional<std::size_t> oracle_beside(std::string_view name) const {
    if (is_oracle(config().policy.name) || !config().evicts() || config().policy.prompt)
      return std::nullopt;
    const auto found = std::ranges::find_if(outcome_.configs, [&](const ResolvedConfig& other) {
      return other.policy.name == name && other.budget.text() == config().budget.text() &&
             other.prefill.chunk == config().prefill.chunk;
    });
    if (found == outcome_.configs.end()) return std::nullopt;
    return static_cast<std::size_t>(found - outcome_.configs.begin());
  }

  /// Adds the rows of the part that consists of layers [first, last) or, if `head` is not negative,
  /// of this KV head in these layers.
  void add_rows(std::size_t first, std::size_t last, std::int32_t head) {
    first_ = first, last_ = last, head_ = head;
    count();
#define METRIC(name, label, better, decides, reduced) \
  metric_ = #name;                                    \
  reduced;
#include "sim/metrics/metrics.def"
  }

  /// Calls each(outcome, index of the layer in the replay, KV head) for the outcomes of
  /// configuration `c` in the current part.
  template <class Each>
  void for_heads(std::size_t c, Each each) const {
    for (std::size_t l = first_; l < last_; ++l)
      for (std::size_t h = 0; h < outcome_.layers[l].heads.size(); ++h)
        if (head_ < 0 || h == static_cast<std::size_t>(head_))
          each(outcome_.layers[l].heads[h][c], outcome_.layer_indices[l],
               static_cast<std::uint32_t>(h));
  }
  std::span<const double> blocks(const HeadOutcome& outcome, Sum sum, std::size_t head) const {
    return std::span(outcome.stats.sums).subspan(sums_.at(sum, head, 0), kMaxQueryBlocks);
  }
  /// Ratios of two sums, one for each query head.
  Ratios ratios(std::size_t c, Sum above, Sum below) const {
    Ratios all;
    for_heads(c, [&](const HeadOutcome& outcome, std::uint32_t, std::uint32_t) {
      for (std::size_t head = 0; head < outcome_.shape.group(); ++head) {
        BlockedRatio& own = all.emplace_back(BlockedRatio{.blocks = measured_.blocks()});
        std::ranges::copy(blocks(outcome, above, head), own.above.begin());
        std::ranges::copy(blocks(outcome, below, head), own.below.begin());
      }
    });
    return all;
  }
  Ratios ratios(std::size_t c, LayerError::Kind error) const {
    Ratios all;
    for (std::size_t l = first_; l < last_; ++l) {
      const LayerRatios& ratios = outcome_.layers[l].errors[error];
      all.push_back(head_ < 0 ? ratios.layer[c] : ratios.heads[static_cast<std::size_t>(head_)][c]);
    }
    return all;
  }

  void add(double value, double standard_error, std::uint64_t count) {
    rows_.push_back({c_, layer_, head_, metric_, value, standard_error, count});
  }
  /// Adds a row with `factor` times an estimate, if the weight of the estimate is above 0. `count`
  /// is the number of values from which the estimate was computed.
  void add(const Estimate& estimate, double factor, double count) {
    if (!(estimate.weight > 0)) return;
    add(factor * estimate.value, factor * estimate.standard_error,
        static_cast<std::uint64_t>(count));
    if (layer_ >= 0) return;
    for (const double block : estimate.blocks) rows_.back().blocks.push_back(factor * block);
  }

  // The following functions are the reductions in metrics.def.

  /// The unweighted mean over query heads. For errors, the result's `count` is the number of
  /// samples. For other metrics, it is `queries` times the number of query heads that have a value.
  void mean(Sum above, Sum below, std::optional<std::uint32_t> queries = {}) {
    const Ratios all = ratios(c_, above, below);
    const auto filled =
        std::ranges::count_if(all, [](const BlockedRatio& own) { return own.weight() > 0; });
    const Estimate estimate = mean_of(all);
    add(estimate, 1,
        below == Sum::errors ? estimate.weight
                             : static_cast<double>(filled) * queries.value_or(measured_.size()));
  }
  /// The mean of a quantity of attention, over query heads and queries.
  void mean_over_queries(Sum above) {
    if (outcome_.has_attention) mean(above, Sum::queries);
  }
  /// The bytes fetched for a query, summed over the KV heads. All query heads of a KV head have the
  /// same counts, so the mean over query heads is also the mean over KV heads.
  void fetched_bytes() {
    if (!(mean_of(ratios(c_, Sum::fetched, Sum::selected)).weight > 0)) return;
    const Estimate fetched = mean_of(ratios(c_, Sum::fetched, Sum::queries));
    add(fetched, static_cast<double>(heads_) * held_bytes(), fetched.weight);
  }
  void recall_quantile() {
    if (!outcome_.has_attention) return;
    std::vector<Quantile> all;
    for_heads(c_, [&](const HeadOutcome& outcome, std::uint32_t, std::uint32_t) {
      all.insert(all.end(), outcome.stats.quantiles.begin(), outcome.stats.quantiles.end());
    });
    const double count = static_cast<double>(all.size()) * measured_.size();
    add(mean_of(all, measured_.blocks(), count), 1, count);
  }
  /// The amount by which the loss of the configuration exceeds that of `oracle_attention`.
  void regret(Sum above, Sum below) {
    if (!by_attention_) return;
    Estimate regret = difference_of(ratios(c_, above, below), ratios(*by_attention_, above, below));
    regret.blocks.clear();
    add(regret, 1, regret.weight);
  }
  void add_passages() {
    for (std::size_t s = 0; s < measured_.passages().size(); ++s) {
      metric_ = std::string(kPassageRecall) + measured_.passages()[s].name;
      mean(kept_of(s), all_of(s), measured_.queries_after(measured_.passages()[s]));
    }
  }
  /// Adds a row with `factor` times the mean over layers.
  void add_layers(const Estimate& estimate, double factor) {
    const std::uint32_t heads = head_ < 0 ? outcome_.shape.query_heads : outcome_.shape.group();
    add(estimate, factor, estimate.weight * heads);
  }
  void mean_of_layers(LayerError::Kind error) { add_layers(mean_of(ratios(c_, error)), 1); }
  void sum_of_layers(LayerError::Kind error) {
    const Ratios all = ratios(c_, error);
    // Layers in 16 bit have no quantization error. mean_of() leaves them out, so they are not
    // counted.
    const auto summed =
        error == LayerError::quantization
            ? std::ranges::count_if(all, [](const BlockedRatio& own) { return own.weight() > 0; })
            : static_cast<std::ptrdiff_t>(all.size());
    add_layers(mean_of(all), static_cast<double>(summed));
  }
  void layers_regret(LayerError::Kind error) {
    if (by_residual_)
      add_layers(difference_of(ratios(c_, error), ratios(*by_residual_, error)),
                 static_cast<double>(last_ - first_));
  }
  /// Adds a row for all layers together, from one ratio for each configuration.
  void add_model(std::span<const BlockedRatio> ratios) {
    const Estimate estimate = mean_of(ratios.subspan(c_, 1));
    if (layer_ < 0)
      add(estimate, 1, estimate.weight * outcome_.shape.query_heads * static_cast<double>(last_));
  }
  /// Adds a row with a sum or a maximum over KV heads. oracle_topk gets no such row, because it
  /// chooses from all tokens and has no cache.
  void total(double value) {
    if (config().policy.name != kOracleTopk) add(value, kNaN, heads_);
  }
  void total_of_all(double value) {
    if (layer_ < 0) total(value);
  }
  void total_if_any(double value) {
    if (value > 0) total(value);
  }

  /// Computes sums over the KV heads of the part: numbers of tokens, the memory of the budget, and
  /// the memory that decoded queries use. The latter is computed as a mean and as a peak. The peaks
  /// of the heads are added, because each head needs an allocation of the size of its peak.
  void count() {
    evictions_ = live_max_ = zeros_ = mean_held_ = peak_held_ = end_held_ = budget_ = 0;
    heads_ = state_ = 0;
    for_heads(c_, [&](const HeadOutcome& outcome, std::uint32_t layer, std::uint32_t head) {
      ++heads_;
      evictions_ += static_cast<double>(outcome.evictions);
      live_max_ = std::max(live_max_, static_cast<double>(outcome.live_max));
      for (std::size_t h = 0; h < outcome_.shape.group(); ++h)
        for (const double zeros : blocks(outcome, Sum::zeros, h)) zeros_ += zeros;
      const std::uint32_t budget = config().budget_of(layer, head);
      const std::pair key{config().layer_key(layer), budget};
      auto known = known_counts_.find(key);
      if (known == known_counts_.end())
        known = known_counts_.emplace(key, live_counts(config(), layer, budget)).first;
      const LiveCounts& counts = known->second;
      // The heads of a layer may share slots. Then `share` is the number of tokens of this head
      // minus the mean over the heads.
      const double share =
          config().shares_slots() ? static_cast<double>(outcome.live_end) - counts.end : 0;
      mean_held_ += counts.held_mean + share;
      peak_held_ += counts.held_peak + share;
      end_held_ += counts.held_end + share;
      state_ += static_cast<double>(outcome.live_end) *
                static_cast<double>(config().exempts(layer) ? state_bytes_per_token({})
                                                            : state_bytes_per_token(config()));
      budget_ += counts.held_budget;
    });
  }
  double held_bytes() const {
    return static_cast<double>(kv_bytes_per_token(outcome_.shape.head_size));
  }
  /// Bytes of the tokens at the end, with 16-bit elements. As in all other byte counts, the trace's
  /// dtype does not matter.
  double end_bytes() const { return end_held_ * held_bytes(); }

  const ReplayOutcome& outcome_;
  const MeasuredQueries& measured_;
  SumsShape sums_;
  std::vector<Measurement> rows_;
  // Index of the configuration, and the layers [first_, last_) of the part.
  std::size_t c_ = 0, first_ = 0, last_ = 0;
  std::int32_t layer_ = 0, head_ = 0;  // layer and head of the rows
  std::string metric_;
  // Indices of the oracles with which the configuration is compared.
  std::optional<std::size_t> by_attention_, by_residual_;
  // By ResolvedConfig::layer_key() and budget.
  std::map<std::pair<std::uint32_t, std::uint32_t>, LiveCounts> known_counts_;
  std::uint64_t heads_ = 0;
  double evictions_ = 0, live_max_ = 0, zeros_ = 0;  // set by count()
  double mean_held_ = 0, peak_held_ = 0, end_held_ = 0, budget_ = 0, state_ = 0;
};

}  // namespace

void reduce_layer(LayerOutcome& layer, const MeasuredQueries& measured, std::size_t configs,
                  const LayerFacts& facts, unsigned threads) {
  const ProjectionColumns& columns = facts.columns;
  layer.changes.resize(configs);
  for (LayerRatios& ratios : layer.errors) {
    BlockedRatio none{.blocks = measured.blocks()};
    if (&ratios == &layer.errors[LayerError::residual] ||
        &ratios == &layer.errors[LayerError::quantization])
      none.columns.resize(columns.residual);
    ratios.layer.assign(configs, none);
    ratios.heads.assign(layer.heads.size(), ratios.layer);
  }
  parallel_for(configs, threads, [&](std::size_t c) {
    const bool residual = columns.residual && has_all(layer, c, &HeadStats::residual);
    for (std::uint32_t sample = 0; sample < measured.samples(); ++sample) {
      add_layer_error(layer, measured, c, sample);
      if (residual && facts.norm2[sample] > 0)
        add_residual(layer, measured, c, sample, columns.residual, facts.norm2[sample]);
    }
    if (columns.gradient_samples && has_all(layer, c, &HeadStats::changes))
      add_changes(layer, measured, c, columns.gradient_samples);
    for (auto& head : layer.heads) {
      head[c].stats.errors = {};
      head[c].stats.residual = {};
      head[c].stats.changes = {};
    }
  });
}

void JointChanges::add(LayerOutcome& layer) {
  for (std::size_t c = 0; c < sums_.size(); ++c) {
    sums_[c].resize(layer.changes[c].size());
    for (std::size_t i = 0; i < sums_[c].size(); ++i) sums_[c][i] += layer.changes[c][i];
  }
  layer.changes = {};
}

JointEstimates JointChanges::estimates(const MeasuredQueries& measured,
                                       std::uint32_t gradient_samples) const {
  const BlockedRatio none{.blocks = measured.blocks()};
  JointEstimates all{std::vector(sums_.size(), none), std::vector(sums_.size(), none)};
  for (std::size_t c = 0; c < sums_.size(); ++c)
    for (std::size_t first = 0; first < sums_[c].size(); first += gradient_samples) {
      double squares = 0;
      for (std::size_t i = first; i < first + gradient_samples; ++i)
        squares += static_cast<double>(sums_[c][i]) * static_cast<double>(sums_[c][i]);
      const double kl = squares / (2.0 * gradient_samples);
      const std::uint32_t block =
          measured.block_of(static_cast<std::uint32_t>(first / gradient_samples));
      all.kl[c].add(block, kl, 1);
      all.acceptance[c].add(block, acceptance_estimate(kl, gradient_samples), 1);
    }
  return all;
}

double unbiased_root_factor(std::uint32_t gradient_samples) {
  // Computes the ratio Γ(d/2) / Γ((d+1)/2), starting with d = 1. The ratio for each d follows from
  // the ratio for d − 1.
  double ratio = std::sqrt(std::numbers::pi);
  for (std::uint32_t d = 1; d < gradient_samples; ++d) ratio = 2.0 / (d * ratio);
  return std::sqrt(gradient_samples / 2.0) * ratio;
}

double acceptance_estimate(double kl, std::uint32_t gradient_samples) {
  return std::max(0.0,
                  1 - std::sqrt(kl / std::numbers::pi) * unbiased_root_factor(gradient_samples));
}

std::vector<Measurement> tabulate(const ReplayOutcome& outcome) {
  return Tabulator(outcome).rows();
}

}  // namespace kvlab
