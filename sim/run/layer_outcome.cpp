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
    error += head[c].stats.error2[sample];
    output += head[c].stats.output2[sample];
  }
  if (output > 0) layer.error[c].add(span.block_of_sample(sample), std::sqrt(error / output), 1);
}

/// Whether each head has a projection: a reference that has no outputs has none.
bool is_projected(const LayerOutcome& layer, std::size_t c) {
  return std::ranges::none_of(layer.heads,
                              [c](const auto& head) { return head[c].stats.projected.empty(); });
}

/// Some columns of a projection.
struct ColumnRange {
  std::uint32_t first, count;
};

/// The squared sums of some columns over the heads, and those of each head, divided by `by`.
void add_squares(SquaredErrors& to, LayerOutcome& layer, const QuerySpan& span, std::size_t c,
                 std::uint32_t sample, ColumnRange columns, double by) {
  const std::uint32_t block = span.block_of_sample(sample);
  std::vector<double> sum(columns.count);
  for (std::size_t h = 0; h < layer.heads.size(); ++h) {
    const auto own = layer.heads[h][c].stats.projected_of(sample).subspan(columns.first);
    double squares = 0;
    for (std::uint32_t i = 0; i < columns.count; ++i) {
      const double x = own[i];
      squares += x * x;
      sum[i] += x;
    }
    to.heads[h][c].add(block, squares / by, 1);
  }
  double squares = 0;
  for (const double x : sum) squares += x * x;
  to.layer[c].add(block, squares / by, 1);
}

/// The columns of the draws, summed over the heads.
void keep_changes(LayerOutcome& layer, const QuerySpan& span, std::size_t c,
                  const ProjectionColumns& columns) {
  std::vector<float>& changes = layer.changes[c];
  changes.resize(std::size_t{span.samples()} * columns.draws);
  for (std::uint32_t sample = 0; sample < span.samples(); ++sample)
    for (std::uint32_t draw = 0; draw < columns.draws; ++draw) {
      double sum = 0;
      for (auto& head : layer.heads)
        sum += head[c].stats.projected_of(sample)[columns.residual + draw];
      changes[std::size_t{sample} * columns.draws + draw] = static_cast<float>(sum);
    }
}

void resize(SquaredErrors& errors, const QuerySpan& span, std::size_t heads, std::size_t configs) {
  BlockedRatio none;
  none.resize(span.blocks());
  errors.layer.assign(configs, none);
  errors.heads.assign(heads, errors.layer);
}

}  // namespace

void reduce_layer(LayerOutcome& layer, const QuerySpan& span, std::size_t configs,
                  const LayerFacts& facts, unsigned threads) {
  const ProjectionColumns& columns = facts.columns;
  layer.error.resize(configs);
  layer.changes.resize(configs);
  resize(layer.residual, span, layer.heads.size(), configs);
  resize(layer.kl, span, layer.heads.size(), configs);
  parallel_for(configs, threads, [&](std::size_t c) {
    layer.error[c].resize(span.blocks());
    const bool projected = is_projected(layer, c);
    for (std::uint32_t sample = 0; sample < span.samples(); ++sample) {
      add_layer_error(layer, span, c, sample);
      if (projected && columns.residual && facts.norm2[sample] > 0)
        add_squares(layer.residual, layer, span, c, sample, {0, columns.residual},
                    facts.norm2[sample]);
      if (projected && columns.draws)
        add_squares(layer.kl, layer, span, c, sample, {columns.residual, columns.draws},
                    2.0 * columns.draws);
    }
    if (projected && columns.draws) keep_changes(layer, span, c, columns);
    for (auto& head : layer.heads) {
      head[c].stats.error2 = {};
      head[c].stats.output2 = {};
      head[c].stats.projected = {};
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
    ratios[c].resize(span.blocks());
    for (std::size_t first = 0; first < sums_[c].size(); first += draws) {
      double squares = 0;
      for (std::size_t i = first; i < first + draws; ++i) squares += sums_[c][i] * sums_[c][i];
      ratios[c].add(span.block_of_sample(static_cast<std::uint32_t>(first / draws)),
                    squares / (2.0 * draws), 1);
    }
  }
  return ratios;
}

}  // namespace kvlab
