// Arrays to and from the device.
#pragma once

#include <string_view>
#include <vector>

#include "engine/cuda/memory.hpp"

namespace kvlab::cuda {

template <class T>
DeviceBuffer upload(const std::vector<T>& values, std::string_view what) {
  DeviceBuffer buffer(values.size() * sizeof(T), what);
  if (values.empty()) return buffer;
  check(cudaMemcpy(buffer.data(), values.data(), buffer.bytes(), cudaMemcpyHostToDevice), what);
  return buffer;
}

template <class T>
std::vector<T> download(const DeviceBuffer& buffer) {
  std::vector<T> values(buffer.bytes() / sizeof(T));
  check(cudaMemcpy(values.data(), buffer.data(), buffer.bytes(), cudaMemcpyDeviceToHost),
        "fetching figures");
  return values;
}

}  // namespace kvlab::cuda
