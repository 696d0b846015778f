#include "engine/cuda/cuda_decoder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "engine/cuda/cache/full_cache.hpp"
#include "engine/sequence_decoder.hpp"
#include "kernels/host/transfer.hpp"
#include "traces/base/cancel.hpp"

namespace kvlab {

using cuda::check;
using cuda::DeviceBuffer;

namespace {

constexpr std::size_t kLogitRows = 128;  // maximum number of rows of a prompt's logits at once

}  // namespace

DecoderWork::DecoderWork(cuda::Arena& arena, const ModelConfig& config, int rows, int sequences)
    : x(arena.take<float>(static_cast<std::size_t>(rows) * config.hidden)),
      logits(arena.take<float>(static_cast<std::size_t>(sequences) * config.vocab)) {}

CudaDecoder::CudaDecoder(const DeviceModel& model, CudaDecoderOptions options)
    : model_(model),
      config_(model.config()),
      options_(validate_options(model, options)),
      batch_(options_.sequences, config_.vocab, stream_.get()),
      outputs_(capture_shape(config_, model.dtype()), output_rows(options_),
               options_.keeps_outputs(), stream_.get()),
      layers_(model, options_.rows(), stream_.get()),
      prompt_(stream_.get()),
      logit_ring_(stream_.get()),
      fed_(static_cast<std::size_t>(options_.sequences)),
      append_start_(fed_.size()),
      work_("hidden states and logits", config_, options_.rows(), options_.sequences) {
  make_cache();
  // Sequences that have been fed nothing are also sampled, together with the rest of the batch, so
  // their logits must be initialized.
  check(
      cudaMemsetAsync(work_->logits, 0, fed_.size() * config_.vocab * sizeof(float), stream_.get()),
      "logits");
  for (int row = 0; row < options_.sequences; ++row) set_row(row);
  synchronize();
}

CudaDecoder::~CudaDecoder() { cudaStreamSynchronize(stream_.get()); }

void CudaDecoder::make_cache() {
  if (!evicts()) {
    cache_ = std::make_unique<FullCache>(model_, batch_, options_, stream_.get());
    return;
  }
  auto cache = std::make_unique<EvictingCache>(model_, batch_, options_, stream_.get());
  if (options_.watched)
    watch_ = std::make_unique<CacheWatch>(*cache, config_, capture_shape(config_, model_.dtype()),
                                          options_.sequences, stream_.get());
  cache_ = std::move(cache);
}

// --- Checks --------------------------------------------------------------------------------------

void CudaDecoder::check_ids(std::span<const std::int32_t> ids) const {
  for (const std::int32_t id : ids)
    if (id < 0 || static_cast<std::uint32_t>(id) >= config_.vocab)
      throw std::out_of_range(fmt::format("token id {} is outside the vocabulary of {} ({})", id,
                                          config_.name, config_.vocab));
}

void CudaDecoder::check_rows(int rows) const {
  if (rows < 1 || rows > options_.sequences)
    throw std::invalid_argument(fmt::format(
        "CUDA decoder: {} rows were given, but it has {} sequences", rows, options_.sequences));
}

void CudaDecoder::check_capacity(std::uint64_t tokens) const {
  const std::uint32_t longest = longest_sequence(config_.query_heads / config_.kv_heads);
  const std::uint32_t max_tokens = options_.slots > 0 ? options_.slots : longest;
  if (tokens > max_tokens)
    throw std::invalid_argument(
        fmt::format("CUDA decoder: a sequence of {} tokens is longer than {}, the length for which "
                    "the decoder was made",
                    tokens, max_tokens));
}

void CudaDecoder::set_next(int sequence, std::int32_t id) {
  check_ids({&id, 1});
  batch_.set_next(sequence, id);
}

void CudaDecoder::watch(int sequence, DecoderObserver* observer) {
  if (!watch_)
    throw std::logic_error(
        "CUDA decoder: cannot be watched, because it was made without that option");
  watch_->watch(sequence, observer);
}

bool CudaDecoder::can_forget() const { return !evicts() && !config_.has_windows(); }

void CudaDecoder::rewind(int sequence, std::uint32_t tokens) {
  std::uint32_t& fed = fed_.at(static_cast<std::size_t>(sequence));
  if (!can_forget() && tokens != fed && (evicts() || tokens > 0))
    throw std::logic_error(
        "CUDA decoder: cannot go back to an earlier token, because the policy or a sliding window "
        "evicts tokens");
  if (tokens > fed)
    throw std::invalid_argument(fmt::format(
        "CUDA decoder: cannot go back to {} tokens, because only {} were fed", tokens, fed));
  fed = tokens;
  set_row(sequence);
}

void CudaDecoder::pretend(std::uint32_t tokens) {
  check_capacity(tokens);
  cache_->pretend(tokens);
  for (int sequence = 0; sequence < static_cast<int>(fed_.size()); ++sequence) {
    fed_[static_cast<std::size_t>(sequence)] = tokens;
    set_row(sequence);
  }
}

std::vector<float> CudaDecoder::logits(int sequence) const {
  synchronize();
  std::vector<float> values(config_.vocab);
  check(cudaMemcpy(values.data(), logits_row(sequence), values.size() * sizeof(float),
                   cudaMemcpyDeviceToHost),
        "reading logits");
  return values;
}

void CudaDecoder::copy_logits(int sequence, float* to) const {
  cuda::copy(to, logits_row(sequence), std::size_t{config_.vocab}, stream_.get());
}

// --- Prefill -------------------------------------------------------------------------------------

/// Consecutive tokens of one feed. A piece is either one append of several tokens, or a run of
/// tokens that are decoded one by one.
struct CudaDecoder::Piece {
  int sequence;
  SegmentKind kind;
  const std::int32_t* device_ids;
  std::span<const std::int32_t> ids;
  bool opens, is_last;  ///< whether it is the first or the last piece of a feed
};

void CudaDecoder::prefill(int sequence, std::span<const std::int32_t> ids,
                          std::vector<float>* all_logits, const OnChunk& on_chunk,
                          SegmentKind kind) {
  if (ids.empty()) throw std::invalid_argument("decoder: no tokens to feed; give at least one");
  check_ids(ids);
  check_capacity(tokens(sequence) + ids.size());
  if (all_logits) all_logits->resize(ids.size() * config_.vocab);
  const std::int32_t* const device_ids = prompt_.upload(ids);
  const std::size_t max_tokens = tokens_at_once(sequence, kind, ids.size());
  const std::size_t others = evicts() ? static_cast<std::size_t>(sequence) : 0;
  keep_logits(others);
  for (std::size_t start = 0; start < ids.size();) {
    throw_if_cancelled();
    const std::size_t left = ids.size() - start;
    // Consecutive tokens that have to be fed one by one form one piece, which is decoded step by
    // step.
    const bool alone = evicts() && (max_tokens == 1 || left == 1);
    const std::size_t count = alone ? left : std::min(max_tokens, left);
    const Piece piece{.sequence = sequence,
                      .kind = kind,
                      .device_ids = device_ids + start,
                      .ids = ids.subspan(start, count),
                      .opens = start == 0,
                      .is_last = start + count == ids.size()};
    float* const logits = all_logits ? all_logits->data() + start * config_.vocab : nullptr;
    if (alone)
      feed_alone(piece, logits);
    else
      append(piece, logits, on_chunk);
    start += count;
  }
  if (kind == SegmentKind::prompt) cache_->end_prompt(sequence, tokens(sequence));
  set_row(sequence);
  restore_logits(others);
}

std::size_t CudaDecoder::tokens_at_once(int sequence, SegmentKind kind, std::size_t count) const {
  if (evicts() && kind == SegmentKind::decode) return 1;
  const std::uint32_t requested = cache_->prefill_chunk(sequence);
  return requested == 0 ? count : requested;
}

/// The forward pass of many tokens, layer by layer. Each layer is computed in parts that fit into
/// the work buffers.
void CudaDecoder::append(const Piece& piece, float* logits, const OnChunk& on_chunk) {
  const std::size_t count = piece.ids.size();
  const std::uint32_t first_position = tokens(piece.sequence);
  float* const states = append_states(count);
  const auto x_of = [&](const PromptChunk& part) {
    return states + std::size_t{part.first} * config_.hidden;
  };
  std::vector<PromptChunk> parts;
  for (std::size_t first = 0; first < count; first += options_.prefill_tokens)
    parts.push_back(
        {.first = static_cast<std::uint32_t>(first),
         .rows = static_cast<int>(std::min<std::size_t>(options_.prefill_tokens, count - first))});

  for (const PromptChunk& part : parts)
    layers_.embed(piece.device_ids + part.first, part.rows, x_of(part));
  const auto append =
      cache_->append(piece.sequence, first_position, static_cast<std::uint32_t>(count),
                     piece.kind == SegmentKind::prompt && piece.is_last);
  const bool watched = watch_ && watch_->watches(piece.sequence);
  if (watched)
    watch_->begin(piece.sequence, piece.ids, first_position, piece.kind,
                  piece.opens && piece.kind == SegmentKind::prompt);
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
    for (const PromptChunk& part : parts) {
      float* const x = x_of(part);
      const auto rows = static_cast<std::size_t>(part.rows);
      const LayerOutputs to = outputs_.next_chunk(rows);
      layers_.qkv(layer, part.rows, x, to, append->write(layer, part));
      append->attend(layer, part, to);
      if (watched) watch_->part(layer, part, to);
      layers_.output(layer, part.rows, x, to);
      if (on_chunk)
        on_chunk({.ids = piece.ids.subspan(part.first, rows),
                  .first = layer == 0,
                  .last = layer + 1 == config_.layers,
                  .opens = piece.opens,
                  .layer = layer,
                  .data = to.qkv});
      layers_.gate_up(layer, part.rows, x);
      layers_.down(layer, part.rows, x);
    }
  append->finish();
  if (watched) watch_->end();
  fed_[static_cast<std::size_t>(piece.sequence)] += static_cast<std::uint32_t>(count);
  append_start_[static_cast<std::size_t>(piece.sequence)] = first_position;
  if (logits) copy_logits(states, count, logits);
  if (piece.is_last)
    layers_.head(states + (count - 1) * config_.hidden, 1, logits_row(piece.sequence));
}

/// The buffer for the hidden states of an append. If the buffer of the steps is too small, a larger
/// one.
float* CudaDecoder::append_states(std::size_t count) {
  if (count <= static_cast<std::size_t>(options_.rows())) return work_->x;
  if (count * config_.hidden * sizeof(float) > append_.memory().bytes()) {
    synchronize();
    append_ = {};  // frees the old memory before the new memory is allocated
    append_ =
        cuda::Placed<DecoderWork>("a prompt's hidden states", config_, static_cast<int>(count), 0);
  }
  return append_->x;
}

/// Feeds tokens one by one in steps in which the other sequences are idle.
void CudaDecoder::feed_alone(const Piece& piece, float* logits) {
  const int sequence = piece.sequence;
  for (int row = 0; row < options_.sequences; ++row)
    if (row != sequence) batch_.set_row(row, cache_->row(0));
  const auto first_position = static_cast<std::int32_t>(tokens(sequence));
  batch_.set_row(sequence, {.position = first_position, .slot = 0, .length = first_position + 1});
  const cuda::Graph& step = graph(sequence + 1, Next::given);
  const bool watched = watch_ && watch_->watches(sequence);
  for (std::size_t i = 0; i < piece.ids.size(); ++i) {
    batch_.copy_next(sequence, piece.device_ids + i, 1);
    cache_->before_token(sequence, tokens(sequence));
    step.launch(stream_.get());
    if (watched) {
      const CacheWatch::Fed one{sequence, piece.ids[i], tokens(sequence), piece.kind,
                                piece.opens && i == 0 && piece.kind == SegmentKind::prompt};
      watch_->report_step({&one, 1}, outputs_.step_data());
    }
    note_fed(sequence);
    if (logits) logit_ring_.take(logits_row(sequence), logits + i * config_.vocab, config_.vocab);
  }
  if (logits) logit_ring_.flush();
  for (int row = 0; row < options_.sequences; ++row)
    if (row != sequence) set_row(row);
}

void CudaDecoder::note_fed(int row) {
  const auto at = static_cast<std::size_t>(row);
  append_start_[at] = fed_[at]++;
}

/// Copies the logits of every token of a chunk to the host.
void CudaDecoder::copy_logits(const float* x, std::size_t count, float* to) {
  if (logit_rows_.bytes() == 0)
    logit_rows_ = DeviceBuffer(kLogitRows * config_.vocab * sizeof(float), "logits");
  for (std::size_t first = 0; first < count; first += kLogitRows) {
    const std::size_t rows = std::min(kLogitRows, count - first);
    layers_.head(x + first * config_.hidden, static_cast<int>(rows), logit_rows_.as<float>());
    logit_ring_.take(logit_rows_.as<float>(), to + first * config_.vocab, rows * config_.vocab);
  }
  logit_ring_.flush();
}

/// Saves the logits of the rows before a sequence, because a step that feeds this sequence
/// overwrites them.
void CudaDecoder::keep_logits(std::size_t rows) {
  if (rows == 0) return;
  const std::size_t bytes = rows * config_.vocab * sizeof(float);
  if (bytes > kept_logits_.bytes()) {
    synchronize();
    kept_logits_ = DeviceBuffer();
    kept_logits_ = DeviceBuffer(bytes, "logits");
  }
  cuda::copy(kept_logits_.as<float>(), work_->logits, rows * config_.vocab, stream_.get());
}

void CudaDecoder::restore_logits(std::size_t rows) {
  if (rows > 0)
    cuda::copy(work_->logits, kept_logits_.as<float>(), rows * config_.vocab, stream_.get());
}

// --- Decode --------------------------------------------------------------------------------------

void CudaDecoder::force(int rows, std::span<const std::int32_t> ids, float* logits) {
  check_rows(rows);
  check_ids(ids);
  const auto width = static_cast<std::size_t>(rows);
  const std::int32_t* const device_ids = prompt_.upload(ids);
  for (std::size_t at = 0; at + width <= ids.size(); at += width) {
    batch_.copy_next(0, device_ids + at, rows);
    run_graph(rows, Next::given);
    if (logits)
      cuda::copy(logits + at * config_.vocab, work_->logits, width * config_.vocab, stream_.get());
  }
}

void CudaDecoder::step_plain(int rows) {
  before_step(rows);
  decode_step(rows, Next::sampled).enqueue();
  after_step(rows, Next::sampled);
}

void CudaDecoder::choose(int rows) {
  check_rows(rows);
  batch_.sample(rows, work_->logits);
  batch_.finish(rows, false);
  batch_.note_published();
}

void CudaDecoder::before_step(int rows) {
  check_rows(rows);
  for (int row = 0; row < rows; ++row)
    if (tokens(row) > 0) check_capacity(tokens(row) + std::uint64_t{1});
  for (int row = 0; row < rows; ++row)
    if (tokens(row) > 0) cache_->before_token(row, tokens(row));
}

void CudaDecoder::after_step(int rows, Next next) {
  for (int row = 0; row < rows; ++row)
    if (tokens(row) > 0) note_fed(row);
  if (next == Next::sampled) batch_.note_published();
}

void CudaDecoder::run_graph(int rows, Next next) {
  before_step(rows);
  const auto watched = watched_rows(rows);
  graph(rows, next).launch(stream_.get());
  if (!watched.empty()) watch_->report_step(watched, outputs_.step_data());
  after_step(rows, next);
}

/// What a step will feed to the sequences that are watched.
std::vector<CacheWatch::Fed> CudaDecoder::watched_rows(int rows) const {
  std::vector<CacheWatch::Fed> watched;
  if (!watch_ || !watch_->watches_any()) return watched;
  synchronize();
  std::vector<std::int32_t> ids(static_cast<std::size_t>(rows));
  check(cudaMemcpy(ids.data(), batch_.state().ids, ids.size() * sizeof(std::int32_t),
                   cudaMemcpyDeviceToHost),
        "watching the cache");
  for (int row = 0; row < rows; ++row)
    if (tokens(row) > 0 && watch_->watches(row))
      watched.push_back(
          {row, ids[static_cast<std::size_t>(row)], tokens(row), SegmentKind::decode, false});
  return watched;
}

const cuda::Graph& CudaDecoder::graph(int rows, Next next) {
  const std::pair key{rows, next};
  auto found = graphs_.find(key);
  if (found == graphs_.end()) {
    const DecodeStep step = decode_step(rows, next);
    found = graphs_.emplace(key, cuda::Graph(stream_.get(), [&] { step.enqueue(); })).first;
  }
  return found->second;
}

DecodeStep CudaDecoder::decode_step(int rows, Next next) {
  return {{.model = model_,
           .layers = layers_,
           .batch = batch_,
           .cache = *cache_,
           .outputs = outputs_,
           .x = work_->x,
           .logits = work_->logits},
          rows,
          next};
}

}  // namespace kvlab
