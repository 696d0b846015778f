// Memory accesses of sixteen bytes.
#pragma once

#include "kernels/device/element.cuh"

namespace kvlab::kernels {

/// Elements in a 16-byte access.
template <class T>
inline constexpr int kVector = 16 / sizeof(T);

template <class T>
struct alignas(16) Vector {
  T values[kVector<T>];
};

/// Loads eight consecutive elements from a 16-byte boundary.
template <class T>
__device__ inline void load_eight(const T* from, float (&to)[8]) {
#pragma unroll
  for (int part = 0; part < 8 / kVector<T>; ++part) {
    const Vector<T> loaded = reinterpret_cast<const Vector<T>*>(from)[part];
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) to[part * kVector<T> + i] = to_float(loaded.values[i]);
  }
}

template <class T>
__device__ inline void store_eight(const float (&from)[8], T* to) {
#pragma unroll
  for (int part = 0; part < 8 / kVector<T>; ++part) {
    Vector<T> stored;
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i)
      stored.values[i] = from_float<T>(from[part * kVector<T> + i]);
    reinterpret_cast<Vector<T>*>(to)[part] = stored;
  }
}

}  // namespace kvlab::kernels
