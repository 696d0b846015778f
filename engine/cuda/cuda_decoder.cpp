#include "engine/cuda/cuda_decoder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <stdexcept>

#include "engine/cuda/batch_state.hpp"
#include "engine/cuda/full_cache.hpp"
#include "engine/cuda/layer_products.hpp"
#include "engine/cuda/prompt_ids.hpp"

namespace kvlab {
namespace {

using cuda::check;
using cuda::DeviceBuffer;
using cuda::Graph;

constexpr int kLogitRows = 128;  // of a prompt, at once
/// Not for buffers: their rounding up, a prompt's ids, and what CUDA loads and records later.
constexpr std::uint64_t kReserve = 256u << 20;

void check_options(const CudaDecoderOptions& options) {
  if (options.sequences < 1) throw std::invalid_argument("CUDA decoder: at least one sequence");
  if (options.prefill_tokens < 1)
    throw std::invalid_argument("CUDA decoder: a prompt's chunk needs at least one token");
  if (options.capture && options.sequences != 1)
    throw std::invalid_argument("CUDA decoder: a trace is of one sequence");
  if (options.slots == 0) throw std::invalid_argument("CUDA decoder: no slots; give at least one");
}

/// Most tokens that go through a layer at once.
int most_rows(const CudaDecoderOptions& options) {
  return std::max(static_cast<int>(options.prefill_tokens), options.sequences);
}

/// Work buffers that belong to the decoder itself.
struct WorkSizes {
  std::size_t x, inner, logits;
};
WorkSizes work_sizes(const ModelConfig& config, Dtype dtype, const CudaDecoderOptions& options) {
  const auto rows = static_cast<std::size_t>(most_rows(options));
  return {.x = rows * config.hidden * sizeof(float),
          .inner = rows * config.mlp * bytes_of(dtype),
          .logits = static_cast<std::size_t>(options.sequences) * config.vocab * sizeof(float)};
}

/// Bytes of everything that is allocated.
struct Memory {
  std::uint64_t cache, work;
};
Memory memory_for(const DeviceModel& model, const CudaDecoderOptions& options) {
  const ModelConfig& config = model.config();
  const int rows = most_rows(options);
  const WorkSizes own = work_sizes(config, model.dtype(), options);
  return {.cache = static_cast<std::uint64_t>(options.sequences) *
                   FullCache::bytes(model, FullCache::capacity(options.slots)),
          .work = own.x + own.inner + own.logits +
                  BatchState::bytes(options.sequences, config.vocab) +
                  LayerOutputMemory::bytes(capture_shape(config, model.dtype()),
                                           static_cast<unsigned>(rows), options.prefill_tokens,
                                           options.capture) +
                  LayerProducts::bytes(model, static_cast<unsigned>(rows)) +
                  FullCache::work_bytes(model, options.sequences, options.slots, rows)};
}

bool fits(const Memory& memory, std::uint64_t free) {
  return memory.cache + memory.work + kReserve <= free;
}

/// The most slots a sequence that fit; work buffers grow with them, too.
std::uint32_t slots_that_fit(const DeviceModel& model, CudaDecoderOptions options,
                             std::uint64_t free) {
  std::uint32_t most = 0;
  for (std::uint32_t too_many = options.slots; too_many - most > 1;) {
    options.slots = most + (too_many - most) / 2;
    (fits(memory_for(model, options), free) ? most : too_many) = options.slots;
  }
  return most;
}

/// Returns the options, so that it can be asked before anything is allocated.
CudaDecoderOptions checked(const DeviceModel& model, const CudaDecoderOptions& options) {
  check_options(options);
  const Memory needed = memory_for(model, options);
  const cuda::MemoryInfo memory = cuda::memory_info();
  if (fits(needed, memory.free)) return options;
  throw std::runtime_error(fmt::format(
      "device memory: the cache of {} tokens by {} sequence{} of {} needs {}, and "
      "its work buffers {}; {} of {} are free: {} tokens a sequence would fit",
      options.slots, options.sequences, options.sequences == 1 ? "" : "s", model.config().name,
      cuda::bytes_text(needed.cache), cuda::bytes_text(needed.work), cuda::bytes_text(memory.free),
      cuda::bytes_text(memory.total), slots_that_fit(model, options, memory.free)));
}

}  // namespace

class CudaDecoder::Impl {
 public:
  Impl(const DeviceModel& model, const CudaDecoderOptions& options)
      : model_(model),
        config_(model.config()),
        weights_(model.weights()),
        options_(checked(model, options)),
        batch_(options.sequences, config_.vocab, stream_.get()),
        outputs_(kvlab::capture_shape(config_, model.dtype()),
                 static_cast<unsigned>(most_rows(options)), options.prefill_tokens, options.capture,
                 stream_.get()),
        cache_(model, batch_, options.sequences, options.slots, most_rows(options), stream_.get()),
        products_(model, most_rows(options), stream_.get()),
        prompt_(stream_.get()),
        fed_(static_cast<std::size_t>(options.sequences)) {
    const WorkSizes size = work_sizes(config_, model.dtype(), options);
    x_ = DeviceBuffer(size.x, "hidden states");
    inner_ = DeviceBuffer(size.inner, "the MLP");
    logits_ = DeviceBuffer(size.logits, "logits");
    for (int row = 0; row < options_.sequences; ++row) set_state(row);
    synchronize();
  }

  ~Impl() { cudaStreamSynchronize(stream_.get()); }

  void prefill(int sequence, std::span<const std::int32_t> ids, std::vector<float>* all_logits,
               const OnChunk& on_chunk) {
    if (ids.empty()) throw std::invalid_argument("decoder: no tokens to feed; give at least one");
    check_ids(ids);
    std::uint32_t& fed = fed_.at(static_cast<std::size_t>(sequence));
    refuse_beyond_slots(fed, ids.size());
    if (all_logits) all_logits->resize(ids.size() * config_.vocab);
    const std::int32_t* const device_ids = prompt_.upload(ids);
    for (std::size_t start = 0; start < ids.size(); start += options_.prefill_tokens) {
      const std::size_t count = std::min<std::size_t>(options_.prefill_tokens, ids.size() - start);
      prefill_chunk(sequence, device_ids + start, ids.subspan(start, count), start == 0, on_chunk);
      fed += static_cast<std::uint32_t>(count);
      if (all_logits)
        copy_logits(static_cast<int>(count), all_logits->data() + start * config_.vocab);
      if (start + count == ids.size()) logits_of(static_cast<int>(count) - 1, 1, sequence);
    }
    set_state(sequence);
  }

  void step(int rows) { run_graph(rows, Step::sampled); }
  void feed_next(int rows) { run_graph(rows, Step::fed); }

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

  void rewind(int sequence, std::uint32_t tokens) {
    std::uint32_t& fed = fed_.at(static_cast<std::size_t>(sequence));
    if (tokens > fed)
      throw std::invalid_argument(
          fmt::format("CUDA decoder: {} tokens to go back to; {} were fed", tokens, fed));
    fed = tokens;
    set_state(sequence);
  }

  void pretend(int sequence, std::uint32_t tokens) {
    refuse_beyond_slots(0, tokens);
    cache_.pretend(sequence, tokens);
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
  const DeviceModel& model() const { return model_; }
  cudaStream_t stream() const { return stream_.get(); }
  void synchronize() const { stream_.synchronize("decoding"); }
  const std::byte* step_capture() const { return outputs_.step_data(); }

  std::vector<Part> parts(int rows) {
    const auto weight_bytes = [&](auto member) {
      std::uint64_t bytes = 0;
      for (const DeviceLayer& layer : weights_.layers)
        bytes += std::uint64_t{static_cast<unsigned>((layer.*member).n)} *
                 static_cast<unsigned>((layer.*member).k) * bytes_of(model_.dtype());
      return bytes;
    };
    const auto every_layer = [this](auto body) {
      return [this, body] {
        for (std::uint32_t layer = 0; layer < config_.layers; ++layer) body(layer);
      };
    };
    std::uint64_t live = 0;
    for (int row = 0; row < rows; ++row) live += FullCache::bytes(model_, tokens(row) + 1);
    const std::uint64_t head =
        std::uint64_t{config_.vocab} * config_.hidden * bytes_of(model_.dtype());
    return {
        {"norm, qkv, rope", weight_bytes(&DeviceLayer::qkv),
         every_layer([this, rows](std::uint32_t l) {
           qkv(l, rows, outputs_.step(l), cache_.step_write(l, rows));
         })},
        {"attention", live, every_layer([this, rows](std::uint32_t l) {
           cache_.attend_step(l, rows, outputs_.step(l));
         })},
        {"output", weight_bytes(&DeviceLayer::output),
         every_layer([this, rows](std::uint32_t l) { output(l, rows, outputs_.step(l)); })},
        {"norm, gate, up", weight_bytes(&DeviceLayer::gate_up),
         every_layer([this, rows](std::uint32_t l) {
           products_.gated(weights_.layers[l], rows, x_.as<float>(), inner_.data());
         })},
        {"down", weight_bytes(&DeviceLayer::down),
         every_layer([this, rows](std::uint32_t l) { down(l, rows); })},
        {"norm, head", head, [this, rows] { logits_of(0, rows, 0); }},
        {"sample", std::uint64_t{static_cast<unsigned>(rows)} * config_.vocab * sizeof(float),
         [this, rows] { batch_.sample(rows, logits_.as<float>()); }},
    };
  }

 private:
  enum class Step { sampled, fed };

  // --- What is asked -----------------------------------------------------------------------------

  void set_state(int row) {
    batch_.set_fed(row, fed_[static_cast<std::size_t>(row)], options_.slots);
  }

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

  void refuse_beyond_slots(std::uint64_t fed, std::uint64_t more) const {
    if (fed + more > options_.slots)
      throw std::invalid_argument(fmt::format(
          "CUDA decoder: {} tokens of a sequence need as many slots; it was made with {}",
          fed + more, options_.slots));
  }

  // --- Prefill -----------------------------------------------------------------------------------

  void prefill_chunk(int sequence, const std::int32_t* device_ids,
                     std::span<const std::int32_t> ids, bool opens, const OnChunk& on_chunk) {
    const PromptPart part{.sequence = sequence,
                          .position = fed_[static_cast<std::size_t>(sequence)],
                          .rows = static_cast<int>(ids.size())};
    embed(device_ids, part.rows);
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
      const LayerOutputs to = outputs_.chunk(layer, ids.size());
      qkv(layer, part.rows, to, cache_.prompt_write(layer, part));
      cache_.attend_prompt(layer, part, to);
      if (on_chunk)
        on_chunk({.ids = ids,
                  .first = layer == 0,
                  .last = layer + 1 == config_.layers,
                  .opens = opens,
                  .layer = layer,
                  .data = to.qkv});
      output(layer, part.rows, to);
      mlp(layer, part.rows);
    }
  }

  /// Logits of every token of a chunk, to the host.
  void copy_logits(int count, float* to) {
    if (logit_rows_.bytes() == 0)
      logit_rows_ = DeviceBuffer(std::size_t{kLogitRows} * config_.vocab * sizeof(float), "logits");
    for (int first = 0; first < count; first += kLogitRows) {
      const int rows = std::min(kLogitRows, count - first);
      products_.head(x_row(first), rows, logit_rows_.as<float>());
      check(
          cudaMemcpyAsync(to + static_cast<std::size_t>(first) * config_.vocab, logit_rows_.data(),
                          static_cast<std::size_t>(rows) * config_.vocab * sizeof(float),
                          cudaMemcpyDeviceToHost, stream_.get()),
          "reading logits");
      synchronize();
    }
  }

  // --- Decode ------------------------------------------------------------------------------------

  void before_step(int rows) {
    check_rows(rows);
    for (int row = 0; row < rows; ++row)
      if (tokens(row) > 0) refuse_beyond_slots(tokens(row), 1);
  }

  void after_step(int rows, Step kind) {
    for (int row = 0; row < rows; ++row)
      if (tokens(row) > 0) ++fed_[static_cast<std::size_t>(row)];
    if (kind == Step::sampled) batch_.note_published();
  }

  void run_graph(int rows, Step kind) {
    before_step(rows);
    const std::pair key{rows, kind};
    auto graph = graphs_.find(key);
    if (graph == graphs_.end()) {
      graph = graphs_.emplace(key, Graph(stream_.get(), [&] { enqueue_step(rows, kind); })).first;
    }
    graph->second.launch(stream_.get());
    after_step(rows, kind);
  }

  void enqueue_step(int rows, Step kind) {
    embed(batch_.state().ids, rows);
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
      const LayerOutputs to = outputs_.step(layer);
      qkv(layer, rows, to, cache_.step_write(layer, rows));
      cache_.attend_step(layer, rows, to);
      output(layer, rows, to);
      mlp(layer, rows);
    }
    logits_of(0, rows, 0);
    if (kind == Step::fed) {
      batch_.advance(rows);
      return;
    }
    batch_.sample(rows, logits_.as<float>());
    batch_.finish(rows, true);
  }

  // --- Layers ------------------------------------------------------------------------------------

  float* x_row(int row) const {
    return x_.as<float>() + static_cast<std::size_t>(row) * config_.hidden;
  }
  float* logits_row(int row) const {
    return logits_.as<float>() + static_cast<std::size_t>(row) * config_.vocab;
  }

  void embed(const std::int32_t* ids, int rows) {
    check(kernels::embed(model_.type(), weights_.embedding, static_cast<int>(config_.hidden), ids,
                         rows, x_.as<float>(), stream_.get()),
          "embedding");
  }

  /// `write` comes from the cache; the rest is filled in here.
  void qkv(std::uint32_t layer, int rows, const LayerOutputs& to, kernels::RopeWriteArgs write) {
    const DeviceLayer& weights = weights_.layers[layer];
    write.type = model_.type();
    write.tokens = rows;
    write.query_heads = static_cast<int>(config_.query_heads);
    write.kv_heads = static_cast<int>(config_.kv_heads);
    write.head_size = static_cast<int>(config_.head_size);
    write.q_gamma = weights.q_norm;
    write.k_gamma = weights.k_norm;
    write.norm_epsilon = config_.norm_epsilon;
    write.plain_q = to.plain_q;
    write.plain_k = to.plain_k;
    products_.qkv(weights, x_.as<float>(), to.qkv, write);
  }

  void output(std::uint32_t layer, int rows, const LayerOutputs& to) {
    products_.added(weights_.layers[layer].output, to.out, rows, x_.as<float>());
  }

  void down(std::uint32_t layer, int rows) {
    products_.added(weights_.layers[layer].down, inner_.data(), rows, x_.as<float>());
  }

  void mlp(std::uint32_t layer, int rows) {
    products_.gated(weights_.layers[layer], rows, x_.as<float>(), inner_.data());
    down(layer, rows);
  }

  /// Logits of `rows` hidden states from `first` on, to the rows of sequences from `sequence` on.
  void logits_of(int first, int rows, int sequence) {
    products_.head(x_row(first), rows, logits_row(sequence));
  }

  const DeviceModel& model_;
  const ModelConfig& config_;
  const DeviceWeights& weights_;
  CudaDecoderOptions options_;
  cuda::Stream stream_;
  BatchState batch_;
  LayerOutputMemory outputs_;
  FullCache cache_;
  LayerProducts products_;
  PromptIds prompt_;
  std::vector<std::uint32_t> fed_;  // tokens, by sequence
  DeviceBuffer x_;                  // [row, hidden] float32
  DeviceBuffer inner_;              // [row, mlp]
  DeviceBuffer logits_;             // [sequence, vocab]
  DeviceBuffer logit_rows_;         // [kLogitRows, vocab], made when asked for
  std::map<std::pair<int, Step>, Graph> graphs_;
};

CudaDecoder::CudaDecoder(const DeviceModel& model, CudaDecoderOptions options)
    : impl_(std::make_unique<Impl>(model, options)) {}
CudaDecoder::~CudaDecoder() = default;

void CudaDecoder::prefill(int sequence, std::span<const std::int32_t> ids,
                          std::vector<float>* all_logits, const OnChunk& on_chunk) {
  impl_->prefill(sequence, ids, all_logits, on_chunk);
}
void CudaDecoder::step(int rows) { impl_->step(rows); }
void CudaDecoder::step_plain(int rows) { impl_->step_plain(rows); }
void CudaDecoder::choose(int rows) { impl_->choose(rows); }
void CudaDecoder::feed_next(int rows) { impl_->feed_next(rows); }
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
cudaStream_t CudaDecoder::stream() const { return impl_->stream(); }
void CudaDecoder::synchronize() const { impl_->synchronize(); }
CaptureShape CudaDecoder::capture_shape() const {
  return kvlab::capture_shape(impl_->model().config(), impl_->model().dtype());
}
const std::byte* CudaDecoder::step_capture() const { return impl_->step_capture(); }
std::vector<CudaDecoder::Part> CudaDecoder::parts(int rows) { return impl_->parts(rows); }

}  // namespace kvlab
