#include "engine/cuda/cuda_decoder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <stdexcept>

#include "engine/cuda/batch_state.hpp"
#include "engine/cuda/cache/cache_watch.hpp"
#include "engine/cuda/decoder_memory.hpp"
#include "engine/cuda/model/device_layers.hpp"
#include "engine/cuda/cache/evicting_cache.hpp"
#include "engine/cuda/cache/full_cache.hpp"
#include "engine/cuda/logit_ring.hpp"
#include "engine/cuda/prompt_ids.hpp"

namespace kvlab {
namespace {

using cuda::check;
using cuda::DeviceBuffer;
using cuda::Graph;

constexpr int kLogitRows = 128;  // of a prompt, at once

std::unique_ptr<DeviceCache> make_cache(const DeviceModel& model, const BatchState& batch,
                                        const CudaDecoderOptions& options, cudaStream_t stream) {
  if (!options.caches.empty())
    return std::make_unique<EvictingCache>(model, batch, evicting_options(options), stream);
  return std::make_unique<FullCache>(model, batch, options.sequences, options.slots,
                                     most_rows(options), stream);
}

}  // namespace

class CudaDecoder::Impl {
 public:
  Impl(const DeviceModel& model, const CudaDecoderOptions& options)
      : model_(model),
        config_(model.config()),
        options_(checked_options(model, options)),
        batch_(options.sequences, config_.vocab, stream_.get()),
        outputs_(kvlab::capture_shape(config_, model.dtype()), output_rows(options),
                 keeps_outputs(options), stream_.get()),
        cache_(make_cache(model, batch_, options, stream_.get())),
        layers_(model, most_rows(options), stream_.get()),
        prompt_(stream_.get()),
        logit_ring_(stream_.get()),
        fed_(static_cast<std::size_t>(options.sequences)),
        admitted_behind_(fed_.size()) {
    const WorkSizes size = work_sizes(config_, options);
    x_ = DeviceBuffer(size.x, "hidden states");
    logits_ = DeviceBuffer(size.logits, "logits");
    // A sequence that was given nothing is sampled, too, with the rest of its batch.
    check(cudaMemsetAsync(logits_.data(), 0, logits_.bytes(), stream_.get()), "logits");
    for (int row = 0; row < options_.sequences; ++row) set_state(row);
    if (const auto* cache = dynamic_cast<const EvictingCache*>(cache_.get());
        cache && options.watched)
      watch_ = std::make_unique<CacheWatch>(*cache, config_,
                                            kvlab::capture_shape(config_, model.dtype()),
                                            options.sequences, stream_.get());
    synchronize();
  }

  ~Impl() { cudaStreamSynchronize(stream_.get()); }

  void prefill(int sequence, std::span<const std::int32_t> ids, std::vector<float>* all_logits,
               const OnChunk& on_chunk, SegmentKind kind) {
    if (ids.empty()) throw std::invalid_argument("decoder: no tokens to feed; give at least one");
    check_ids(ids);
    cache_->refuse_beyond(fed(sequence), ids.size());
    if (all_logits) all_logits->resize(ids.size() * config_.vocab);
    const std::int32_t* const device_ids = prompt_.upload(ids);
    const std::size_t most = admission_tokens(sequence, kind, ids.size());
    const std::size_t others = evicts() ? static_cast<std::size_t>(sequence) : 0;
    keep_logits(others);
    for (std::size_t start = 0; start < ids.size();) {
      const std::size_t left = ids.size() - start;
      // Single tokens go by steps, all that follow each other at once.
      const bool alone = evicts() && (most == 1 || left == 1);
      const std::size_t count = alone ? left : std::min(most, left);
      const Admission what{.sequence = sequence,
                           .kind = kind,
                           .device_ids = device_ids + start,
                           .ids = ids.subspan(start, count),
                           .opens = start == 0,
                           .is_last = start + count == ids.size()};
      float* const logits = all_logits ? all_logits->data() + start * config_.vocab : nullptr;
      if (alone)
        feed_alone(what, logits);
      else
        admit(what, logits, on_chunk);
      start += count;
    }
    set_state(sequence);
    restore_logits(others);
  }

  void step(int rows) { run_graph(rows, Step::sampled); }
  void feed_next(int rows) { run_graph(rows, Step::fed); }

  void force(int rows, std::span<const std::int32_t> ids, float* logits) {
    check_rows(rows);
    check_ids(ids);
    const auto width = static_cast<std::size_t>(rows);
    const std::int32_t* const device_ids = prompt_.upload(ids);
    for (std::size_t at = 0; at + width <= ids.size(); at += width) {
      batch_.copy_next(0, device_ids + at, rows);
      run_graph(rows, Step::fed);
      if (logits)
        check(cudaMemcpyAsync(logits + at * config_.vocab, logits_.data(),
                              width * config_.vocab * sizeof(float), cudaMemcpyDeviceToDevice,
                              stream_.get()),
              "keeping logits");
    }
  }

  void step_plain(int rows) {
    before_step(rows);
    enqueue_step(rows, Step::sampled);
    after_step(rows, Step::sampled);
  }

  void choose(int rows) {
    check_rows(rows);
    batch_.sample(rows, logits_.as<float>());
    batch_.finish(rows, false);
    batch_.note_published();
  }

  void set_sampling(int sequence, const SamplingOptions& sampling, std::uint64_t counter) {
    batch_.set_sampling(sequence, sampling, counter);
  }

  void set_next(int sequence, std::int32_t id) {
    check_ids({&id, 1});
    batch_.set_next(sequence, id);
  }

  bool evicts() const { return !options_.caches.empty(); }

  void watch(int sequence, DecoderObserver* observer) {
    if (!watch_) throw std::logic_error("CUDA decoder: was not made to be watched");
    watch_->watch(sequence, observer);
  }

  void rewind(int sequence, std::uint32_t tokens) {
    if (evicts() && tokens != fed(sequence))
      throw std::logic_error(
          "CUDA decoder: where tokens leave, none that was fed can be forgotten");
    std::uint32_t& fed = fed_.at(static_cast<std::size_t>(sequence));
    if (tokens > fed)
      throw std::invalid_argument(
          fmt::format("CUDA decoder: {} tokens to go back to; {} were fed", tokens, fed));
    fed = tokens;
    set_state(sequence);
  }

  void pretend(int sequence, std::uint32_t tokens) {
    cache_->refuse_beyond(0, tokens);
    cache_->pretend(sequence, tokens);
    fed_.at(static_cast<std::size_t>(sequence)) = tokens;
    set_state(sequence);
  }

  const BatchState& batch() const { return batch_; }

  std::vector<float> logits(int sequence) const {
    synchronize();
    std::vector<float> values(config_.vocab);
    check(cudaMemcpy(values.data(), logits_row(sequence), values.size() * sizeof(float),
                     cudaMemcpyDeviceToHost),
          "reading logits");
    return values;
  }

  std::uint32_t tokens(int sequence) const { return fed_.at(static_cast<std::size_t>(sequence)); }
  std::uint64_t live_bytes(int sequence) const {
    return cache_->live_bytes(sequence, tokens(sequence));
  }
  std::uint64_t evictions(int sequence) const {
    const std::uint32_t behind = admitted_behind_.at(static_cast<std::size_t>(sequence));
    return cache_->evictions(sequence, behind);
  }
  const DeviceModel& model() const { return model_; }
  cudaStream_t stream() const { return stream_.get(); }
  void synchronize() const { stream_.synchronize("decoding"); }
  const std::byte* step_capture() const { return outputs_.step_data(); }

  std::vector<Part> parts(int rows) {
    const auto every_layer = [this](auto body) {
      return [this, body] {
        for (std::uint32_t layer = 0; layer < config_.layers; ++layer) body(layer);
      };
    };
    std::uint64_t live = 0;
    for (int row = 0; row < rows; ++row) live += cache_->live_bytes(row, tokens(row) + 1);
    return {
        {"norm, qkv, rope", layers_.weight_bytes(&DeviceLayer::qkv),
         every_layer([this, rows](std::uint32_t l) {
           layers_.qkv(l, rows, x_.as<float>(), outputs_.step(l), cache_->step_write(l, rows));
         })},
        {"attention", live,
         [this, rows] {
           for (std::uint32_t l = 0; l < config_.layers; ++l) {
             cache_->attend_step(l, rows, outputs_.step(l));
             cache_->observe_step();
           }
           cache_->end_step();
         }},
        {"output", layers_.weight_bytes(&DeviceLayer::output),
         every_layer([this, rows](std::uint32_t l) {
           layers_.output(l, rows, x_.as<float>(), outputs_.step(l));
         })},
        {"norm, gate, up", layers_.weight_bytes(&DeviceLayer::gate_up),
         every_layer([this, rows](std::uint32_t l) { layers_.gated(l, rows, x_.as<float>()); })},
        {"down", layers_.weight_bytes(&DeviceLayer::down),
         every_layer([this, rows](std::uint32_t l) { layers_.down(l, rows, x_.as<float>()); })},
        {"norm, head", layers_.head_bytes(),
         [this, rows] { layers_.head(x_.as<float>(), rows, logits_.as<float>()); }},
        {"sample", std::uint64_t{static_cast<unsigned>(rows)} * config_.vocab * sizeof(float),
         [this, rows] { batch_.sample(rows, logits_.as<float>()); }},
    };
  }

 private:
  enum class Step { sampled, fed };

  // --- What is asked -----------------------------------------------------------------------------

  std::uint32_t& fed(int sequence) { return fed_.at(static_cast<std::size_t>(sequence)); }

  void set_state(int row) { batch_.set_row(row, cache_->row(fed(row))); }

  void check_ids(std::span<const std::int32_t> ids) const {
    for (const std::int32_t id : ids)
      if (id < 0 || static_cast<std::uint32_t>(id) >= config_.vocab)
        throw std::out_of_range(fmt::format("token id {} is outside the vocabulary of {} ({})", id,
                                            config_.name, config_.vocab));
  }

  void check_rows(int rows) const {
    if (rows < 1 || rows > options_.sequences)
      throw std::invalid_argument(fmt::format(
          "CUDA decoder: {} rows asked for, it has {} sequences", rows, options_.sequences));
  }

  // --- Prefill -----------------------------------------------------------------------------------

  std::size_t admission_tokens(int sequence, SegmentKind kind, std::size_t count) const {
    if (evicts() && kind == SegmentKind::decode) return 1;
    const std::uint32_t asked = cache_->admission_tokens(sequence);
    return asked == 0 ? count : asked;
  }

  struct Admission {
    int sequence;
    SegmentKind kind;
    const std::int32_t* device_ids;
    std::span<const std::int32_t> ids;
    bool opens, is_last;  ///< of what is being fed
  };

  /// An admission of many tokens, layer by layer, each in parts that fit the work buffers.
  void admit(const Admission& what, float* logits, const OnChunk& on_chunk) {
    const std::size_t count = what.ids.size();
    const std::uint32_t behind = fed(what.sequence);
    float* const x = admission_states(count);
    const auto parts = parts_of(what.sequence, behind, count);
    for (const PromptPart& part : parts)
      layers_.embed(what.device_ids + part.first, part.rows, x_row(x, part));
    cache_->begin_admission(what.sequence, behind, static_cast<std::uint32_t>(count));
    const bool watched = watch_ && watch_->watches(what.sequence);
    if (watched)
      watch_->begin(what.sequence, what.ids, behind, what.kind,
                    what.opens && what.kind == SegmentKind::prompt);
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
      cache_->begin_layer(layer);
      for (const PromptPart& part : parts) {
        const auto rows = static_cast<std::size_t>(part.rows);
        const LayerOutputs to = outputs_.next_chunk(rows);
        prompt_layer(layer, part, x_row(x, part), to, [&] {
          if (watched) watch_->part(part, to);
          if (on_chunk)
            on_chunk({.ids = what.ids.subspan(part.first, rows),
                      .first = layer == 0,
                      .last = layer + 1 == config_.layers,
                      .opens = what.opens,
                      .layer = layer,
                      .data = to.qkv});
        });
      }
      cache_->end_layer(layer);
      if (watched) watch_->end_layer(layer);
    }
    if (watched) watch_->end();
    fed(what.sequence) += static_cast<std::uint32_t>(count);
    admitted_behind_[static_cast<std::size_t>(what.sequence)] = behind;
    if (logits) copy_logits(x, static_cast<int>(count), logits);
    if (what.is_last) layers_.head(x + (count - 1) * config_.hidden, 1, logits_row(what.sequence));
  }

  void prompt_layer(std::uint32_t layer, const PromptPart& part, float* x, const LayerOutputs& to,
                    const std::function<void()>& attended) {
    layers_.qkv(layer, part.rows, x, to, cache_->prompt_write(layer, part));
    cache_->attend_prompt(layer, part, to);
    attended();
    layers_.output(layer, part.rows, x, to);
    layers_.gated(layer, part.rows, x);
    layers_.down(layer, part.rows, x);
  }

  std::vector<PromptPart> parts_of(int sequence, std::uint32_t behind, std::size_t count) const {
    std::vector<PromptPart> parts;
    for (std::size_t first = 0; first < count; first += options_.prefill_tokens)
      parts.push_back(
          {.sequence = sequence,
           .position = behind + static_cast<std::uint32_t>(first),
           .rows = static_cast<int>(std::min<std::size_t>(options_.prefill_tokens, count - first)),
           .first = static_cast<std::uint32_t>(first)});
    return parts;
  }

  /// Room for the hidden states of an admission: those of a step, or more.
  float* admission_states(std::size_t count) {
    const std::size_t bytes = count * config_.hidden * sizeof(float);
    if (bytes <= x_.bytes()) return x_.as<float>();
    if (bytes > admission_x_.bytes()) {
      synchronize();
      admission_x_ = DeviceBuffer();
      admission_x_ = DeviceBuffer(bytes, "a prompt's hidden states");
    }
    return admission_x_.as<float>();
  }

  /// A step of one sequence computes something for the rows before it, too: their logits are put
  /// aside.
  void keep_logits(std::size_t rows) {
    const std::size_t bytes = rows * config_.vocab * sizeof(float);
    if (bytes > kept_logits_.bytes()) {
      synchronize();
      kept_logits_ = DeviceBuffer();
      kept_logits_ = DeviceBuffer(bytes, "logits");
    }
    copy_rows(logits_, kept_logits_, bytes);
  }
  void restore_logits(std::size_t rows) {
    copy_rows(kept_logits_, logits_, rows * config_.vocab * sizeof(float));
  }
  void copy_rows(const DeviceBuffer& from, const DeviceBuffer& to, std::size_t bytes) {
    if (bytes == 0) return;
    check(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice, stream_.get()),
          "keeping logits");
  }

  /// Tokens one by one, by steps in which the other sequences sit out.
  void feed_alone(const Admission& what, float* logits) {
    const int sequence = what.sequence;
    for (int row = 0; row < options_.sequences; ++row)
      if (row != sequence) batch_.set_row(row, cache_->row(0));
    const auto behind = static_cast<std::int32_t>(fed(sequence));
    batch_.set_row(sequence, {.position = behind, .slot = 0, .length = behind + 1});
    const Graph& step = graph(sequence + 1, Step::fed);
    const bool watched = watch_ && watch_->watches(sequence);
    for (std::size_t i = 0; i < what.ids.size(); ++i) {
      batch_.copy_next(sequence, what.device_ids + i, 1);
      step.launch(stream_.get());
      if (watched) {
        const CacheWatch::Fed one{sequence, what.ids[i], fed(sequence), what.kind,
                                  what.opens && i == 0 && what.kind == SegmentKind::prompt};
        watch_->stepped({&one, 1}, outputs_.step_data());
      }
      note_fed(sequence);
      if (logits) logit_ring_.take(logits_row(sequence), logits + i * config_.vocab, config_.vocab);
    }
    if (logits) logit_ring_.flush();
    for (int row = 0; row < options_.sequences; ++row)
      if (row != sequence) set_state(row);
  }

  void note_fed(int row) {
    const auto at = static_cast<std::size_t>(row);
    admitted_behind_[at] = fed_[at]++;
  }

  /// Logits of every token of a chunk, to the host.
  void copy_logits(const float* x, int count, float* to) {
    if (logit_rows_.bytes() == 0)
      logit_rows_ = DeviceBuffer(std::size_t{kLogitRows} * config_.vocab * sizeof(float), "logits");
    for (int first = 0; first < count; first += kLogitRows) {
      const int rows = std::min(kLogitRows, count - first);
      layers_.head(x + static_cast<std::size_t>(first) * config_.hidden, rows,
                   logit_rows_.as<float>());
      logit_ring_.take(logit_rows_.as<float>(),
                       to + static_cast<std::size_t>(first) * config_.vocab,
                       static_cast<std::size_t>(rows) * config_.vocab);
    }
    logit_ring_.flush();
  }

  // --- Decode ------------------------------------------------------------------------------------

  void before_step(int rows) {
    check_rows(rows);
    for (int row = 0; row < rows; ++row)
      if (tokens(row) > 0) cache_->refuse_beyond(tokens(row), 1);
  }

  void after_step(int rows, Step kind) {
    for (int row = 0; row < rows; ++row)
      if (tokens(row) > 0) note_fed(row);
    if (kind == Step::sampled) batch_.note_published();
  }

  void run_graph(int rows, Step kind) {
    before_step(rows);
    const auto watched = watched_rows(rows);
    graph(rows, kind).launch(stream_.get());
    if (!watched.empty()) watch_->stepped(watched, outputs_.step_data());
    after_step(rows, kind);
  }

  /// What a step is about to feed to those who are watched.
  std::vector<CacheWatch::Fed> watched_rows(int rows) {
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

  const Graph& graph(int rows, Step kind) {
    const std::pair key{rows, kind};
    auto found = graphs_.find(key);
    if (found == graphs_.end())
      found = graphs_.emplace(key, Graph(stream_.get(), [&] { enqueue_step(rows, kind); })).first;
    return found->second;
  }

  void enqueue_step(int rows, Step kind) {
    float* const x = x_.as<float>();
    layers_.embed(batch_.state().ids, rows, x);
    cache_->begin_step(rows);
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
      const LayerOutputs to = outputs_.step(layer);
      layers_.qkv(layer, rows, x, to, cache_->step_write(layer, rows));
      cache_->attend_step(layer, rows, to);
      layers_.output(layer, rows, x, to);
      cache_->observe_step();
      layers_.gated(layer, rows, x);
      layers_.down(layer, rows, x);
    }
    layers_.head(x, rows, logits_.as<float>());
    if (kind == Step::sampled) batch_.sample(rows, logits_.as<float>());
    cache_->end_step();
    if (kind == Step::sampled)
      batch_.finish(rows, true);
    else
      batch_.advance(rows);
  }

  // --- Rows --------------------------------------------------------------------------------------

  float* x_row(float* x, const PromptPart& part) const {
    return x + std::size_t{part.first} * config_.hidden;
  }
  float* logits_row(int row) const {
    return logits_.as<float>() + static_cast<std::size_t>(row) * config_.vocab;
  }

  const DeviceModel& model_;
  const ModelConfig& config_;
  CudaDecoderOptions options_;
  cuda::Stream stream_;
  BatchState batch_;
  LayerOutputMemory outputs_;
  std::unique_ptr<DeviceCache> cache_;
  DeviceLayers layers_;
  PromptIds prompt_;
  LogitRing logit_ring_;
  // [sequence]: tokens, and how many of them were there before the last admission.
  std::vector<std::uint32_t> fed_, admitted_behind_;
  DeviceBuffer x_;            // [row, hidden] float32
  DeviceBuffer admission_x_;  // the same of an admission that is longer
  DeviceBuffer logits_;       // [sequence, vocab]
  DeviceBuffer kept_logits_;  // of other sequences, while one is fed
  DeviceBuffer logit_rows_;   // [kLogitRows, vocab], made when asked for
  std::map<std::pair<int, Step>, Graph> graphs_;
  std::unique_ptr<CacheWatch> watch_;  // or null
};

CudaDecoder::CudaDecoder(const DeviceModel& model, CudaDecoderOptions options)
    : impl_(std::make_unique<Impl>(model, options)) {}
CudaDecoder::~CudaDecoder() = default;

bool CudaDecoder::fits(const DeviceModel& model, const CudaDecoderOptions& options) {
  return fits_free_memory(model, options);
}

void CudaDecoder::prefill(int sequence, std::span<const std::int32_t> ids,
                          std::vector<float>* all_logits, const OnChunk& on_chunk,
                          SegmentKind kind) {
  impl_->prefill(sequence, ids, all_logits, on_chunk, kind);
}
void CudaDecoder::step(int rows) { impl_->step(rows); }
void CudaDecoder::step_plain(int rows) { impl_->step_plain(rows); }
void CudaDecoder::choose(int rows) { impl_->choose(rows); }
void CudaDecoder::feed_next(int rows) { impl_->feed_next(rows); }
void CudaDecoder::force(int rows, std::span<const std::int32_t> ids, float* logits) {
  impl_->force(rows, ids, logits);
}
void CudaDecoder::set_sampling(int sequence, const SamplingOptions& options,
                               std::uint64_t counter) {
  impl_->set_sampling(sequence, options, counter);
}
void CudaDecoder::set_next(int sequence, std::int32_t id) { impl_->set_next(sequence, id); }
void CudaDecoder::rewind(int sequence, std::uint32_t tokens) { impl_->rewind(sequence, tokens); }
void CudaDecoder::pretend(int sequence, std::uint32_t tokens) { impl_->pretend(sequence, tokens); }
std::uint64_t CudaDecoder::published() const { return impl_->batch().published(); }
std::span<const std::int32_t> CudaDecoder::ids(std::uint64_t index) const {
  return impl_->batch().ids(index);
}
std::vector<float> CudaDecoder::logits(int sequence) const { return impl_->logits(sequence); }
std::uint32_t CudaDecoder::tokens(int sequence) const { return impl_->tokens(sequence); }
const DeviceModel& CudaDecoder::model() const { return impl_->model(); }
std::uint64_t CudaDecoder::cache_bytes(std::uint64_t tokens) const {
  return FullCache::bytes(impl_->model(), tokens);
}
void CudaDecoder::watch(int sequence, DecoderObserver* observer) {
  impl_->watch(sequence, observer);
}
bool CudaDecoder::evicts() const { return impl_->evicts(); }
std::uint64_t CudaDecoder::live_bytes(int sequence) const { return impl_->live_bytes(sequence); }
std::uint64_t CudaDecoder::evictions(int sequence) const { return impl_->evictions(sequence); }
cudaStream_t CudaDecoder::stream() const { return impl_->stream(); }
void CudaDecoder::synchronize() const { impl_->synchronize(); }
CaptureShape CudaDecoder::capture_shape() const {
  return kvlab::capture_shape(impl_->model().config(), impl_->model().dtype());
}
const std::byte* CudaDecoder::step_capture() const { return impl_->step_capture(); }
std::vector<CudaDecoder::Part> CudaDecoder::parts(int rows) { return impl_->parts(rows); }

}  // namespace kvlab
