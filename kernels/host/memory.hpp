// RAII owners of device memory, pinned memory, streams, events and graphs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <span>
#include <string_view>
#include <utility>

#include "kernels/host/check.hpp"

namespace kvlab::cuda {

/// Memory that `release` frees. The pointer is null if there is no memory.
template <cudaError_t (*release)(void*)>
class OwnedBytes {
 public:
  OwnedBytes() = default;
  OwnedBytes(OwnedBytes&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  OwnedBytes& operator=(OwnedBytes&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~OwnedBytes() {
    if (data_) release(data_);
  }

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 protected:
  OwnedBytes(void* data, std::size_t bytes) : data_(static_cast<std::byte*>(data)), bytes_(bytes) {}

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Uninitialized device memory, aligned to 256 bytes.
class DeviceBuffer : public OwnedBytes<cudaFree> {
 public:
  DeviceBuffer() = default;
  /// Throws an Error that says how much `what` needs and how much is free.
  DeviceBuffer(std::size_t bytes, std::string_view what);
};

/// Page-locked host memory that the device can access too.
class PinnedBuffer : public OwnedBytes<cudaFreeHost> {
 public:
  PinnedBuffer() = default;
  explicit PinnedBuffer(std::size_t bytes);
};

class Stream {
 public:
  Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream();
  cudaStream_t get() const { return stream_; }
  void synchronize(std::string_view what) const;

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  /// How the host waits for the event. An event of kind `timed` also records the time.
  enum class Kind { spinning, sleeping, timed };
  explicit Event(Kind kind = Kind::spinning);
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(const Event&) = delete;
  ~Event();
  cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream) const;
  /// Makes later work on `stream` wait for the recorded work.
  void hold(cudaStream_t stream, std::string_view what = "waiting for an event") const;
  void wait(std::string_view what) const;  ///< makes the host wait
  /// Milliseconds since `start`; both events must be timed and complete.
  float since(const Event& start) const;

 private:
  cudaEvent_t event_ = nullptr;
};

/// Records the work that a function enqueues on a stream. The work can then be launched many times.
class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& enqueue);
  Graph(Graph&& other) noexcept : executable_(std::exchange(other.executable_, nullptr)) {}
  Graph& operator=(const Graph&) = delete;
  ~Graph();
  void launch(cudaStream_t stream) const;

 private:
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace kvlab::cuda
