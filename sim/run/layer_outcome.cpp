#include "sim/run/layer_outcome.hpp"

#include <algorithm>
#include <cmath>

#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

void add_layer_error(LayerOutcome& layer, const QuerySpan& span, std::size_t c,
                     std::uint32_t sample) {
  double error = 0, output = 0;
  for (const auto& head : layer.heads) {
    error += head[c].stats.errors[2 * sample];
    output += head[c].stats.errors[2 * sample + 1];
  }
  if (output > 0)
    layer.errors[LayerError::outputs].layer[c].add(span.block_of_sample(sample),
                                                   std::sqrt(error / output), 1);
}

/// Whether each head has `what`: a reference that has no outputs has none.
bool has_all(const LayerOutcome& layer, std::size_t c, std::vector<float> HeadStats::*what) {
  return std::ranges::none_of(layer.heads,
                              [&](const auto& head) { return (head[c].stats.*what).empty(); });
}

/// The squared sums over the heads of what `of` gives of each, `count` numbers, and those of each
/// head, divided by `by`; by number too where `to` has columns. Of less than 0 they are taken away
/// from others that have been counted.
template <class Of>
void add_squares(LayerError::Kind error, LayerOutcome& layer, std::size_t c, std::uint32_t block,
                 std::uint32_t count, double by, Of of) {
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
    const float* const own = of(layer.heads[h][c].stats);
    for (std::uint32_t i = 0; i < count; ++i) sum[i] += own[i];
    add(to.heads[h][c], own);
  }
  add(to.layer[c], sum.data());
}

/// Of a sample: the squares behind W_o, and what they are more than without codes.
void add_residual(LayerOutcome& layer, const QuerySpan& span, std::size_t c, std::uint32_t sample,
                  std::uint32_t columns, double norm2) {
  const std::uint32_t block = span.block_of_sample(sample);
  const auto own = [&](HeadStats& stats) { return stats.residual_of(sample); };
  add_squares(LayerError::residual, layer, c, block, columns, norm2, own);
  if (!layer.heads.front()[c].stats.separates_codes(columns)) return;
  add_squares(LayerError::coding, layer, c, block, columns, norm2, own);
  add_squares(LayerError::coding, layer, c, block, columns, -norm2, [&](HeadStats& stats) {
    float* const without = stats.residual_of(sample);
    for (std::uint32_t i = 0; i < columns; ++i) without[i] -= without[columns + i];
    return without;
  });
}

/// Of every query of the span; and the changes, summed over the heads.
void add_changes(LayerOutcome& layer, const QuerySpan& span, std::size_t c, std::uint32_t draws) {
  std::vector<float>& changes = layer.changes[c];
  changes.resize(std::size_t{span.size()} * draws);
  for (std::uint32_t i = 0; i < span.size(); ++i)
    add_squares(LayerError::kl, layer, c, span.block_of(i), draws, 2.0 * draws,
                [&](HeadStats& stats) {
                  const float* const own = stats.changes_of(i, draws);
                  for (std::uint32_t draw = 0; draw < draws; ++draw)
                    changes[std::size_t{i} * draws + draw] += own[draw];
                  return own;
                });
}

}  // namespace

void reduce_layer(LayerOutcome& layer, const QuerySpan& span, std::size_t configs,
                  const LayerFacts& facts, unsigned threads) {
  const ProjectionColumns& columns = facts.columns;
  layer.changes.resize(configs);
  for (LayerRatios& ratios : layer.errors) {
    BlockedRatio none{.blocks = span.blocks()};
    if (&ratios == &layer.errors[LayerError::residual] ||
        &ratios == &layer.errors[LayerError::coding])
      none.columns.resize(columns.residual);
    ratios.layer.assign(configs, none);
    ratios.heads.assign(layer.heads.size(), ratios.layer);
  }
  parallel_for(configs, threads, [&](std::size_t c) {
    const bool residual = columns.residual && has_all(layer, c, &HeadStats::residual);
    for (std::uint32_t sample = 0; sample < span.samples(); ++sample) {
      add_layer_error(layer, span, c, sample);
      if (residual && facts.norm2[sample] > 0)
        add_residual(layer, span, c, sample, columns.residual, facts.norm2[sample]);
    }
    if (columns.draws && has_all(layer, c, &HeadStats::changes))
      add_changes(layer, span, c, columns.draws);
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

std::vector<BlockedRatio> JointChanges::squares(const QuerySpan& span, std::uint32_t draws) const {
  std::vector<BlockedRatio> ratios(sums_.size());
  for (std::size_t c = 0; c < sums_.size(); ++c) {
    ratios[c].blocks = span.blocks();
    for (std::size_t first = 0; first < sums_[c].size(); first += draws) {
      double squares = 0;
      for (std::size_t i = first; i < first + draws; ++i)
        squares += static_cast<double>(sums_[c][i]) * static_cast<double>(sums_[c][i]);
      ratios[c].add(span.block_of(static_cast<std::uint32_t>(first / draws)),
                    squares / (2.0 * draws), 1);
    }
  }
  return ratios;
}

}  // namespace kvlab
