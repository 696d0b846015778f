// Capture without waiting: pinned buffers take what the device computed, a thread of its own writes
// the trace. Where the disk is slower than the device, the device waits; nothing is lost.
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

  /// Writes what a decoder of this shape computes; `writer` must outlive it. `chunk_tokens`: most
  /// of a prompt at once. `progress` is called from the writing thread.
  AsyncCapture(TraceWriter& writer, const CaptureShape& shape, std::size_t chunk_tokens,
               Progress progress);
  /// Drops what was not written; flush() first.
  ~AsyncCapture();

  /// One layer of a prompt's chunk: `stream` goes on, and reuses the memory of the layer before
  /// only when it has been copied.
  void chunk(const CudaDecoder::Chunk& chunk, SegmentKind kind, cudaStream_t stream);

  /// Copies a step's block behind what is on the stream. Its token becomes part of the trace by
  /// keep(), or not by drop().
  int copy_step(const std::byte* device, cudaStream_t stream);
  void keep(int buffer, std::int32_t id);
  void drop(int buffer);

  /// Waits until everything is with the TraceWriter; throws what went wrong there.
  void flush();

 private:
  /// Pinned buffers of one size.
  struct Pool {
    std::size_t bytes = 0;  ///< of each
    cuda::PinnedBuffer memory;
    std::vector<cuda::Event> copied;  ///< by buffer
    std::vector<int> free;

    Pool(std::size_t buffer_bytes, int count);
    const std::byte* at(int buffer) const {
      return memory.data() + static_cast<std::size_t>(buffer) * bytes;
    }
  };

  int acquire(Pool& pool);
  void release(Pool& pool, int buffer);
  // What the writer is told, in order: each is a job of the thread.
  void begin(std::vector<std::int32_t> ids, SegmentKind kind, bool new_segment);
  /// So many layers of a buffer, which is free again afterwards.
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
  Pool chunks_;          // a layer of a chunk each
  Pool steps_;           // all layers of a step each
  int last_chunk_ = -1;  ///< buffer of the chunk's layer before
  CapturedLayer layer_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;  // jobs of the thread
  bool writing_ = false, stopping_ = false;
  std::exception_ptr failure_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace kvlab
