#include "kernels/cache/rope_rows.hpp"

#include <cub/device/device_for.cuh>

namespace kvlab::kernels {
namespace {

struct FillIota {
  std::int32_t* to;
  __device__ void operator()(std::size_t i) const { to[i] = static_cast<std::int32_t>(i); }
};

struct FillRopeRows {
  const float* inv_freq;
  std::size_t half;
  const std::int32_t* positions;
  std::uint32_t first;
  float factor;
  float2* table;
  __device__ void operator()(std::size_t i) const {
    const std::size_t row = i / half;
    const double position = positions ? max(positions[row], 0) : first + static_cast<double>(row);
    const double angle = position * static_cast<double>(inv_freq[i % half]);
    table[i] = {static_cast<float>(cos(angle)) * factor, static_cast<float>(sin(angle)) * factor};
  }
};

}  // namespace

cudaError_t fill_iota(std::int32_t* to, int count, cudaStream_t stream) {
  return cub::DeviceFor::Bulk(count, FillIota{to}, stream);
}

cudaError_t fill_rope_rows(const float* inv_freq, int half, const std::int32_t* positions,
                           std::uint32_t first, int rows, float factor, float2* table,
                           cudaStream_t stream) {
  const auto width = static_cast<std::size_t>(half);
  return cub::DeviceFor::Bulk(static_cast<std::size_t>(rows) * width,
                              FillRopeRows{inv_freq, width, positions, first, factor, table},
                              stream);
}

}  // namespace kvlab::kernels
