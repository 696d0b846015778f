#include "engine/cuda/async_capture.hpp"

#include <algorithm>

namespace kvlab {
namespace {

constexpr int kChunkBuffers = 8;
// Steps wait in buffers while the thread writes a shard. There are as many buffers for steps as fit
// in kStepBytes, but at least kMinSteps and at most kMaxSteps.
constexpr std::size_t kStepBytes = 192u << 20;
constexpr std::size_t kMinSteps = 16, kMaxSteps = 512;

int step_buffers(std::size_t step_bytes) {
  return static_cast<int>(std::clamp(kStepBytes / step_bytes, kMinSteps, kMaxSteps));
}

}  // namespace

AsyncCapture::Pool::Pool(std::size_t buffer_bytes, int count)
    : bytes(buffer_bytes), memory(buffer_bytes * static_cast<std::size_t>(count)) {
  for (int i = 0; i < count; ++i) {
    copied.emplace_back(cuda::Event::Kind::sleeping);
    free.push_back(i);
  }
}

AsyncCapture::AsyncCapture(TraceWriter& writer, const CaptureShape& shape, std::size_t chunk_tokens,
                           Progress progress)
    : writer_(writer),
      shape_(shape),
      progress_(std::move(progress)),
      chunks_(shape.offsets(chunk_tokens).end, kChunkBuffers),
      steps_(shape.layers * shape.offsets(1).end,
             step_buffers(shape.layers * shape.offsets(1).end)),
      thread_([this] { run(); }) {}

AsyncCapture::~AsyncCapture() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
  cudaDeviceSynchronize();  // because the pinned memory is freed next
}

void AsyncCapture::chunk(const CudaDecoder::Chunk& chunk, SegmentKind kind, cudaStream_t stream) {
  if (chunk.first)
    begin({chunk.ids.begin(), chunk.ids.end()}, kind, kind == SegmentKind::prompt && chunk.opens);
  computed_.record(stream);
  computed_.hold(copies_.get(), "ordering a copy");
  const int before = last_chunk_;
  last_chunk_ = copy(chunks_, chunk.data, shape_.offsets(chunk.ids.size()).end, copies_.get());
  // The work that follows on the stream reuses the device memory of the previous layer, so it waits
  // until that layer was copied. If that layer's buffer was used again since, the event records a
  // later copy, which is also safe to wait for.
  if (before >= 0) chunks_.copied[static_cast<std::size_t>(before)].hold(stream, "ordering a copy");
  write_layers(chunks_, last_chunk_, chunk.layer, 1, chunk.ids.size());
  if (chunk.last) end();
}

int AsyncCapture::copy_step(const std::byte* device, cudaStream_t stream) {
  return copy(steps_, device, steps_.bytes, stream);
}

void AsyncCapture::keep(int buffer, std::int32_t id) {
  begin({id}, SegmentKind::decode, false);
  write_layers(steps_, buffer, 0, shape_.layers, 1);
  end();
}

void AsyncCapture::drop(int buffer) { release(steps_, buffer); }

void AsyncCapture::begin(std::vector<std::int32_t> ids, SegmentKind kind, bool new_segment) {
  push([this, ids = std::move(ids), kind, new_segment] { writer_.begin(ids, kind, new_segment); });
}

void AsyncCapture::write_layers(Pool& pool, int buffer, std::uint32_t first, std::uint32_t layers,
                                std::size_t tokens) {
  push([=, this, &pool] {
    pool.copied[static_cast<std::size_t>(buffer)].wait("capturing");
    const std::size_t layer_bytes = shape_.offsets(tokens).end;
    for (std::uint32_t i = 0; i < layers; ++i) {
      layer_.read(shape_, pool.at(buffer) + i * layer_bytes, tokens);
      writer_.layer(first + i, layer_.q, layer_.k, layer_.v, layer_.out, layer_.lse);
      if (shape_.residuals) writer_.residual(first + i, layer_.norm2);
    }
    release(pool, buffer);
  });
}

void AsyncCapture::end() {
  push([this] {
    writer_.end();
    if (progress_) progress_(writer_.tokens());
  });
}

void AsyncCapture::flush() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failure_ || (queue_.empty() && !writing_); });
  if (failure_) std::rethrow_exception(failure_);
}

int AsyncCapture::acquire(Pool& pool) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failure_ || !pool.free.empty(); });
  if (failure_) std::rethrow_exception(failure_);
  const int buffer = pool.free.back();
  pool.free.pop_back();
  return buffer;
}

void AsyncCapture::release(Pool& pool, int buffer) {
  {
    const std::lock_guard lock(mutex_);
    pool.free.push_back(buffer);
  }
  changed_.notify_all();
}

void AsyncCapture::push(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(job));
  }
  changed_.notify_all();
}

int AsyncCapture::copy(Pool& pool, const std::byte* device, std::size_t bytes,
                       cudaStream_t stream) {
  const int buffer = acquire(pool);
  const auto index = static_cast<std::size_t>(buffer);
  cuda::check(cudaMemcpyAsync(pool.memory.data() + index * pool.bytes, device, bytes,
                              cudaMemcpyDeviceToHost, stream),
              "capturing");
  pool.copied[index].record(stream);
  return buffer;
}

void AsyncCapture::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || (!queue_.empty() && !failure_); });
    if (stopping_) return;
    const std::function<void()> job = std::move(queue_.front());
    queue_.pop_front();
    writing_ = true;
    lock.unlock();
    std::exception_ptr failure;
    try {
      job();
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    writing_ = false;
    if (failure) failure_ = failure;
    changed_.notify_all();
  }
}

}  // namespace kvlab
