// Device memory of the head tasks of a batch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "kernels/host/arena.hpp"
#include "kernels/replay/replay.hpp"
#include "sim/error_projection.hpp"

namespace kvlab {

/// The sizes of one head task, in elements unless the name says bytes.
struct HeadTaskSizes {
  std::size_t tokens, group, dim, pairs, head_groups, block, slots, configs, queries, samples,
      block_samples, named, token_features;
  std::size_t state_stride, product_bytes, element_bytes;
  /// copies: number of dequantized copies of all tokens that tier plans need. key_parts,
  /// value_parts: number of parts whose sum is a copied key or value, see kernels::ReplayCopies.
  std::size_t copies, key_parts, value_parts;
  bool cache_positions, rounds, uses_tiers;
  ProjectionColumns columns = {};
  bool metrics = true;  ///< whether metrics are computed; otherwise only outputs are

  bool keeps_unrounded() const { return cache_positions && rounds; }
  std::size_t words() const { return (tokens + 31) / 32; }
  /// Number of queries of a block whose sets of kept tokens are stored: all queries if there are
  /// gradients, otherwise the sampled ones.
  std::size_t block_kept() const { return columns.gradient_samples ? block : block_samples; }
  /// Number of gradient elements of a query. terms() is the number of dot products of `dim`
  /// elements that are computed between one token's value and these gradients.
  std::size_t gradient() const { return columns.gradient_samples * group * dim; }
  std::size_t terms() const { return columns.gradient_samples * group; }
  /// Bytes of a head task's queries, keys and values, which are sent to the device in float32.
  /// land_at_once() is the number of head tasks that are sent together.
  std::size_t landing() const { return (group + 2) * tokens * dim * sizeof(float); }
  std::size_t land_at_once(std::size_t tasks, std::size_t threads) const {
    constexpr std::size_t kBytes = std::size_t{256} << 20;
    return std::clamp<std::size_t>(kBytes / landing(), 1, std::min(tasks, threads));
  }
};

/// The buffers from which kernel arguments are built. A buffer that the replay does not need is
/// null.
struct BatchParts {
  kernels::ReplayBlock block;
  kernels::ReplayCachePositionRows cache_positions;
  kernels::ReplayCopies copies;
  kernels::ReplaySlots slots;
  kernels::ReplayTerms terms;
  kernels::ReplayCounts counts;
  // These members have the names of the kernels' arguments to which they are passed.
  float *queries, *plain_queries, *query_parts, *key_parts, *key_scales;
  std::byte *keys, *values, *paired_keys, *rounded_queries, *rounded_keys, *quantized_keys,
      *quantized_values;
  float *products, *unrounded_products, *outputs, *block_residual, *term_scales;
  float4* exact_max;
  double2* block_errors;
  std::uint32_t* positions_in_cache;
  std::uint8_t* slot_tiers;
  // [head task, token_features of each token]; the features that one policy reads are contiguous
  float* features;
  float* sketches;  // [head task, group, dim, kReplayResiduals]
  // [head task, measured query, gradient sample, group, dim], in the trace's dtype
  std::byte* gradients;
  // The caller must set these to zero before a replay.
  std::span<kernels::ReplayProgress> progress;
  std::span<double> sums, errors;
  std::span<float> recalls, residual, changes;  // written by the replay
};

/// Allocates the buffers of `tasks` head tasks.
void lay_out(cuda::Arena& arena, const HeadTaskSizes& sizes, std::size_t tasks, BatchParts& parts);

/// The bytes that lay_out() takes.
std::size_t bytes_of(const HeadTaskSizes& sizes, std::size_t tasks);

}  // namespace kvlab
