// Arrays to and from the device.
#pragma once

#include <string_view>
#include <vector>

#include "engine/cuda/memory.hpp"

namespace kvlab {

template <class T>
cuda::DeviceBuffer upload(const std::vector<T>& values, std::string_view what) {
  cuda::DeviceBuffer buffer(values.size() * sizeof(T), what);
  if (values.empty()) return buffer;
  cuda::check(cudaMemcpy(buffer.data(), values.data(), buffer.bytes(), cudaMemcpyHostToDevice),
              what);
  return buffer;
}

template <class T>
std::vector<T> download(const cuda::DeviceBuffer& buffer) {
  std::vector<T> values(buffer.bytes() / sizeof(T));
  cuda::check(cudaMemcpy(values.data(), buffer.data(), buffer.bytes(), cudaMemcpyDeviceToHost),
              "fetching figures");
  return values;
}

}  // namespace kvlab
