#include "sim/run/tabulate.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

namespace kvlab {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// Turns outcomes into rows.
class Tabulator {
 public:
  Tabulator(const ModelShape& shape, const QuerySpan& span, const CacheConfig& config,
            std::size_t c, std::vector<Measurement>& rows)
      : shape_(shape), span_(span), config_(config), c_(c), rows_(rows) {}

  using Outcomes = std::vector<const HeadOutcome*>;
  using Ratios = std::vector<const BlockedRatio*>;

  /// `layer_errors` and `residuals`: one for each layer.
  void add_rows(std::int32_t layer, std::int32_t head, const Outcomes& outcomes,
                const Ratios& layer_errors, const Ratios& residuals) {
    layer_ = layer;
    head_ = head;
    using PerQueryHead = HeadStats::PerQueryHead;
    add_mean("recall", outcomes, &PerQueryHead::recall, true);
    add_mean("nll_recall", outcomes, &PerQueryHead::nll, true);
    add_mean("miss_rate", outcomes, &PerQueryHead::miss, true);
    if (config_.policy.name == kOracleTopk) return;
    add_mean("output_error", outcomes, &PerQueryHead::error, false);
    add_layers("layer_error", layer_errors, 1, shape_.query_heads);
    add_layers("residual_error", residuals, static_cast<double>(residuals.size()),
               head < 0 ? shape_.query_heads : shape_.group());
    add_totals(outcomes);
  }

 private:
  void add(std::string metric, double value, double standard_error, std::uint64_t count) {
    rows_.push_back({c_, layer_, head_, std::move(metric), value, standard_error, count});
  }

  void add_mean(const char* metric, const Outcomes& outcomes,
                BlockedRatio HeadStats::PerQueryHead::*ratio, bool count_queries) {
    std::vector<const BlockedRatio*> ratios;
    std::uint64_t filled = 0;
    for (const HeadOutcome* outcome : outcomes)
      for (const HeadStats::PerQueryHead& head : outcome->stats.heads) {
        ratios.push_back(&(head.*ratio));
        filled += (head.*ratio).weight() > 0;
      }
    if (filled == 0) return;
    const Estimate estimate = mean_of(ratios);
    const std::uint64_t count =
        count_queries ? filled * span_.size() : static_cast<std::uint64_t>(estimate.weight);
    add(metric, estimate.value, estimate.standard_error, count);
  }

  /// `factor` times the mean over layers.
  void add_layers(const char* metric, const Ratios& ratios, double factor, std::uint32_t heads) {
    if (ratios.empty()) return;
    const Estimate estimate = mean_of(ratios);
    if (estimate.weight <= 0) return;
    add(metric, factor * estimate.value, factor * estimate.standard_error,
        static_cast<std::uint64_t>(estimate.weight) * heads);
  }

  void add_totals(const Outcomes& outcomes) {
    std::uint64_t evictions = 0, live_max = 0, live_end = 0, zeros = 0;
    for (const HeadOutcome* outcome : outcomes) {
      evictions += outcome->evictions;
      live_max = std::max(live_max, outcome->live_max);
      live_end += outcome->live_end;
      for (const HeadStats::PerQueryHead& head : outcome->stats.heads) zeros += head.zero_outputs;
    }
    const std::uint64_t kv_bytes = live_end * 2 * shape_.head_size * bytes_of(shape_.dtype);
    const auto total = [&](const char* metric, std::uint64_t value) {
      add(metric, static_cast<double>(value), kNaN, outcomes.size());
    };
    total("evictions", evictions);
    total("live_max", live_max);
    total("kv_bytes", kv_bytes);
    total("state_bytes", live_end * state_bytes_per_token());
    if (zeros) total("zero_outputs", zeros);
  }

  /// Policy state, position and, where positions are squeezed, rank.
  std::uint64_t state_bytes_per_token() const {
    const std::uint64_t slot = config_.policy.entry ? config_.policy.entry->slot_bytes : 8;
    return slot + 4 + (config_.positions == Positions::cache ? 4 : 0);
  }

  const ModelShape& shape_;
  const QuerySpan& span_;
  const CacheConfig& config_;
  std::size_t c_;
  std::vector<Measurement>& rows_;
  std::int32_t layer_ = 0, head_ = 0;
};

void add_layer_error(LayerOutcome& layer, const QuerySpan& span, std::size_t c,
                     std::uint32_t sample) {
  double error = 0, output = 0;
  for (const auto& head : layer.heads) {
    error += head[c].stats.error2[sample];
    output += head[c].stats.output2[sample];
  }
  if (output > 0) layer.error[c].add(span.block_of_sample(sample), std::sqrt(error / output), 1);
}

/// The heads' errors as vectors, and then their square.
void add_residual_error(LayerOutcome& layer, std::uint32_t block, std::size_t c,
                        std::uint32_t sample, double norm2) {
  std::array<double, kResidualColumns> sum{};
  for (std::size_t h = 0; h < layer.heads.size(); ++h) {
    HeadStats& stats = layer.heads[h][c].stats;
    if (stats.residual.empty()) return;  // of a reference that has no outputs
    double own = 0;
    for (std::uint32_t column = 0; column < kResidualColumns; ++column) {
      const double x = stats.residual_of(sample)[column];
      own += x * x;
      sum[column] += x;
    }
    layer.head_residual[h][c].add(block, own / norm2, 1);
  }
  double all = 0;
  for (const double x : sum) all += x * x;
  layer.residual[c].add(block, all / norm2, 1);
}

}  // namespace

void reduce_layer(LayerOutcome& layer, const QuerySpan& span, std::size_t configs,
                  std::span<const float> norm2) {
  layer.error.resize(configs);
  layer.residual.resize(configs);
  layer.head_residual.assign(layer.heads.size(), std::vector<BlockedRatio>(configs));
  for (std::size_t c = 0; c < configs; ++c) {
    layer.error[c].resize(span.blocks());
    layer.residual[c].resize(span.blocks());
    for (auto& head : layer.head_residual) head[c].resize(span.blocks());
    for (std::uint32_t sample = 0; sample < span.samples(); ++sample) {
      add_layer_error(layer, span, c, sample);
      if (!norm2.empty() && norm2[sample] > 0)
        add_residual_error(layer, span.block_of_sample(sample), c, sample, norm2[sample]);
    }
    for (auto& head : layer.heads) {
      head[c].stats.error2 = {};
      head[c].stats.output2 = {};
      head[c].stats.residual = {};
    }
  }
}

std::vector<Measurement> tabulate(const ModelShape& shape, const QuerySpan& span,
                                  std::span<const CacheConfig> configs,
                                  std::span<const std::uint32_t> layer_indices,
                                  const std::vector<LayerOutcome>& layers) {
  std::vector<Measurement> rows;
  for (std::size_t c = 0; c < configs.size(); ++c) {
    Tabulator table(shape, span, configs[c], c, rows);
    Tabulator::Outcomes all;
    Tabulator::Ratios errors, residuals;
    for (std::size_t l = 0; l < layers.size(); ++l) {
      const auto layer = static_cast<std::int32_t>(layer_indices[l]);
      Tabulator::Outcomes heads;
      for (std::size_t h = 0; h < layers[l].heads.size(); ++h) {
        heads.push_back(&layers[l].heads[h][c]);
        table.add_rows(layer, static_cast<std::int32_t>(h), {heads.back()}, {},
                       {&layers[l].head_residual[h][c]});
      }
      table.add_rows(layer, -1, heads, {&layers[l].error[c]}, {&layers[l].residual[c]});
      all.insert(all.end(), heads.begin(), heads.end());
      errors.push_back(&layers[l].error[c]);
      residuals.push_back(&layers[l].residual[c]);
    }
    table.add_rows(-1, -1, all, errors, residuals);
  }
  return rows;
}

}  // namespace kvlab
