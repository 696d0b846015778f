// Moves weights to shared memory: one warp of a thread block requests them, and eight warps read
// them.
//
// A stage of the ring is a tile of eight weight rows by 1,024 elements along k. Each of the eight
// warps reads 128 of these elements of each row. kInFlight stages are in flight at any time, which
// keeps the memory busy. With more stages in flight, the other loads of the block would wait
// longer, in particular the load of x, which all products need. At the beginning x has not arrived
// yet, so even fewer stages (kFirstInFlight) are in flight until every stage of the ring has been
// requested once. Data that has arrived may stay in the ring until it is read.
#pragma once

#include <cstddef>

#include "kernels/device/barrier.cuh"
#include "kernels/linear/linear_product.cuh"

namespace kvlab::kernels {

inline constexpr int kTileRows = 8;  // weight rows of a tile; also the maximum number of rows of x
inline constexpr int kTiles = 2;     // tiles per strip
inline constexpr int kLoadK = 32;    // elements along k that a row's four lanes load, 16 bytes each
inline constexpr int kLoads = 4;     // loads per warp and stage
inline constexpr int kWarpK = kLoads * kLoadK;
inline constexpr int kStageK = kLinearWarps * kWarpK;  // elements along k of a stage
inline constexpr int kLoadBytes = kWarpSize * 16;
inline constexpr int kStageBytes = kLinearWarps * kLoads * kLoadBytes;
inline constexpr int kPreferredStages = 4, kMaxStages = 12;
inline constexpr int kMinStages = 2;                     // used if more stages do not fit
inline constexpr int kInFlight = 4, kFirstInFlight = 3;  // stages in flight

__host__ __device__ constexpr bool has_norm(Form form) { return form != Form::plain; }
__host__ __device__ constexpr int outputs_of_strip(Form form) {
  return form == Form::gated ? kTileRows : kTiles * kTileRows;
}
__host__ __device__ constexpr int strips_of(Form form, int n) {
  return (n + outputs_of_strip(form) - 1) / outputs_of_strip(form);
}

/// The first weight row of a rotated strip. It is in the first half of a head.
__device__ inline int first_rotated_row(int strip, int head_size) {
  const int strips = head_size / (kTiles * kTileRows);  // strips per head
  return strip / strips * head_size + strip % strips * kTileRows;
}
__device__ inline int first_row_of_tile(Form form, int strip, int tile, int head_size) {
  if (form == Form::gated) return strip * kTileRows;
  if (form == Form::rotated) return first_rotated_row(strip, head_size) + tile * (head_size / 2);
  return (strip * kTiles + tile) * kTileRows;
}

/// Barriers of the ring, in shared memory.
struct RingBarriers {
  PhaseBarrier full[kMaxStages], empty[kMaxStages];
  /// Called by one thread. Its effect is visible after the block's next barrier. (When the
  /// requesting warp initialized one barrier per lane instead, a launch took 0.3 us longer.)
  __device__ void init() {
    for (int i = 0; i < kMaxStages; ++i) {
      full[i].init(kWarpSize);
      empty[i].init(kLinearWarps);
    }
  }
};

/// A stage of the ring, and the parity of its phase.
struct RingCursor {
  int slot = 0;
  unsigned parity = 0;
  __device__ void advance(int stages) {
    if (++slot < stages) return;
    slot = 0;
    parity ^= 1;
  }
};

/// The warp that requests weights.
template <class T>
class WeightSender {
 public:
  __device__ WeightSender(std::byte* ring, int stages, RingBarriers& barriers)
      : ring_(shared_address(ring)),
        stages_(stages),
        in_flight_(min(kInFlight, stages)),
        barriers_(barriers) {}

  /// Requests the block's share of a product's weights, in the order in which they are read.
  template <Form kForm>
  __device__ void send(const LinearProduct<T>& product, int head_size) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize, lane_k = lane % 4 * 8;
    for (int strip = static_cast<int>(blockIdx.x); strip < strips_of(kForm, product.n);
         strip += static_cast<int>(gridDim.x)) {
      const T* rows[kTiles];
      int wanted[kTiles];  // number of elements to load of each row, from rows[tile] on
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int n = first_row_of_tile(kForm, strip, tile, head_size) + lane / 4;
        const bool inside = n < product.n;
        const T* const matrix = kForm == Form::gated && tile % 2 ? product.up : product.weight;
        rows[tile] = matrix + (inside ? static_cast<std::size_t>(n) * product.k : 0) + lane_k;
        wanted[tile] = inside ? product.k - lane_k : 0;
      }
#pragma unroll 1
      for (int k = 0; k < product.k; k += kStageK)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          claim_slot();
          if (__all_sync(~0u, wanted[tile] - k > kStageK - kLoadK))
            copy_all(rows[tile] + k);
          else
            copy_some(rows[tile] + k, wanted[tile] - k);
          barriers_.full[next_.slot].arrive_when_copied();
          next_.advance(stages_);
          ++sent_;
        }
    }
  }

 private:
  __device__ void claim_slot() {
    barriers_.empty[next_.slot].wait(next_.parity ^ 1);
    if (on_their_way_ < (sent_ < stages_ ? kFirstInFlight : in_flight_)) {
      ++on_their_way_;
      return;
    }
    barriers_.full[oldest_.slot].wait(oldest_.parity);
    oldest_.advance(stages_);
  }
  __device__ std::uint32_t to(int load) const {
    return ring_ + static_cast<std::uint32_t>(next_.slot * kStageBytes + load * kLoadBytes) +
           threadIdx.x % kWarpSize * 16;
  }
  __device__ void copy_all(const T* from) const {
#pragma unroll
    for (int load = 0; load < kLinearWarps * kLoads; ++load)
      copy_async(to(load), from + load * kLoadK, true);
  }
  /// Copies `wanted` elements and writes zeros for the others.
  __device__ void copy_some(const T* from, int wanted) const {
#pragma unroll 4
    for (int load = 0; load < kLinearWarps * kLoads; ++load) {
      const bool inside = load * kLoadK < wanted;
      copy_async(to(load), inside ? from + load * kLoadK : from, inside);
    }
  }

  std::uint32_t ring_;
  int stages_, in_flight_;  // the ring's stages, and the maximum number in flight
  RingBarriers& barriers_;
  RingCursor next_, oldest_;
  int sent_ = 0, on_their_way_ = 0;
};

/// One of the warps that read weights.
class WeightReader {
 public:
  __device__ WeightReader(const std::byte* ring, int stages, RingBarriers& barriers)
      : mine_(ring + threadIdx.x / kWarpSize * kLoads * kLoadBytes + threadIdx.x % kWarpSize * 16),
        stages_(stages),
        barriers_(barriers) {}

  /// Reads the warp's part of the next stage. From each load, a lane gets eight elements of row
  /// lane / 4, from element lane % 4 * 8 on.
  __device__ void read(uint4 (&weights)[kLoads]) {
    barriers_.full[next_.slot].wait(next_.parity);
#pragma unroll
    for (int load = 0; load < kLoads; ++load)
      weights[load] =
          *reinterpret_cast<const uint4*>(mine_ + next_.slot * kStageBytes + load * kLoadBytes);
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) barriers_.empty[next_.slot].arrive();
    next_.advance(stages_);
  }

 private:
  const std::byte* mine_;
  int stages_;
  RingBarriers& barriers_;
  RingCursor next_;
};

}  // namespace kvlab::kernels
