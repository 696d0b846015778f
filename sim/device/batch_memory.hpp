// What the units of a batch take of device memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "kernels/host/arena.hpp"
#include "kernels/replay/replay.hpp"
#include "sim/error_projection.hpp"

namespace kvlab {

/// The sizes of one unit, in elements where it does not say bytes.
struct UnitSizes {
  std::size_t tokens, group, dim, pairs, quads, block, slots, configs, queries, samples,
      block_samples, named, token_columns;
  std::size_t state_stride, product_bytes, element_bytes;
  std::size_t copies, key_parts, value_parts;  ///< of tokens as ladders keep them
  bool squeezed, rounds, on_rungs;
  ProjectionColumns columns = {};
  bool figures = true;  ///< or outputs alone

  bool unrounded() const { return squeezed && rounds; }
  std::size_t words() const { return (tokens + 31) / 32; }
  /// Queries of a block whose kept sets are left: all, where there are gradients.
  std::size_t block_kept() const { return columns.draws ? block : block_samples; }
  /// Numbers of a query's gradients, and of a token's terms of it.
  std::size_t gradient() const { return columns.draws * group * dim; }
  std::size_t terms() const { return columns.draws * group; }
  /// A unit's part of the trace in float32, where it lands, in bytes; so many units land at a time.
  std::size_t landing() const { return (group + 2) * tokens * dim * sizeof(float); }
  std::size_t land_at_once(std::size_t units, std::size_t threads) const {
    constexpr std::size_t kBytes = std::size_t{256} << 20;
    return std::clamp<std::size_t>(kBytes / landing(), 1, std::min(units, threads));
  }
};

/// What the arguments of kernels are put together of. Null where the replay has no use for it.
struct BatchParts {
  kernels::ReplayBlock block;
  kernels::ReplaySqueezedRows squeezed;
  kernels::ReplayCopies copies;
  kernels::ReplaySlots slots;
  kernels::ReplayTerms terms;
  kernels::ReplayCounts counts;
  // As kernels' arguments have them.
  float *queries, *plain_queries, *query_parts, *key_parts, *key_scales;
  std::byte *keys, *values, *paired_keys, *rounded_queries, *rounded_keys, *coded_keys,
      *coded_values;
  float *products, *unrounded_products, *outputs, *block_residual, *term_scales;
  float4* exact_most;
  double2* block_errors;
  std::uint32_t* places;
  std::uint8_t* slot_rungs;
  float* columns;        // [unit, token_columns of each token], those of one policy together
  float* sketches;       // [unit, group, dim, kReplayResiduals]
  std::byte* gradients;  // [unit, query of the span, draw, group, dim] of the trace's type
  // Zero before a replay.
  std::span<kernels::ReplayProgress> progress;
  std::span<double> sums, errors;
  std::span<float> recalls, residual, changes;  // set by the replay
};

/// Lays out `units` units.
void lay_out(cuda::Arena& arena, const UnitSizes& sizes, std::size_t units, BatchParts& parts);

/// What that takes.
std::size_t bytes_of(const UnitSizes& sizes, std::size_t units);

}  // namespace kvlab
