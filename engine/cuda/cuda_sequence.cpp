#include "engine/cuda/cuda_sequence.hpp"

#include <algorithm>
#include <deque>
#include <stdexcept>
#include "traces/base/cancel.hpp"
#include "traces/base/json.hpp"

#include "engine/capture.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kPrefillTokens = 2048;
constexpr std::uint32_t kCapturedTokens = 512;  // prompt tokens at once; limits the pinned memory
/// Number of steps that are enqueued before the host has read the tokens of earlier steps.
constexpr std::uint32_t kAhead = 4;
static_assert(kAhead < CudaDecoder::kRing);

std::uint32_t prefill_tokens(const CudaSequence::Options& options) {
  const std::uint32_t max_chunk = options.writer ? kCapturedTokens : kPrefillTokens;
  const std::uint32_t requested =
      options.prefill_chunk == 0 ? max_chunk : std::min(max_chunk, options.prefill_chunk);
  return options.tokens == 0 ? requested
                             : std::max<std::uint32_t>(1, std::min(requested, options.tokens));
}

}  // namespace

TraceHeader cuda_trace_header(const DeviceModel& model, nlohmann::json options) {
  TraceHeader header = trace_header(model.config(), cuda::device_name(), std::move(options));
  header.shape.dtype = model.dtype();
  header.rounding = Rounding::model_dtype;
  header.weights_xxh3 = model.weights_xxh3();
  header.tokenizer_xxh3 = model.tokenizer_xxh3();
  return header;
}

CudaSequence::CudaSequence(const DeviceModel& model, Options options)
    : decoder_(model, {.sequences = 1,
                       .slots = options.tokens,
                       .prefill_tokens = prefill_tokens(options),
                       .capture = options.writer != nullptr,
                       .caches = options.cache ? std::vector{*options.cache}
                                               : std::vector<ResolvedConfig>{},
                       .watched = options.observer != nullptr}) {
  if (options.observer) decoder_.watch(0, options.observer);
  if (options.writer)
    capture_ = std::make_unique<AsyncCapture>(*options.writer,
                                              capture_shape(model.config(), model.dtype()),
                                              prefill_tokens(options), std::move(options.progress));
}

std::span<const float> CudaSequence::feed(std::span<const std::int32_t> ids, SegmentKind kind,
                                          std::vector<float>* all_logits) {
  CudaDecoder::OnChunk on_chunk;
  if (capture_)
    on_chunk = [&](const CudaDecoder::Chunk& chunk) {
      capture_->chunk(chunk, kind, decoder_.stream());
    };
  decoder_.prefill(0, ids, all_logits, on_chunk, kind);
  logits_ = decoder_.logits(0);
  return logits_;
}

void CudaSequence::extend(Sampler& sampler, std::uint32_t count,
                          const std::function<bool(std::int32_t)>& on_id) {
  if (count == 0) return;
  if (tokens() == 0)
    throw std::invalid_argument("decoder: there is nothing to extend; feed a prompt first");
  const std::uint32_t before = tokens();
  const std::uint64_t base = decoder_.published();
  decoder_.set_sampling(0, sampler.options(), sampler.counter());
  decoder_.choose(1);

  // If tokens are evicted, no step may run ahead, because a fed token cannot be removed.
  const std::uint32_t ahead = decoder_.can_forget() ? kAhead : 0;
  std::deque<int> copies;        // capture buffers of enqueued steps that are not kept yet
  std::deque<std::int32_t> fed;  // ids that the host has read; the step of copies[i] feeds the i-th
  std::uint32_t chosen = 1, seen = 0;
  for (bool more = true; more && seen < count;) {
    throw_if_cancelled();
    for (; chosen < count && chosen - seen <= ahead; ++chosen) {
      decoder_.step(1);
      if (capture_)
        copies.push_back(capture_->copy_step(decoder_.step_capture(), decoder_.stream()));
    }
    for (; !fed.empty() && !copies.empty(); fed.pop_front(), copies.pop_front())
      capture_->keep(copies.front(), fed.front());
    const std::int32_t id = decoder_.ids(base + seen)[0];
    if (id < 0)
      throw std::runtime_error("logits are not finite; the checkpoint's weights may be damaged");
    ++seen;
    more = on_id(id) && seen < count;
    if (more && capture_) fed.push_back(id);
  }
  for (const int copy : copies) capture_->drop(copy);
  // Removes the tokens that were fed by steps that ran ahead.
  decoder_.rewind(0, before + seen - 1);
  sampler.skip(seen);
}

void CudaSequence::flush() {
  decoder_.synchronize();
  if (capture_) capture_->flush();
}

}  // namespace kvlab
