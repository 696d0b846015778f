#include "kernels/cache/rope_rows.hpp"

#include <thrust/device_ptr.h>
#include <thrust/sequence.h>
#include <thrust/tabulate.h>

#include "kernels/device/thrust_status.hpp"

namespace kvlab::kernels {
namespace {

/// Element i of a table of rows, each with `half` angles.
struct RopeElement {
  const float* inv_freq;
  std::size_t half;
  const std::int32_t* positions;
  std::uint32_t first;
  float factor;
  __device__ float2 operator()(std::size_t i) const {
    const std::size_t row = i / half;
    const double position = positions ? max(positions[row], 0) : first + static_cast<double>(row);
    const double angle = position * static_cast<double>(inv_freq[i % half]);
    return {static_cast<float>(cos(angle)) * factor, static_cast<float>(sin(angle)) * factor};
  }
};

}  // namespace

cudaError_t fill_iota(std::int32_t* to, int count, cudaStream_t stream) {
  return thrust_status(stream, [&](const auto& policy) {
    thrust::sequence(policy, thrust::device_pointer_cast(to),
                     thrust::device_pointer_cast(to + count));
  });
}

cudaError_t fill_rope_rows(const float* inv_freq, int half, const std::int32_t* positions,
                           std::uint32_t first, int rows, float factor, float2* table,
                           cudaStream_t stream) {
  const auto width = static_cast<std::size_t>(half);
  const auto begin = thrust::device_pointer_cast(table);
  return thrust_status(stream, [&](const auto& policy) {
    thrust::tabulate(policy, begin, begin + static_cast<std::ptrdiff_t>(rows) * half,
                     RopeElement{inv_freq, width, positions, first, factor});
  });
}

}  // namespace kvlab::kernels
