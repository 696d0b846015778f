#include "sim/run/tabulate.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "sim/live_counts.hpp"

namespace kvlab {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// Turns outcomes into rows.
class Tabulator {
 public:
  Tabulator(const ModelShape& shape, const QuerySpan& span, const ResolvedConfig& config,
            std::size_t c, std::vector<Measurement>& rows)
      : shape_(shape), span_(span), config_(config), c_(c), rows_(rows) {}

  using Outcomes = std::vector<const HeadOutcome*>;
  using Ratios = std::vector<const BlockedRatio*>;

  /// One configuration's outcomes on a part of the model: a KV head, a layer, or all.
  struct ModelPart {
    Outcomes outcomes;
    Ratios layer, residual, kl;     ///< of one layer, or of each
    Ratios joint;                   ///< one, of all layers; or none
    std::vector<ReplayUnit> units;  ///< [outcome]

    /// Of a layer; of KV head `head` alone where that is not negative.
    void add(const LayerOutcome& of, std::uint32_t index, std::int32_t head, std::size_t c) {
      const auto squares = [&](const SquaredErrors& errors) {
        return head < 0 ? &errors.layer[c] : &errors.heads[static_cast<std::size_t>(head)][c];
      };
      if (head < 0) layer.push_back(&of.error[c]);
      residual.push_back(squares(of.residual));
      kl.push_back(squares(of.kl));
      for (std::size_t h = 0; h < of.heads.size(); ++h)
        if (head < 0 || h == static_cast<std::size_t>(head)) {
          outcomes.push_back(&of.heads[h][c]);
          units.push_back({index, static_cast<std::uint32_t>(h)});
        }
    }
    template <class Ratio>
    Ratios ratios(Ratio ratio) const {
      Ratios all;
      for (const HeadOutcome* outcome : outcomes)
        for (const HeadStats::PerQueryHead& head : outcome->stats.heads)
          all.push_back(&std::invoke(ratio, head));
      return all;
    }
  };
  void add_rows(std::int32_t layer, std::int32_t head, const ModelPart& part,
                const ModelPart* oracle, const ModelPart* residual_oracle) {
    layer_ = layer;
    head_ = head;
    using PerQueryHead = HeadStats::PerQueryHead;
    add_mean("recall", part.ratios(&PerQueryHead::recall), span_.size());
    add_mean("nll_recall", part.ratios(&PerQueryHead::nll), span_.size());
    if (oracle) add_regret(part, *oracle);
    add_mean("miss_rate", part.ratios(&PerQueryHead::miss), span_.size());
    if (config_.policy.name == kOracleTopk) return;  // picks from everything, and holds nothing
    add_held(part);
    add_mean("output_error", part.ratios(&PerQueryHead::error), {});
    const std::uint32_t heads = head < 0 ? shape_.query_heads : shape_.group();
    const auto layers = static_cast<std::uint32_t>(part.residual.size());
    add_layers("layer_error", mean_of(part.layer), 1, heads);
    add_layers("residual_error", mean_of(part.residual), layers, heads);
    if (residual_oracle)
      add_layers("regret_residual", difference_of(part.residual, residual_oracle->residual), layers,
                 heads);
    add_layers("kl_estimate", mean_of(part.kl), layers, heads);
    add_layers("kl_estimate_joint", mean_of(part.joint), 1, heads * layers);
    for (std::size_t s = 0; s < span_.named().size(); ++s)
      add_mean(
          std::string(kSpanRecall) + span_.named()[s].name,
          part.ratios([s](const PerQueryHead& of) -> const BlockedRatio& { return of.spans[s]; }),
          span_.queries_after(span_.named()[s]));
    add_totals(part.outcomes);
  }

 private:
  void add(std::string metric, double value, double standard_error, std::uint64_t count) {
    rows_.push_back({c_, layer_, head_, std::move(metric), value, standard_error, count});
  }
  /// `factor` times an estimate.
  void add(std::string metric, const Estimate& estimate, double factor, std::uint64_t count) {
    add(std::move(metric), factor * estimate.value, factor * estimate.standard_error, count);
    if (layer_ >= 0) return;
    for (const double block : estimate.blocks) rows_.back().blocks.push_back(factor * block);
  }

  /// Bytes of keys and values over decoded queries: what heads hold on average, and the sum of the
  /// most that each holds, which has to be allocated; and what the budget would take.
  void add_held(const ModelPart& part) {
    double mean = 0, peak = 0, budgets = 0;
    for (std::size_t i = 0; i < part.units.size(); ++i) {
      const auto [layer, head] = part.units[i];
      const std::uint32_t budget = config_.budget_of(layer, head);
      const auto found = counts_.find(budget);
      const LiveCounts& counts =
          found != counts_.end()
              ? found->second
              : counts_.emplace(budget, live_counts(config_, budget)).first->second;
      // Of the slots that a layer shares, this head's.
      const double share =
          config_.shares_slots() ? static_cast<double>(part.outcomes[i]->live_end) - counts.end : 0;
      mean += counts.held_mean + share;
      peak += counts.held_peak + share;
      budgets += counts.held_budget;
    }
    const auto bytes = static_cast<double>(kv_bytes_per_token(shape_.head_size));
    add("kv_bytes_mean", mean * bytes, kNaN, part.units.size());
    add("kv_bytes_peak", peak * bytes, kNaN, part.units.size());
    if (layer_ < 0) add("budget_bytes", budgets * bytes, kNaN, part.units.size());
  }

  /// `queries`: of each query head, to be counted; else what has weight is.
  void add_mean(const std::string& metric, const Ratios& ratios,
                std::optional<std::uint32_t> queries) {
    const auto filled = static_cast<std::uint64_t>(std::ranges::count_if(
        ratios, [](const BlockedRatio* ratio) { return ratio->weight() > 0; }));
    if (filled == 0) return;
    const Estimate estimate = mean_of(ratios);
    add(metric, estimate, 1,
        queries ? filled * *queries : static_cast<std::uint64_t>(estimate.weight));
  }

  /// What is lost beyond `oracle_mass`.
  void add_regret(const ModelPart& part, const ModelPart& oracle) {
    const auto nll = [](const ModelPart& of) { return of.ratios(&HeadStats::PerQueryHead::nll); };
    const Estimate regret = difference_of(nll(part), nll(oracle));
    add("regret_mass", regret.value, regret.standard_error,
        static_cast<std::uint64_t>(regret.weight));
  }

  /// `factor` times a mean over layers.
  void add_layers(const char* metric, const Estimate& estimate, double factor,
                  std::uint32_t heads) {
    if (!(estimate.weight > 0)) return;
    add(metric, estimate, factor, static_cast<std::uint64_t>(estimate.weight) * heads);
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
    total("state_bytes", live_end * state_bytes_per_token(config_));
    if (zeros) total("zero_outputs", zeros);
  }

  const ModelShape& shape_;
  const QuerySpan& span_;
  const ResolvedConfig& config_;
  std::map<std::uint32_t, LiveCounts> counts_;  // by budget
  std::size_t c_;
  std::vector<Measurement>& rows_;
  std::int32_t layer_ = 0, head_ = 0;
};

/// An oracle beside a policy: at the same budget and prefill.
std::optional<std::size_t> oracle_beside(std::span<const ResolvedConfig> configs, std::size_t c,
                                         std::string_view name) {
  if (is_reference(configs[c].policy.name) || !configs[c].evicts()) return std::nullopt;
  for (std::size_t other = 0; other < configs.size(); ++other)
    if (configs[other].policy.name == name &&
        configs[other].budget.text() == configs[c].budget.text() &&
        configs[other].prefill.chunk == configs[c].prefill.chunk)
      return other;
  return std::nullopt;
}

}  // namespace

std::vector<Measurement> tabulate(const ModelShape& shape, const QuerySpan& span,
                                  std::span<const ResolvedConfig> configs,
                                  std::span<const std::uint32_t> layer_indices,
                                  const std::vector<LayerOutcome>& layers,
                                  std::span<const BlockedRatio> joint) {
  using ModelPart = Tabulator::ModelPart;
  std::vector<Measurement> rows;
  for (std::size_t c = 0; c < configs.size(); ++c) {
    Tabulator table(shape, span, configs[c], c, rows);
    const auto by_mass = oracle_beside(configs, c, kOracleMass),
               by_residual = oracle_beside(configs, c, kOracleResidual);
    const auto of_layer = [&](std::size_t l, std::int32_t head, std::size_t config) {
      ModelPart part;
      part.add(layers[l], layer_indices[l], head, config);
      return part;
    };
    const auto of_all = [&](std::size_t config) {
      ModelPart part{.joint = {&joint[config]}};
      for (std::size_t l = 0; l < layers.size(); ++l)
        part.add(layers[l], layer_indices[l], -1, config);
      return part;
    };
    const auto add_rows = [&](std::int32_t layer, std::int32_t head, const auto& part_of) {
      std::optional<ModelPart> mass, residual;
      if (by_mass) mass = part_of(*by_mass);
      if (by_residual) residual = part_of(*by_residual);
      table.add_rows(layer, head, part_of(c), mass ? &*mass : nullptr,
                     residual ? &*residual : nullptr);
    };
    for (std::size_t l = 0; l < layers.size(); ++l) {
      const auto heads = static_cast<std::int32_t>(layers[l].heads.size());
      const auto layer = static_cast<std::int32_t>(layer_indices[l]);
      for (std::int32_t h = 0; h < heads; ++h)
        add_rows(layer, h, [&](std::size_t config) { return of_layer(l, h, config); });
      add_rows(layer, -1, [&](std::size_t config) { return of_layer(l, -1, config); });
    }
    add_rows(-1, -1, of_all);
  }
  return rows;
}

}  // namespace kvlab
