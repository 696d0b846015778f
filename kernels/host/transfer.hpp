// Copies of arrays to and from the device.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "kernels/host/memory.hpp"

namespace kvlab::cuda {

/// Copies to the device and waits for the copy. Waiting is necessary because CUDA may return before
/// a copy of pageable memory is complete, and the engine's streams do not wait for the default
/// stream.
template <class T>
void write(T* to, std::span<const T> values, std::string_view what) {
  if (values.empty()) return;
  check(cudaMemcpy(to, values.data(), values.size_bytes(), cudaMemcpyHostToDevice), what);
  check(cudaStreamSynchronize(nullptr), what);
}

template <class T>
void write(T* to, const std::vector<T>& values, std::string_view what) {
  write(to, std::span(values), what);
}

/// Enqueues a copy to the device. CUDA reads pageable memory before the call returns, so `values`
/// may be destroyed after it.
template <class T>
void enqueue_write(T* to, std::span<const T> values, cudaStream_t stream, std::string_view what) {
  if (values.empty()) return;
  check(cudaMemcpyAsync(to, values.data(), values.size_bytes(), cudaMemcpyHostToDevice, stream),
        what);
}
template <class T>
void enqueue_write(T* to, const std::vector<T>& values, cudaStream_t stream,
                   std::string_view what) {
  enqueue_write(to, std::span(values), stream, what);
}

/// Enqueues zeros.
template <class T>
void enqueue_zeros(T* to, std::size_t count, cudaStream_t stream, std::string_view what) {
  if (to != nullptr && count > 0) check(cudaMemsetAsync(to, 0, count * sizeof(T), stream), what);
}

template <class T>
DeviceBuffer upload(std::span<const T> values, std::string_view what) {
  DeviceBuffer buffer(values.size_bytes(), what);
  write(buffer.as<T>(), values, what);
  return buffer;
}

template <class T>
DeviceBuffer upload(const std::vector<T>& values, std::string_view what) {
  return upload(std::span(values), what);
}

/// Waits for all work enqueued on `stream`, then returns a copy of the array.
template <class T>
std::vector<T> read(const T* from, std::size_t count, cudaStream_t stream, std::string_view what) {
  std::vector<T> values(count);
  if (values.empty()) return values;
  check(cudaMemcpyAsync(values.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost, stream),
        what);
  check(cudaStreamSynchronize(stream), what);
  return values;
}

/// Enqueues a copy within device memory.
template <class T>
void copy(T* to, const T* from, std::size_t count, cudaStream_t stream) {
  check(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyDeviceToDevice, stream),
        "copying on the device");
}

/// Rows in memory, `stride` bytes apart.
template <class T>
struct Rows {
  T* first;
  std::size_t stride;
};

/// Enqueues a copy of the first `width` bytes of `rows` rows.
inline void copy_rows(Rows<std::byte> to, Rows<const std::byte> from, std::size_t width,
                      std::size_t rows, cudaStream_t stream) {
  if (width == 0) return;
  check(cudaMemcpy2DAsync(to.first, to.stride, from.first, from.stride, width, rows,
                          cudaMemcpyDeviceToDevice, stream),
        "copying on the device");
}

/// Allocates zeroed device memory. Waits until it is zero, for the same reason as write().
inline DeviceBuffer zeroes(std::size_t bytes, std::string_view what) {
  DeviceBuffer buffer(bytes, what);
  if (bytes == 0) return buffer;
  check(cudaMemset(buffer.data(), 0, bytes), what);
  check(cudaStreamSynchronize(nullptr), what);
  return buffer;
}

/// Copies device memory to the host.
template <class T>
std::vector<T> download(std::span<const T> part) {
  std::vector<T> values(part.size());
  if (part.empty()) return values;
  check(cudaMemcpy(values.data(), part.data(), part.size_bytes(), cudaMemcpyDeviceToHost),
        "fetching metrics");
  return values;
}

template <class T>
std::vector<T> download(const DeviceBuffer& buffer) {
  return download(std::span<const T>(buffer.as<T>(), buffer.bytes() / sizeof(T)));
}

}  // namespace kvlab::cuda
