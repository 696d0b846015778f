#include "kernels/host/memory.hpp"

#include <fmt/format.h>

namespace kvlab::cuda {
namespace {

void* device_memory(std::size_t bytes, std::string_view what) {
  if (bytes == 0) return nullptr;
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    const MemoryInfo memory = memory_info();
    throw Error(error,
                fmt::format("device memory: {} needs {}; only {} of {} are free", what,
                            bytes_text(bytes), bytes_text(memory.free), bytes_text(memory.total)));
  }
  check(error, fmt::format("allocating {} for {}", bytes_text(bytes), what));
  return data;
}

void* pinned_memory(std::size_t bytes) {
  void* data = nullptr;
  if (bytes > 0)
    check(cudaHostAlloc(&data, bytes, cudaHostAllocDefault),
          fmt::format("allocating {} of pinned memory", bytes_text(bytes)));
  return data;
}

}  // namespace

DeviceBuffer::DeviceBuffer(std::size_t bytes, std::string_view what)
    : OwnedBytes(device_memory(bytes, what), bytes) {}

PinnedBuffer::PinnedBuffer(std::size_t bytes) : OwnedBytes(pinned_memory(bytes), bytes) {}

Stream::Stream() {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
}

Stream::~Stream() { cudaStreamDestroy(stream_); }

void Stream::synchronize(std::string_view what) const {
  check(cudaStreamSynchronize(stream_), what);
}

Event::Event(Kind kind) {
  unsigned flags = kind == Kind::timed ? cudaEventDefault : cudaEventDisableTiming;
  if (kind == Kind::sleeping) flags |= cudaEventBlockingSync;
  check(cudaEventCreateWithFlags(&event_, flags), "making an event");
}

Event::~Event() {
  if (event_) cudaEventDestroy(event_);
}

void Event::record(cudaStream_t stream) const {
  check(cudaEventRecord(event_, stream), "an event");
}

void Event::hold(cudaStream_t stream, std::string_view what) const {
  check(cudaStreamWaitEvent(stream, event_), what);
}

void Event::wait(std::string_view what) const { check(cudaEventSynchronize(event_), what); }

float Event::since(const Event& start) const {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, start.event_, event_), "timing");
  return milliseconds;
}

Graph::Graph(cudaStream_t stream, const std::function<void()>& enqueue) {
  // Capture is thread-local, because other threads (such as the writer of a trace) may call CUDA
  // meanwhile.
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "recording a graph");
  cudaGraph_t graph = nullptr;
  try {
    enqueue();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    if (graph) cudaGraphDestroy(graph);
    cudaGetLastError();
    throw;
  }
  check(cudaStreamEndCapture(stream, &graph), "recording a graph");
  const cudaError_t error = cudaGraphInstantiate(&executable_, graph, 0);
  cudaGraphDestroy(graph);
  check(error, "instantiating a graph");
}

Graph::~Graph() {
  if (executable_) cudaGraphExecDestroy(executable_);
}

void Graph::launch(cudaStream_t stream) const {
  check(cudaGraphLaunch(executable_, stream), "launching a graph");
}

}  // namespace kvlab::cuda
