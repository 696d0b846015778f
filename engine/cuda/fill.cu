#include "engine/cuda/fill.hpp"

#include <thrust/count.h>
#include <thrust/device_ptr.h>
#include <thrust/tabulate.h>

#include "kernels/device/thrust_status.hpp"
#include "kernels/device/type_dispatch.cuh"

namespace kvlab::cuda {
namespace {

constexpr int kThreads = 256;

/// The finalizer of SplitMix64.
__device__ std::uint64_t hash(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// A normal number from two uniform numbers, u in (0, 1] and v in [0, 1), by the Box–Muller method.
__device__ float normal(std::uint64_t bits) {
  const float u = (static_cast<float>(static_cast<std::uint32_t>(bits) >> 8) + 1.0f) * 0x1p-24f;
  const float v = static_cast<float>(bits >> 40) * 0x1p-24f;
  return sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
}

/// Element i of an array of random numbers. It depends only on `seed` and i.
template <class T>
struct NormalElement {
  float deviation;
  std::uint64_t seed;
  __device__ T operator()(std::size_t i) const {
    return kernels::from_float<T>(deviation * normal(hash(hash(seed) + i)));
  }
};

/// Converts the constant on the device, because from_float() is a device function.
template <class T>
struct ConstantElement {
  float value;
  __device__ T operator()(std::size_t) const { return kernels::from_float<T>(value); }
};

struct IsNotFinite {
  template <class T>
  __device__ bool operator()(T value) const {
    return !isfinite(kernels::to_float(value));
  }
};

template <class T>
thrust::device_ptr<T> elements_of(void* memory) {
  return thrust::device_pointer_cast(static_cast<T*>(memory));
}

/// Each thread keeps eight 16-byte loads in flight.
template <Caching caching>
__global__ void read_all_kernel(const uint4* from, std::size_t count, std::uint32_t* sink) {
  constexpr int kUnroll = 8;
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  std::uint32_t sum = 0;
  std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + (kUnroll - 1) * stride < count; i += kUnroll * stride) {
    uint4 values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint4* const at = from + i + static_cast<std::size_t>(u) * stride;
      values[u] = caching == Caching::stream ? __ldcs(at) : __ldg(at);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) sum += values[u].x ^ values[u].y ^ values[u].z ^ values[u].w;
  }
  for (; i < count; i += stride) sum += from[i].x;
  if (sum == 0x5a5a5a5au) *sink = sum;  // so that the compiler keeps the loads
}

__device__ void advance_row(const StepState& state, int row) {
  if (state.lengths[row] == 0) return;
  ++state.positions[row];
  ++state.slots[row];
  ++state.lengths[row];
}

__global__ void advance_kernel(StepState state, int rows) {
  for (int row = static_cast<int>(threadIdx.x); row < rows; row += static_cast<int>(blockDim.x))
    advance_row(state, row);
}

__global__ void finish_step_kernel(FinishStepArgs args) {
  const std::uint64_t step = *args.step;
  const std::size_t ring_row = step % static_cast<std::uint64_t>(args.ring_rows);
  for (int row = static_cast<int>(threadIdx.x); row < args.rows;
       row += static_cast<int>(blockDim.x)) {
    const std::int32_t id = args.state.ids[row];
    args.ring[ring_row * static_cast<std::size_t>(args.ring_width) +
              static_cast<std::size_t>(row)] = id;
    if (id < 0)
      args.state.ids[row] =
          0;  // there is no token, but a step that was enqueued ahead needs a valid id
    if (args.advance) advance_row(args.state, row);
  }
  __syncthreads();
  if (threadIdx.x == 0) *args.step = step + 1;
}

}  // namespace

cudaError_t fill_normal(Type type, void* to, std::size_t count, float deviation, std::uint64_t seed,
                        cudaStream_t stream) {
  return kernels::with_type(type, [&]<class T>(T) {
    const auto begin = elements_of<T>(to);
    return kernels::thrust_status(stream, [&](const auto& policy) {
      thrust::tabulate(policy, begin, begin + static_cast<std::ptrdiff_t>(count),
                       NormalElement<T>{deviation, seed});
    });
  });
}

cudaError_t fill_value(Type type, void* to, std::size_t count, float value, cudaStream_t stream) {
  return kernels::with_type(type, [&]<class T>(T) {
    const auto begin = elements_of<T>(to);
    return kernels::thrust_status(stream, [&](const auto& policy) {
      thrust::tabulate(policy, begin, begin + static_cast<std::ptrdiff_t>(count),
                       ConstantElement<T>{value});
    });
  });
}

cudaError_t has_not_finite(Type type, const void* from, std::size_t count, bool& found,
                           cudaStream_t stream) {
  return kernels::with_type(type, [&]<class T>(T) {
    const auto begin = thrust::device_pointer_cast(static_cast<const T*>(from));
    return kernels::thrust_status(stream, [&](const auto& policy) {
      // any_of() would wait for the stream after every 2^20 elements.
      found = thrust::count_if(policy, begin, begin + static_cast<std::ptrdiff_t>(count),
                               IsNotFinite{}) > 0;
    });
  });
}

cudaError_t read_all(const void* from, std::size_t bytes, Caching caching, std::uint32_t* sink,
                     cudaStream_t stream) {
  const auto kernel = caching == Caching::stream ? read_all_kernel<Caching::stream>
                                                 : read_all_kernel<Caching::keep>;
  kernel<<<132 * 8, kThreads, 0, stream>>>(static_cast<const uint4*>(from), bytes / 16, sink);
  return cudaGetLastError();
}

cudaError_t finish_step(const FinishStepArgs& args, cudaStream_t stream) {
  finish_step_kernel<<<1, 128, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t advance(const StepState& state, int rows, cudaStream_t stream) {
  advance_kernel<<<1, 128, 0, stream>>>(state, rows);
  return cudaGetLastError();
}

}  // namespace kvlab::cuda
