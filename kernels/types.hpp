// Types that the kernel launchers have in common: structs of kvlab.h, or structs that extend them.
// Pointers are raw device pointers; strides are in elements.
//
// Launchers are stream-ordered: they do not synchronize or allocate, and a graph can capture them.
// If a size, group or dtype is not supported, they return cudaErrorInvalidValue before any launch.
// Lengths and positions are read from device memory, so a captured graph stays valid while
// sequences grow.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/kvlab.h"

namespace kvlab::kernels {

/// Element type of weights, activations and cache. Sums are float32.
using Type = kvlab_type;

constexpr std::size_t bytes_of(Type type) { return type == KVLAB_F32 ? 4 : 2; }

/// The activation of a gate: x / (1 + e^-x) (SiLU), or GELU approximated by tanh.
enum class Activation { silu, gelu_tanh };

/// A norm's weights; `offset` is added to the weights, and `epsilon` to the mean square.
struct Norm {
  const void* gamma = nullptr;  // of the data type of the call
  float epsilon = 0, offset = 0;
};

/// The head sizes that kernels are instantiated for.
constexpr bool is_head_size(int size) {
  return size == 64 || size == 96 || size == 128 || size == 256;
}

inline constexpr int kMinSlotsOfBlock = 16;  ///< minimum of kvlab_pages::page

/// Maximum number of slots of a KV head. Launches round slots up and count them in signed 32-bit
/// integers.
inline constexpr int kMaxSlots = 1 << 30;

inline bool aligned16(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

/// An attention's workspace begins with signals between thread blocks. These bytes must be zero
/// before the first use, and every launch leaves them zero.
inline constexpr std::size_t kSignalBytes = 132'224;

}  // namespace kvlab::kernels
