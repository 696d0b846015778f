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

  struct Item {
    enum class Kind { begin, layers, end } what;
    std::vector<std::int32_t> ids;  // begin
    SegmentKind segment = SegmentKind::prompt;
    bool new_segment = false;
    Pool* pool = nullptr;  // layers
    int buffer = -1;
    std::uint32_t first_layer = 0, layers = 0;
    std::size_t tokens = 0;
  };

  int acquire(Pool& pool);
  void push(Item item);
  int copy(Pool& pool, const std::byte* device, std::size_t bytes, cudaStream_t stream);
  void run();
  void write(const Item& item);

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
  std::deque<Item> queue_;
  bool writing_ = false, stopping_ = false;
  std::exception_ptr failure_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace kvlab
