// CUDA helpers for tests. They check every call, and they release all memory and streams.
#pragma once

#include <cuda_runtime_api.h>
#include <thrust/device_vector.h>

#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvlab {

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorName(error) + ": " +
                             cudaGetErrorString(error));
}

inline bool has_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

/// An array in device memory.
template <class T>
class DeviceArray {
 public:
  /// All elements are zero. data() of an empty array is null.
  explicit DeviceArray(std::size_t size) : DeviceArray(std::vector<T>(size)) {}
  explicit DeviceArray(std::span<const T> values) : values_(values.begin(), values.end()) {}
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return const_cast<T*>(thrust::raw_pointer_cast(values_.data())); }
  void clear() { check_cuda(cudaMemset(data(), 0, values_.size() * sizeof(T))); }
  /// Copies `values` to the beginning of the array. There may be fewer values than elements.
  void assign(std::span<const T> values) const {
    if (values.size() > values_.size())
      throw std::invalid_argument("DeviceArray::assign: more values than the array holds");
    thrust::copy(values.begin(), values.end(), thrust::device_pointer_cast(data()));
  }
  /// Waits for the device, then copies.
  std::vector<T> to_host() const {
    std::vector<T> values(values_.size());
    check_cuda(cudaDeviceSynchronize());
    thrust::copy(values_.begin(), values_.end(), values.begin());
    return values;
  }

 private:
  thrust::device_vector<T> values_;
};

/// A stream that waits for the fills and copies enqueued earlier on the default stream. Without the
/// wait, a test could read too early, because cudaMemset, and cudaMemcpy from pageable memory,
/// return before they are done.
class Stream {
 public:
  Stream() { check_cuda(cudaStreamCreate(&stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Captures the work of `enqueue(stream)` in a graph. Throws if the work includes a call that is
/// not allowed during a capture.
class CapturedGraph {
 public:
  template <class Enqueue>
  explicit CapturedGraph(Enqueue enqueue) {
    check_cuda(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeGlobal));
    const cudaError_t enqueued = enqueue(stream_.get());
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamEndCapture(stream_.get(), &graph));
    const cudaError_t instantiated = cudaGraphInstantiate(&executable_, graph, 0);
    check_cuda(cudaGraphDestroy(graph));
    check_cuda(enqueued);
    check_cuda(instantiated);
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;
  ~CapturedGraph() { cudaGraphExecDestroy(executable_); }

  void launch() { check_cuda(cudaGraphLaunch(executable_, stream_.get())); }

 private:
  Stream stream_;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace kvlab
