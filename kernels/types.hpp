// What every kernel launcher speaks: kvlab.h's structs, or such as have what these lack; raw device
// pointers, strides in elements.
//
// Launchers are stream-ordered: no host synchronisation, no allocation, capturable in a graph. They
// return cudaErrorInvalidValue before any launch for a size, group or dtype that is not supported.
// Lengths and positions are read from device memory, so that a captured graph serves growing
// sequences.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/kvlab.h"

namespace kvlab::kernels {

/// Element type of weights, activations and cache. Sums are float32.
using Type = kvlab_type;

constexpr std::size_t bytes_of(Type type) { return type == KVLAB_F32 ? 4 : 2; }

/// How a gate is bent: x / (1 + e^-x), or x by the normal distribution, approximated by tanh.
enum class Activation { silu, gelu_tanh };

/// A norm's weights, which are added to `offset`, and what is added to the mean square.
struct Norm {
  const void* gamma = nullptr;  // of the type at hand
  float epsilon = 0, offset = 0;
};

/// Those that kernels are instantiated for.
constexpr bool is_head_size(int size) {
  return size == 64 || size == 96 || size == 128 || size == 256;
}

inline constexpr int kMinSlotsOfBlock = 16;  ///< kvlab_pages::page

/// Slots of a KV head, at most: launches round them up, and count in 32 bits with a sign.
inline constexpr int kMaxSlots = 1 << 30;

inline bool aligned16(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

/// An attention's workspace begins with signals between blocks: these bytes must be zero before its
/// first use, and every launch leaves them zero.
inline constexpr std::size_t kSignalBytes = 132'224;

}  // namespace kvlab::kernels
