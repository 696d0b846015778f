#include "sim/run/tabulate.hpp"

#include <algorithm>
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

  void head(std::int32_t layer, std::int32_t head, const HeadOutcome& outcome) {
    add_rows(layer, head, {&outcome}, {});
  }
  void aggregate(std::int32_t layer, const std::vector<const HeadOutcome*>& outcomes,
                 const std::vector<const BlockedRatio*>& layer_errors) {
    add_rows(layer, -1, outcomes, layer_errors);
  }

 private:
  using Outcomes = std::vector<const HeadOutcome*>;

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

  void add_rows(std::int32_t layer, std::int32_t head, const Outcomes& outcomes,
                const std::vector<const BlockedRatio*>& layer_errors) {
    layer_ = layer;
    head_ = head;
    using PerQueryHead = HeadStats::PerQueryHead;
    add_mean("recall", outcomes, &PerQueryHead::recall, true);
    add_mean("nll_recall", outcomes, &PerQueryHead::nll, true);
    add_mean("miss_rate", outcomes, &PerQueryHead::miss, true);
    if (config_.policy.name == kOracleTopk) return;
    add_mean("output_error", outcomes, &PerQueryHead::error, false);
    if (!layer_errors.empty()) {
      const Estimate estimate = mean_of(layer_errors);
      if (estimate.weight > 0)
        add("layer_error", estimate.value, estimate.standard_error,
            static_cast<std::uint64_t>(estimate.weight) * shape_.query_heads);
    }
    add_totals(outcomes);
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

}  // namespace

void reduce_layer(LayerOutcome& layer, const QuerySpan& span, std::size_t configs) {
  layer.error.resize(configs);
  for (std::size_t c = 0; c < configs; ++c) {
    layer.error[c].resize(span.blocks());
    for (std::uint32_t sample = 0; sample < span.samples(); ++sample) {
      double error = 0, output = 0;
      for (const auto& head : layer.heads) {
        error += head[c].stats.error2[sample];
        output += head[c].stats.output2[sample];
      }
      if (output > 0)
        layer.error[c].add(span.block_of_sample(sample), std::sqrt(error / output), 1);
    }
    for (auto& head : layer.heads) {
      head[c].stats.error2 = {};
      head[c].stats.output2 = {};
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
    std::vector<const HeadOutcome*> all;
    std::vector<const BlockedRatio*> all_errors;
    for (std::size_t l = 0; l < layers.size(); ++l) {
      const auto layer = static_cast<std::int32_t>(layer_indices[l]);
      std::vector<const HeadOutcome*> heads;
      for (std::size_t h = 0; h < layers[l].heads.size(); ++h) {
        heads.push_back(&layers[l].heads[h][c]);
        table.head(layer, static_cast<std::int32_t>(h), *heads.back());
      }
      table.aggregate(layer, heads, {&layers[l].error[c]});
      all.insert(all.end(), heads.begin(), heads.end());
      all_errors.push_back(&layers[l].error[c]);
    }
    table.aggregate(-1, all, all_errors);
  }
  return rows;
}

}  // namespace kvlab
