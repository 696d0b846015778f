#include "engine/cuda/async_capture.hpp"

#include <algorithm>

namespace kvlab {
namespace {

constexpr int kBuffers = 8;

/// Rows of `width` out of rows of `stride` elements, widened.
void widen_rows(Dtype dtype, const std::byte* from, std::size_t rows, std::size_t stride,
                std::size_t width, std::vector<float>& to) {
  to.resize(rows * width);
  const std::size_t element = bytes_of(dtype);
  for (std::size_t row = 0; row < rows; ++row)
    to_float(dtype, from + row * stride * element, width, to.data() + row * width);
}

}  // namespace

AsyncCapture::AsyncCapture(TraceWriter& writer, const CaptureShape& shape, std::size_t chunk_tokens,
                           Progress progress)
    : writer_(writer), shape_(shape), progress_(std::move(progress)) {
  const std::size_t bytes =
      std::max(shape.offsets(chunk_tokens).end, shape.layers * shape.offsets(1).end);
  for (int i = 0; i < kBuffers; ++i) {
    buffers_.emplace_back(bytes);
    copied_.emplace_back(cuda::Event::Kind::sleeping);
    free_.push_back(i);
  }
  thread_ = std::thread([this] { run(); });
}

AsyncCapture::~AsyncCapture() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
  cudaStreamSynchronize(copies_.get());  // pinned memory is about to go
}

void AsyncCapture::chunk(const CudaDecoder::Chunk& chunk, SegmentKind kind, cudaStream_t stream) {
  if (chunk.first)
    push({.what = Item::Kind::begin,
          .ids = {chunk.ids.begin(), chunk.ids.end()},
          .segment = kind,
          .new_segment = kind == SegmentKind::prompt && chunk.opens});
  computed_.record(stream);
  cuda::check(cudaStreamWaitEvent(copies_.get(), computed_.get()), "ordering a copy");
  const int before = last_chunk_;
  last_chunk_ = copy(chunk.data, shape_.offsets(chunk.ids.size()).end, copies_.get());
  // The next layer writes where the one before this was; that buffer's event is its copy, or a
  // later one.
  if (before >= 0)
    cuda::check(cudaStreamWaitEvent(stream, copied_[static_cast<std::size_t>(before)].get()),
                "ordering a copy");
  push({.what = Item::Kind::layers,
        .ids = {},
        .buffer = last_chunk_,
        .first_layer = chunk.layer,
        .layers = 1,
        .tokens = chunk.ids.size()});
  if (chunk.last) push({.what = Item::Kind::end, .ids = {}});
}

int AsyncCapture::copy_step(const std::byte* device, cudaStream_t stream) {
  return copy(device, shape_.layers * shape_.offsets(1).end, stream);
}

void AsyncCapture::keep(int buffer, std::int32_t id) {
  push({.what = Item::Kind::begin, .ids = {id}, .segment = SegmentKind::decode});
  push({.what = Item::Kind::layers,
        .ids = {},
        .buffer = buffer,
        .layers = shape_.layers,
        .tokens = 1});
  push({.what = Item::Kind::end, .ids = {}});
}

void AsyncCapture::drop(int buffer) { release(buffer); }

void AsyncCapture::flush() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failure_ || (queue_.empty() && !writing_); });
  if (failure_) std::rethrow_exception(failure_);
}

int AsyncCapture::acquire() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failure_ || !free_.empty(); });
  if (failure_) std::rethrow_exception(failure_);
  const int buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void AsyncCapture::release(int buffer) {
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(buffer);
  }
  changed_.notify_all();
}

void AsyncCapture::push(Item item) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(item));
  }
  changed_.notify_all();
}

int AsyncCapture::copy(const std::byte* device, std::size_t bytes, cudaStream_t stream) {
  const int buffer = acquire();
  const auto at = static_cast<std::size_t>(buffer);
  cuda::check(cudaMemcpyAsync(buffers_[at].data(), device, bytes, cudaMemcpyDeviceToHost, stream),
              "capturing");
  copied_[at].record(stream);
  return buffer;
}

void AsyncCapture::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || (!queue_.empty() && !failure_); });
    if (stopping_) return;
    const Item item = std::move(queue_.front());
    queue_.pop_front();
    writing_ = true;
    lock.unlock();
    std::exception_ptr failure;
    try {
      write(item);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    writing_ = false;
    if (item.buffer >= 0) free_.push_back(item.buffer);
    if (failure) failure_ = failure;
    changed_.notify_all();
  }
}

void AsyncCapture::write(const Item& item) {
  switch (item.what) {
    case Item::Kind::begin:
      writer_.begin(item.ids, item.segment, item.new_segment);
      break;
    case Item::Kind::layers: {
      const auto at = static_cast<std::size_t>(item.buffer);
      copied_[at].wait("capturing");
      const std::size_t layer_bytes = shape_.offsets(item.tokens).end;
      for (std::uint32_t i = 0; i < item.layers; ++i)
        write_layer(item.first_layer + i, buffers_[at].data() + i * layer_bytes, item.tokens);
      break;
    }
    case Item::Kind::end:
      writer_.end();
      if (progress_) progress_(writer_.tokens());
      break;
  }
}

void AsyncCapture::write_layer(std::uint32_t layer, const std::byte* data, std::size_t tokens) {
  const CaptureShape::Offsets at = shape_.offsets(tokens);
  const std::size_t element = bytes_of(shape_.dtype);
  const std::size_t q = std::size_t{shape_.query_heads} * shape_.head_size;
  const std::size_t kv = std::size_t{shape_.kv_heads} * shape_.head_size;
  const std::size_t row = q + 2 * kv;
  const std::byte* const qkv = data + at.qkv;
  if (shape_.plain) {
    widen_rows(shape_.dtype, data + at.plain_q, tokens, q, q, q_);
    widen_rows(shape_.dtype, data + at.plain_k, tokens, kv, kv, k_);
  } else {
    widen_rows(shape_.dtype, qkv, tokens, row, q, q_);
    widen_rows(shape_.dtype, qkv + q * element, tokens, row, kv, k_);
  }
  widen_rows(shape_.dtype, qkv + (q + kv) * element, tokens, row, kv, v_);
  widen_rows(shape_.dtype, data + at.out, tokens, q, q, out_);
  const auto* const lse = reinterpret_cast<const float*>(data + at.lse);
  writer_.layer(layer, q_, k_, v_, out_, {lse, tokens * shape_.query_heads});
}

}  // namespace kvlab
