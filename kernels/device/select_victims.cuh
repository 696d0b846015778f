// Selects which of many tokens are evicted and which are kept. The whole thread block selects the
// first tokens of the eviction order.
#pragma once

#include <cstdint>

#include "kernels/device/reduce.cuh"
#include "policies/rule/eviction_order.hpp"

namespace kvlab::kernels {

/// Histogram bins per digit.
inline constexpr int kEvictionBins = 256;
inline constexpr int kEvictionHistograms = 8;  ///< copies, so that warps rarely add to the same bin
inline constexpr int kMaxEvictionWarps = 32;

/// The eviction order as a 98-bit key: protection, rank, position. No two tokens of a pair have the
/// same key.
struct EvictionKeys {
  const std::uint64_t* ranks;
  const std::uint32_t* positions;
  ProtectedTokens protected_tokens;
  std::uint32_t next;  ///< position that is appended next

  __device__ EvictionKey operator[](std::uint32_t i) const {
    return protected_tokens.key(ranks[i], positions[i], next);
  }
};

/// Digits, most significant first: the protection, 8 bytes of the rank, 4 bytes of the position.
inline constexpr int kEvictionDigits = 13;
__device__ inline std::uint32_t digit_of(const EvictionKey& key, int digit) {
  if (digit == 0) return key.protection;
  if (digit <= 8) return static_cast<std::uint32_t>(key.rank >> (8 - digit) * 8) & 0xff;
  return key.position >> (12 - digit) * 8 & 0xff;
}
/// The key with all digits from `digits` on set to zero.
__device__ inline EvictionKey leading(EvictionKey key, int digits) {
  if (digits < 1) key.protection = 0;
  if (digits < 9) key.rank = digits <= 1 ? 0 : key.rank >> (9 - digits) * 8 << (9 - digits) * 8;
  if (digits < 13)
    key.position = digits <= 9 ? 0 : key.position >> (13 - digits) * 8 << (13 - digits) * 8;
  return key;
}
/// The key of a token that must not be selected. It comes after all other keys, and its protection
/// digit is a valid bin.
__device__ inline EvictionKey unselected_key() {
  return {kEvictionBins - 1, ~std::uint64_t{0}, ~0u};
}

/// A threshold in the eviction order. A token is evicted if its key comes before `key`, where only
/// the first `digits` digits of both are compared.
struct EvictionThreshold {
  EvictionKey key;
  int digits;
  __device__ bool evicts(const EvictionKey& other) const { return leading(other, digits) < key; }
};

struct SelectionShared {
  std::uint32_t histogram[kEvictionHistograms][kEvictionBins];
  /// Results of find_bin(): the bin, and the number of tokens with the same prefix in lower bins.
  std::uint32_t bin, before;
  std::uint32_t warps[kMaxEvictionWarps];
};

/// Considers the tokens with the current prefix in the order of their bins, and finds the bin of
/// the token that comes after `before_it` others. Called by the whole thread block.
__device__ inline void find_bin(SelectionShared& shared, std::uint32_t before_it) {
  constexpr int kGroups = kEvictionBins / kWarpSize;
  __shared__ std::uint32_t sums[kGroups];
  std::uint32_t *const counts = shared.histogram[0], *const ends = shared.histogram[1];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            warp = static_cast<int>(threadIdx.x) / kWarpSize,
            warps = static_cast<int>(blockDim.x) / kWarpSize;
  for (int group = warp; group < kGroups; group += warps) {
    const int bin = group * kWarpSize + lane;
    std::uint32_t own = 0;
    for (int copy = 0; copy < kEvictionHistograms; ++copy) own += shared.histogram[copy][bin];
    const std::uint32_t upto = warp_prefix_sum(own);
    counts[bin] = own, ends[bin] = upto;
    if (lane == kWarpSize - 1) sums[group] = upto;
  }
  __syncthreads();
  for (int group = warp; group < kGroups; group += warps) {
    const int bin = group * kWarpSize + lane;
    std::uint32_t upto = ends[bin];
    for (int before = 0; before < group; ++before) upto += sums[before];
    if (upto - counts[bin] <= before_it && before_it < upto) {
      shared.bin = static_cast<std::uint32_t>(bin);
      shared.before = upto - counts[bin];
    }
  }
  __syncthreads();
}

/// Radix selection: returns the threshold that evicts exactly `num_evicted` of the `live` tokens.
/// Requires 0 < num_evicted < live. Called by the whole thread block. `Keys` is EvictionKeys or a
/// type with the same interface.
template <class Keys>
__device__ EvictionThreshold select_victims(SelectionShared& shared, const Keys& keys,
                                            std::uint32_t live, std::uint32_t num_evicted) {
  EvictionThreshold found{{}, 0};
  // Number of tokens that have the same prefix as the first kept token and precede it.
  std::uint32_t before_it = num_evicted;
  for (int digit = 0; digit < kEvictionDigits && before_it > 0; ++digit) {
    for (int i = threadIdx.x; i < kEvictionHistograms * kEvictionBins;
         i += static_cast<int>(blockDim.x))
      (&shared.histogram[0][0])[i] = 0;
    __syncthreads();
    auto& histogram = shared.histogram[threadIdx.x / kWarpSize % kEvictionHistograms];
    for (std::uint32_t i = threadIdx.x; i < live; i += blockDim.x) {
      const EvictionKey key = keys[i];
      if (leading(key, digit) == found.key) atomicAdd(&histogram[digit_of(key, digit)], 1u);
    }
    __syncthreads();
    find_bin(shared, before_it);
    const std::uint64_t bin = shared.bin;
    if (digit == 0)
      found.key.protection = static_cast<std::uint32_t>(bin);
    else if (digit <= 8)
      found.key.rank |= bin << (8 - digit) * 8;
    else
      found.key.position |= static_cast<std::uint32_t>(bin) << (12 - digit) * 8;
    found.digits = digit + 1;
    before_it -= shared.before;
    __syncthreads();
  }
  return found;
}

/// Calls each(slot, is_kept, before) for the slots [0, live), where is_kept is stays(slot), and
/// `before` is the number of kept slots below `slot`. Called by the whole thread block. Calls
/// `stays` twice per slot. Each warp handles a range of consecutive slots.
template <class Stays, class Each>
__device__ void number_kept_slots(SelectionShared& shared, std::uint32_t live, Stays stays,
                                  Each each) {
  const std::uint32_t lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const std::uint32_t run = (live + blockDim.x - 1) / blockDim.x * kWarpSize;
  const std::uint32_t begin = min(warp * run, live), end = min(begin + run, live);
  std::uint32_t count = 0;
  for (std::uint32_t i = begin + lane; i - lane < end; i += kWarpSize)
    count += __popc(__ballot_sync(~0u, i < end && stays(i)));
  if (lane == 0) shared.warps[warp] = count;
  __syncthreads();
  std::uint32_t before = 0;
  for (std::uint32_t w = 0; w < warp; ++w) before += shared.warps[w];
  for (std::uint32_t i = begin + lane; i - lane < end; i += kWarpSize) {
    const bool own = i < end && stays(i);
    const std::uint32_t mask = __ballot_sync(~0u, own);
    if (i < end) each(i, own, before + __popc(mask & ((1u << lane) - 1)));
    before += __popc(mask);
  }
  __syncthreads();
}

}  // namespace kvlab::kernels
