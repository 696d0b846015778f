// Captures a trace without stopping the device: the device copies to pinned buffers, and another
// thread writes the trace. If the disk is slower than the device, the device waits, so nothing is
// lost.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/cuda/cuda_decoder.hpp"
#include "traces/trace.hpp"

namespace kvlab {

class AsyncCapture {
 public:
  using Progress = std::function<void(std::uint32_t tokens)>;

  /// Writes what a decoder of this shape computes. `writer` must outlive this object.
  /// `chunk_tokens`: maximum number of prompt tokens in a chunk. `progress` is called from the
  /// writing thread.
  AsyncCapture(TraceWriter& writer, const CaptureShape& shape, std::size_t chunk_tokens,
               Progress progress);
  /// Drops what has not been written, so call flush() first.
  ~AsyncCapture();

  /// Enqueues a copy of one layer of a prompt's chunk. `stream` does not wait for this copy. But it
  /// waits for the copy of the previous layer, because the work that follows on `stream` reuses the
  /// memory of that layer.
  void chunk(const CudaDecoder::Chunk& chunk, SegmentKind kind, cudaStream_t stream);

  /// Enqueues a copy of a decode step's outputs (of all layers) to a buffer, and returns the
  /// buffer's number for keep() or drop(). keep() adds the step's token to the trace. drop() frees
  /// the buffer without writing it.
  int copy_step(const std::byte* device, cudaStream_t stream);
  void keep(int buffer, std::int32_t id);
  void drop(int buffer);

  /// Waits until the TraceWriter has all data. Throws the errors of the writing thread.
  void flush();

 private:
  /// Pinned buffers of one size.
  struct Pool {
    std::size_t bytes = 0;  ///< bytes of each buffer
    cuda::PinnedBuffer memory;
    std::vector<cuda::Event> copied;  ///< [buffer]
    std::vector<int> free;

    Pool(std::size_t buffer_bytes, int count);
    const std::byte* at(int buffer) const {
      return memory.data() + static_cast<std::size_t>(buffer) * bytes;
    }
  };

  int acquire(Pool& pool);
  void release(Pool& pool, int buffer);
  // Jobs for the writing thread, in order.
  void begin(std::vector<std::int32_t> ids, SegmentKind kind, bool new_segment);
  /// Writes layers [first, first + layers) of a buffer and then frees the buffer.
  void write_layers(Pool& pool, int buffer, std::uint32_t first, std::uint32_t layers,
                    std::size_t tokens);
  void end();
  void push(std::function<void()> job);
  int copy(Pool& pool, const std::byte* device, std::size_t bytes, cudaStream_t stream);
  void run();

  TraceWriter& writer_;
  CaptureShape shape_;
  Progress progress_;
  cuda::Stream copies_;
  cuda::Event computed_;
  Pool chunks_;          // each buffer holds one layer of a chunk
  Pool steps_;           // each buffer holds all layers of a step
  int last_chunk_ = -1;  ///< buffer of the chunk's previous layer
  CapturedLayer layer_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;  // jobs of the thread
  bool writing_ = false, stopping_ = false;
  std::exception_ptr failure_;
  std::thread thread_;  // last member, because it uses the others
};

}  // namespace kvlab
