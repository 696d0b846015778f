#include "sim/run/tabulate.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
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

  /// Errors of one layer, or of each.
  struct Errors {
    Ratios layer, residual, kl, calibrated;
    Ratios joint;  ///< one, of all layers; or none

    /// Of a layer; of KV head `head` alone where that is not negative.
    void add(const LayerOutcome& of, std::int32_t head, std::size_t c) {
      const auto squares = [&](const SquaredErrors& errors) {
        return head < 0 ? &errors.layer[c] : &errors.heads[static_cast<std::size_t>(head)][c];
      };
      if (head < 0) layer.push_back(&of.error[c]);
      residual.push_back(squares(of.residual));
      kl.push_back(squares(of.kl));
      calibrated.push_back(squares(of.calibrated));
    }
  };

  void add_rows(std::int32_t layer, std::int32_t head, const Outcomes& outcomes,
                const Errors& errors) {
    layer_ = layer;
    head_ = head;
    using PerQueryHead = HeadStats::PerQueryHead;
    add_mean("recall", outcomes, &PerQueryHead::recall, span_.size());
    add_mean("nll_recall", outcomes, &PerQueryHead::nll, span_.size());
    add_mean("miss_rate", outcomes, &PerQueryHead::miss, span_.size());
    if (config_.policy.name == kOracleTopk) return;
    add_mean("output_error", outcomes, &PerQueryHead::error, {});
    const std::uint32_t heads = head < 0 ? shape_.query_heads : shape_.group();
    const auto layers = static_cast<std::uint32_t>(errors.residual.size());
    add_layers("layer_error", errors.layer, 1, heads);
    add_layers("residual_error", errors.residual, layers, heads);
    add_layers("kl_estimate", errors.kl, layers, heads);
    add_layers("kl_estimate_joint", errors.joint, 1, heads * layers);
    add_layers("calibrated_error", errors.calibrated, layers, heads);
    for (std::size_t s = 0; s < span_.named().size(); ++s)
      add_mean(
          std::string(kSpanRecall) + span_.named()[s].name, outcomes,
          [s](const PerQueryHead& of) -> const BlockedRatio& { return of.spans[s]; },
          span_.queries_after(span_.named()[s]));
    add_totals(outcomes);
  }

 private:
  void add(std::string metric, double value, double standard_error, std::uint64_t count) {
    rows_.push_back({c_, layer_, head_, std::move(metric), value, standard_error, count});
  }

  /// The mean of ratio(query head). `queries`: of each head, to be counted; else what has weight
  /// is.
  template <class Ratio>
  void add_mean(const std::string& metric, const Outcomes& outcomes, Ratio ratio,
                std::optional<std::uint32_t> queries) {
    std::vector<const BlockedRatio*> ratios;
    std::uint64_t filled = 0;
    for (const HeadOutcome* outcome : outcomes)
      for (const HeadStats::PerQueryHead& head : outcome->stats.heads) {
        ratios.push_back(&std::invoke(ratio, head));
        filled += ratios.back()->weight() > 0;
      }
    if (filled == 0) return;
    const Estimate estimate = mean_of(ratios);
    const std::uint64_t count =
        queries ? filled * *queries : static_cast<std::uint64_t>(estimate.weight);
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

  /// Policy state and columns, position and, where positions are squeezed, rank.
  std::uint64_t state_bytes_per_token() const {
    const std::uint64_t slot = config_.policy.entry ? config_.policy.entry->token_bytes() : 8;
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

std::vector<Measurement> tabulate(const ModelShape& shape, const QuerySpan& span,
                                  std::span<const CacheConfig> configs,
                                  std::span<const std::uint32_t> layer_indices,
                                  const std::vector<LayerOutcome>& layers,
                                  std::span<const BlockedRatio> joint) {
  std::vector<Measurement> rows;
  for (std::size_t c = 0; c < configs.size(); ++c) {
    Tabulator table(shape, span, configs[c], c, rows);
    Tabulator::Outcomes all;
    Tabulator::Errors errors{.joint = {&joint[c]}};
    for (std::size_t l = 0; l < layers.size(); ++l) {
      const auto layer = static_cast<std::int32_t>(layer_indices[l]);
      Tabulator::Outcomes heads;
      for (std::size_t h = 0; h < layers[l].heads.size(); ++h) {
        const auto head = static_cast<std::int32_t>(h);
        heads.push_back(&layers[l].heads[h][c]);
        Tabulator::Errors own;
        own.add(layers[l], head, c);
        table.add_rows(layer, head, {heads.back()}, own);
      }
      Tabulator::Errors own;
      own.add(layers[l], -1, c);
      table.add_rows(layer, -1, heads, own);
      all.insert(all.end(), heads.begin(), heads.end());
      errors.add(layers[l], -1, c);
    }
    table.add_rows(-1, -1, all, errors);
  }
  return rows;
}

}  // namespace kvlab
