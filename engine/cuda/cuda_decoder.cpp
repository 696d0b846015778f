#include "engine/cuda/cuda_decoder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <stdexcept>

#include "engine/cuda/fill.hpp"
#include "engine/cuda/layer_products.hpp"
#include "kernels/attention.hpp"
#include "kernels/pointwise.hpp"

namespace kvlab {
namespace {

using cuda::check;
using cuda::DeviceBuffer;
using cuda::Event;
using cuda::Graph;

constexpr int kLogitRows = 128;  // of a prompt, at once
constexpr std::size_t kAlignment = 256;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// Sampling parameters of the rows, in device memory.
struct Sampling {
  DeviceBuffer temperature, top_p, top_k, seed, counter, workspace;
};

/// Where one layer puts what the next launches need; capture keeps it.
struct LayerOutputs {
  std::byte *qkv, *out;
  float* lse;
  std::byte *plain_q, *plain_k;
};

}  // namespace

CaptureShape::Offsets CaptureShape::offsets(std::size_t tokens) const {
  const std::size_t element = bytes_of(dtype), q = std::size_t{query_heads} * head_size,
                    kv = std::size_t{kv_heads} * head_size;
  Offsets at{};
  at.out = aligned(tokens * (q + 2 * kv) * element);
  at.lse = at.out + aligned(tokens * q * element);
  at.plain_q = at.lse + aligned(tokens * query_heads * sizeof(float));
  at.plain_k = at.plain_q + (plain ? aligned(tokens * q * element) : 0);
  at.end = at.plain_k + (plain ? aligned(tokens * kv * element) : 0);
  return at;
}

class CudaDecoder::Impl {
 public:
  Impl(const DeviceModel& model, CudaDecoderOptions options)
      : model_(model), config_(model.config()), weights_(model.weights()), options_(options) {
    check_options();
    fed_.resize(sequences());
    if (options_.slots == 0)
      throw std::invalid_argument("CUDA decoder: no slots; give at least one");
    check_fits();
    allocate();
    fill_tables();
    products_ = std::make_unique<LayerProducts>(model_, rows_, stream_.get());
    for (int row = 0; row < options_.sequences; ++row) {
      set_sampling(row, {}, 0);
      set_state(row);
    }
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
    upload_ids(ids);
    for (std::size_t start = 0; start < ids.size(); start += options_.prefill_tokens) {
      const std::size_t count = std::min<std::size_t>(options_.prefill_tokens, ids.size() - start);
      prefill_chunk(sequence, prompt_.as<std::int32_t>() + start, ids.subspan(start, count),
                    start == 0, on_chunk);
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
    enqueue_sample(rows);
    finish(rows, false);
    note_published();
  }

  void set_sampling(int sequence, const SamplingOptions& sampling, std::uint64_t counter) {
    const auto row = static_cast<std::size_t>(sequence);
    put(sampling_.temperature.as<float>() + row, static_cast<float>(sampling.temperature));
    put(sampling_.top_p.as<float>() + row, static_cast<float>(sampling.top_p));
    put(sampling_.top_k.as<std::int32_t>() + row, static_cast<std::int32_t>(sampling.top_k));
    put(sampling_.seed.as<std::uint64_t>() + row, sampling.seed);
    put(sampling_.counter.as<std::uint64_t>() + row, counter);
  }

  void set_next(int sequence, std::int32_t id) {
    check_ids({&id, 1});
    put(state_.ids + sequence, id);
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
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
      for (std::uint32_t head = 0; head < config_.kv_heads; ++head)
        for (const DeviceBuffer* cache : {&keys_, &values_}) {
          std::byte* const to = cache->data() + cache_offset(layer, sequence) +
                                head * head_stride() * static_cast<std::int64_t>(element());
          check(
              cuda::fill_normal(model_.type(), to, std::size_t{tokens} * config_.head_size, 1.0f,
                                static_cast<std::uint64_t>(to - cache->data()) + (cache == &keys_),
                                stream_.get()),
              "drawing a cache");
        }
    fed_.at(static_cast<std::size_t>(sequence)) = tokens;
    set_state(sequence);
  }

  std::uint64_t published() const { return published_; }

  std::span<const std::int32_t> ids(std::uint64_t index) const {
    if (index >= published_ || published_ - index > kRing)
      throw std::invalid_argument("CUDA decoder: those ids are not in the ring");
    const std::size_t at = index % kRing;
    ring_events_[at].wait("a decode step");
    return {ring_.as<const std::int32_t>() + at * sequences(), sequences()};
  }

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
  std::uint64_t cache_bytes(std::uint64_t tokens) const {
    return tokens * 2 * config_.layers * config_.kv_heads * config_.head_size * element();
  }
  cudaStream_t stream() const { return stream_.get(); }
  void synchronize() const { stream_.synchronize("decoding"); }

  CaptureShape capture_shape() const {
    return {.dtype = model_.dtype(),
            .layers = config_.layers,
            .query_heads = config_.query_heads,
            .kv_heads = config_.kv_heads,
            .head_size = config_.head_size,
            .plain = config_.qk_norm};
  }
  const std::byte* step_capture() const { return step_outputs_.data(); }

  std::vector<Part> parts(int rows) {
    const auto weight_bytes = [&](auto member) {
      std::uint64_t bytes = 0;
      for (const DeviceLayer& layer : weights_.layers)
        bytes += std::uint64_t{static_cast<unsigned>((layer.*member).n)} *
                 static_cast<unsigned>((layer.*member).k) * element();
      return bytes;
    };
    const auto every_layer = [this](auto body) {
      return [this, body] {
        for (std::uint32_t layer = 0; layer < config_.layers; ++layer) body(layer);
      };
    };
    std::uint64_t live = 0;
    for (int row = 0; row < rows; ++row) live += cache_bytes(tokens(row) + 1);
    const std::uint64_t head = std::uint64_t{config_.vocab} * config_.hidden * element();
    return {
        {"norm, qkv", weight_bytes(&DeviceLayer::qkv),
         every_layer([this, rows](std::uint32_t l) { qkv(l, rows, step_layer(l)); })},
        {"rope, cache write", 0,
         every_layer([this, rows](std::uint32_t l) { rope_step(l, rows); })},
        {"attention", live, every_layer([this, rows](std::uint32_t l) { attend_step(l, rows); })},
        {"output", weight_bytes(&DeviceLayer::output),
         every_layer([this, rows](std::uint32_t l) { output(l, rows, step_layer(l)); })},
        {"norm, gate, up", weight_bytes(&DeviceLayer::gate_up),
         every_layer([this, rows](std::uint32_t l) {
           products_->gated(weights_.layers[l], rows, x_.as<float>(), inner_.data());
         })},
        {"down", weight_bytes(&DeviceLayer::down),
         every_layer([this, rows](std::uint32_t l) { down(l, rows); })},
        {"norm, head", head, [this, rows] { logits_of(0, rows, 0); }},
        {"sample", std::uint64_t{static_cast<unsigned>(rows)} * config_.vocab * sizeof(float),
         [this, rows] { enqueue_sample(rows); }},
    };
  }

 private:
  enum class Step { sampled, fed };

  // --- Memory ------------------------------------------------------------------------------------

  void check_options() const {
    if (options_.sequences < 1) throw std::invalid_argument("CUDA decoder: at least one sequence");
    if (options_.prefill_tokens < 1)
      throw std::invalid_argument("CUDA decoder: a prompt's chunk needs at least one token");
    if (options_.capture && options_.sequences != 1)
      throw std::invalid_argument("CUDA decoder: a trace is of one sequence");
  }

  std::size_t sequences() const { return static_cast<std::size_t>(options_.sequences); }
  std::size_t element() const { return bytes_of(model_.dtype()); }
  std::size_t q_size() const { return std::size_t{config_.query_heads} * config_.head_size; }
  std::size_t kv_size() const { return std::size_t{config_.kv_heads} * config_.head_size; }
  /// One slot more than tokens: where the row of an idle sequence goes.
  std::uint32_t capacity() const { return options_.slots + 1; }
  std::int64_t head_stride() const { return std::int64_t{capacity()} * config_.head_size; }
  std::int64_t sequence_stride() const { return head_stride() * config_.kv_heads; }

  kernels::AttentionShape attention_shape() const {
    return {.type = model_.type(),
            .query_heads = static_cast<int>(config_.query_heads),
            .kv_heads = static_cast<int>(config_.kv_heads),
            .head_size = static_cast<int>(config_.head_size),
            .softmax_scale = config_.softmax_scale(),
            .sequence_stride = sequence_stride(),
            .head_stride = head_stride()};
  }

  /// Bytes of each work buffer, by what it is for.
  struct Sizes {
    std::size_t x, qkv, q, out, inner, logits, logit_rows, attention, sample, rope, outputs,
        products;
    std::size_t sum() const {
      return x + qkv + q + out + inner + logits + logit_rows + attention + sample + rope + outputs +
             products;
    }
  };

  Sizes sizes() const {
    const std::size_t rows = std::max<std::size_t>(options_.prefill_tokens, sequences());
    const std::size_t captured = options_.capture
                                     ? 2 * capture_shape().offsets(options_.prefill_tokens).end +
                                           config_.layers * capture_shape().offsets(1).end
                                     : 0;
    return {
        .x = rows * config_.hidden * sizeof(float),
        .qkv = rows * (q_size() + 2 * kv_size()) * element(),
        .q = rows * q_size() * element(),
        .out = rows * q_size() * element(),
        .inner = rows * config_.mlp * element(),
        .logits = sequences() * config_.vocab * sizeof(float),
        .logit_rows = 0,  // made when asked for
        .attention = kernels::decode_attention_workspace(attention_shape(), options_.sequences,
                                                         static_cast<int>(capacity())),
        .sample = kernels::sample_workspace(options_.sequences, static_cast<int>(config_.vocab)),
        .rope = capacity() * config_.rope.inv_freq.size() * sizeof(float2),
        .outputs = captured,
        .products = LayerProducts::bytes(model_, rows)};
  }

  void check_fits() const {
    const std::uint64_t work = sizes().sum();
    const std::uint64_t cache = sequences() * cache_bytes(capacity());
    const cuda::MemoryInfo memory = cuda::memory_info();
    if (cache + work <= memory.free) return;
    const std::uint64_t a_token = sequences() * cache_bytes(1);
    const std::uint64_t fits = memory.free > work ? (memory.free - work) / a_token : 0;
    throw std::runtime_error(
        fmt::format("device memory: the cache of {} tokens by {} sequence{} of {} needs {}, and "
                    "its work buffers {}; "
                    "{} of {} are free: {} tokens a sequence would fit",
                    options_.slots, sequences(), sequences() == 1 ? "" : "s", config_.name,
                    cuda::bytes_text(cache), cuda::bytes_text(work), cuda::bytes_text(memory.free),
                    cuda::bytes_text(memory.total), fits));
  }

  void allocate() {
    const Sizes size = sizes();
    rows_ = static_cast<int>(std::max<std::size_t>(options_.prefill_tokens, sequences()));
    const std::size_t cache = sequences() * cache_bytes(capacity()) / 2;
    keys_ = DeviceBuffer(cache, "the cache's keys");
    values_ = DeviceBuffer(cache, "the cache's values");
    x_ = DeviceBuffer(size.x, "hidden states");
    qkv_ = DeviceBuffer(size.qkv, "queries, keys and values");
    q_ = DeviceBuffer(size.q, "queries");
    out_ = DeviceBuffer(size.out, "attention outputs");
    inner_ = DeviceBuffer(size.inner, "the MLP");
    logits_ = DeviceBuffer(size.logits, "logits");
    attention_workspace_ = DeviceBuffer(size.attention, "attention");
    rope_ = DeviceBuffer(size.rope, "RoPE's table");
    prompt_ = DeviceBuffer(capacity() * sizeof(std::int32_t), "token ids");
    iota_ = DeviceBuffer(capacity() * sizeof(std::int32_t), "positions");
    zeros_ =
        DeviceBuffer(static_cast<std::size_t>(rows_) * sizeof(std::int32_t), "a prompt's sequence");
    if (options_.capture) {
      chunk_outputs_ =
          DeviceBuffer(2 * capture_shape().offsets(options_.prefill_tokens).end, "capture");
      step_outputs_ = DeviceBuffer(config_.layers * capture_shape().offsets(1).end, "capture");
    }
    allocate_state();
    // Slots that nothing was written to are never read; the sanitizer is to see it if they are.
    ring_ = cuda::PinnedBuffer(kRing * sequences() * sizeof(std::int32_t));
    staged_ids_ = cuda::PinnedBuffer(capacity() * sizeof(std::int32_t));
  }

  void allocate_state() {
    const std::size_t rows = sequences();
    state_memory_ =
        DeviceBuffer(5 * rows * sizeof(std::int32_t) + sizeof(std::uint64_t), "the batch");
    step_count_ = state_memory_.as<std::uint64_t>();  // first: it has to be aligned
    auto* const words = reinterpret_cast<std::int32_t*>(step_count_ + 1);
    state_ = {.ids = words,
              .positions = words + rows,
              .slots = words + 2 * rows,
              .lengths = words + 3 * rows};
    row_sequences_ = words + 4 * rows;
    sampling_.temperature = DeviceBuffer(rows * sizeof(float), "sampling");
    sampling_.top_p = DeviceBuffer(rows * sizeof(float), "sampling");
    sampling_.top_k = DeviceBuffer(rows * sizeof(std::int32_t), "sampling");
    sampling_.seed = DeviceBuffer(rows * sizeof(std::uint64_t), "sampling");
    sampling_.counter = DeviceBuffer(rows * sizeof(std::uint64_t), "sampling");
    sampling_.workspace = DeviceBuffer(sizes().sample, "sampling");
  }

  void fill_tables() {
    const cudaStream_t stream = stream_.get();
    const auto& inv_freq = config_.rope.inv_freq;
    const DeviceBuffer frequencies(inv_freq.size() * sizeof(float), "RoPE's frequencies");
    check(cudaMemcpy(frequencies.data(), inv_freq.data(), frequencies.bytes(),
                     cudaMemcpyHostToDevice),
          "RoPE's frequencies");
    check(cuda::fill_rope_table(frequencies.as<float>(), static_cast<int>(inv_freq.size()),
                                static_cast<int>(capacity()), config_.rope.factor,
                                rope_.as<float2>(), stream),
          "RoPE's table");
    check(cuda::fill_iota(iota_.as<std::int32_t>(), static_cast<int>(capacity()), stream),
          "positions");
    check(cudaMemsetAsync(zeros_.data(), 0, zeros_.bytes(), stream), "a table");
    check(cudaMemsetAsync(state_memory_.data(), 0, state_memory_.bytes(), stream), "the batch");
    // Attention writes nothing for idle rows; what follows still computes on them.
    check(cudaMemsetAsync(out_.data(), 0, out_.bytes(), stream), "attention outputs");
    if (options_.capture)
      check(cudaMemsetAsync(step_outputs_.data(), 0, step_outputs_.bytes(), stream), "capture");
    check(cuda::fill_iota(row_sequences_, options_.sequences, stream), "the batch");
    synchronize();
  }

  template <class T>
  void put(T* to, T value) {
    check(cudaMemcpyAsync(to, &value, sizeof value, cudaMemcpyHostToDevice, stream_.get()),
          "writing the batch's state");
  }

  void set_state(int row) {
    const std::uint32_t fed = fed_[static_cast<std::size_t>(row)];
    const bool idle = fed == 0;
    put(state_.positions + row, static_cast<std::int32_t>(fed));
    put(state_.slots + row, static_cast<std::int32_t>(idle ? options_.slots : fed));
    put(state_.lengths + row, static_cast<std::int32_t>(idle ? 0 : fed + 1));
  }

  // --- What is asked -----------------------------------------------------------------------------

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

  void upload_ids(std::span<const std::int32_t> ids) {
    if (ids_staged_) ids_event_.wait("a prompt");  // the copy before has been read
    std::ranges::copy(ids, staged_ids_.as<std::int32_t>());
    check(cudaMemcpyAsync(prompt_.data(), staged_ids_.data(), ids.size_bytes(),
                          cudaMemcpyHostToDevice, stream_.get()),
          "copying token ids");
    ids_event_.record(stream_.get());
    ids_staged_ = true;
  }

  // --- Prefill -----------------------------------------------------------------------------------

  void prefill_chunk(int sequence, const std::int32_t* device_ids,
                     std::span<const std::int32_t> ids, bool opens, const OnChunk& on_chunk) {
    const auto rows = static_cast<int>(ids.size());
    const std::uint32_t first = fed_[static_cast<std::size_t>(sequence)];
    check(kernels::embed(model_.type(), weights_.embedding, static_cast<int>(config_.hidden),
                         device_ids, rows, x_.as<float>(), stream_.get()),
          "embedding");
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
      const LayerOutputs to = chunk_layer(layer, ids.size());
      qkv(layer, rows, to);
      rope(layer, rows, to, iota_.as<std::int32_t>() + first, zeros_.as<std::int32_t>(),
           iota_.as<std::int32_t>() + first, sequence);
      check(kernels::prefill_attention({.shape = attention_shape(),
                                        .first = static_cast<int>(first),
                                        .queries = rows,
                                        .q = q_.data(),
                                        .keys = keys_.data() + cache_offset(layer, sequence),
                                        .values = values_.data() + cache_offset(layer, sequence),
                                        .out = to.out,
                                        .lse = to.lse},
                                       stream_.get()),
            "prefill attention");
      if (on_chunk)
        on_chunk({.ids = ids,
                  .first = layer == 0,
                  .last = layer + 1 == config_.layers,
                  .opens = opens,
                  .layer = layer,
                  .data = to.qkv});
      output(layer, rows, to);
      mlp(layer, rows);
    }
  }

  /// Logits of every token of a chunk, to the host.
  void copy_logits(int count, float* to) {
    if (logit_rows_.bytes() == 0)
      logit_rows_ = DeviceBuffer(std::size_t{kLogitRows} * config_.vocab * sizeof(float), "logits");
    for (int first = 0; first < count; first += kLogitRows) {
      const int rows = std::min(kLogitRows, count - first);
      products_->head(x_row(first), rows, logit_rows_.as<float>());
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
    if (kind == Step::sampled) note_published();
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
    check(kernels::embed(model_.type(), weights_.embedding, static_cast<int>(config_.hidden),
                         state_.ids, rows, x_.as<float>(), stream_.get()),
          "embedding");
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
      qkv(layer, rows, step_layer(layer));
      rope_step(layer, rows);
      attend_step(layer, rows);
      output(layer, rows, step_layer(layer));
      mlp(layer, rows);
    }
    logits_of(0, rows, 0);
    if (kind == Step::fed) {
      check(cuda::advance(state_, rows, stream_.get()), "the end of a step");
      return;
    }
    enqueue_sample(rows);
    finish(rows, true);
  }

  void rope_step(std::uint32_t layer, int rows) {
    rope(layer, rows, step_layer(layer), state_.positions, row_sequences_, state_.slots, 0);
  }

  void attend_step(std::uint32_t layer, int rows) {
    const LayerOutputs to = step_layer(layer);
    check(kernels::decode_attention({.shape = attention_shape(),
                                     .sequences = rows,
                                     .slots = static_cast<int>(capacity()),
                                     .q = q_.data(),
                                     .keys = keys_.data() + cache_offset(layer, 0),
                                     .values = values_.data() + cache_offset(layer, 0),
                                     .lengths = state_.lengths,
                                     .out = to.out,
                                     .lse = to.lse,
                                     .workspace = attention_workspace_.data()},
                                    stream_.get()),
          "decode attention");
  }

  void enqueue_sample(int rows) {
    check(kernels::sample({.rows = rows,
                           .vocab = static_cast<int>(config_.vocab),
                           .logits = logits_.as<float>(),
                           .temperature = sampling_.temperature.as<float>(),
                           .top_p = sampling_.top_p.as<float>(),
                           .top_k = sampling_.top_k.as<std::int32_t>(),
                           .seed = sampling_.seed.as<std::uint64_t>(),
                           .counter = sampling_.counter.as<std::uint64_t>(),
                           .ids = state_.ids,
                           .workspace = sampling_.workspace.data()},
                          stream_.get()),
          "sampling");
  }

  void finish(int rows, bool advance) {
    check(cuda::finish_step({.state = state_,
                             .rows = rows,
                             .advance = advance,
                             .ring = ring_.as<std::int32_t>(),
                             .ring_rows = kRing,
                             .ring_width = options_.sequences,
                             .step = step_count_},
                            stream_.get()),
          "the end of a step");
  }

  void note_published() {
    ring_events_[published_ % kRing].record(stream_.get());
    ++published_;
  }

  // --- Layers ------------------------------------------------------------------------------------

  /// Bytes from the cache's begin to a layer's sequence.
  std::size_t cache_offset(std::uint32_t layer, int sequence) const {
    const std::size_t at = std::size_t{layer} * sequences() + static_cast<std::size_t>(sequence);
    return at * static_cast<std::size_t>(sequence_stride()) * element();
  }

  float* x_row(int row) const {
    return x_.as<float>() + static_cast<std::size_t>(row) * config_.hidden;
  }
  float* logits_row(int row) const {
    return logits_.as<float>() + static_cast<std::size_t>(row) * config_.vocab;
  }

  LayerOutputs captured_at(std::byte* base, std::size_t tokens) const {
    const CaptureShape::Offsets at = capture_shape().offsets(tokens);
    const bool plain = config_.qk_norm;
    return {.qkv = base,
            .out = base + at.out,
            .lse = reinterpret_cast<float*>(base + at.lse),
            .plain_q = plain ? base + at.plain_q : nullptr,
            .plain_k = plain ? base + at.plain_k : nullptr};
  }

  LayerOutputs plain_outputs() const {
    return {qkv_.data(), out_.data(), nullptr, nullptr, nullptr};
  }

  LayerOutputs chunk_layer(std::uint32_t layer, std::size_t tokens) const {
    if (!options_.capture) return plain_outputs();
    return captured_at(chunk_outputs_.data() + layer % 2 * (chunk_outputs_.bytes() / 2), tokens);
  }

  LayerOutputs step_layer(std::uint32_t layer) const {
    if (!options_.capture) return plain_outputs();
    return captured_at(step_outputs_.data() + layer * capture_shape().offsets(1).end, 1);
  }

  void qkv(std::uint32_t layer, int rows, const LayerOutputs& to) {
    const DeviceLayer& weights = weights_.layers[layer];
    products_->normed(weights.qkv, weights.input_norm, x_.as<float>(), rows, to.qkv);
  }

  void rope(std::uint32_t layer, int rows, const LayerOutputs& to, const std::int32_t* positions,
            const std::int32_t* sequence_ids, const std::int32_t* slots, int sequence) {
    const DeviceLayer& weights = weights_.layers[layer];
    check(kernels::rope_write({.type = model_.type(),
                               .tokens = rows,
                               .query_heads = static_cast<int>(config_.query_heads),
                               .kv_heads = static_cast<int>(config_.kv_heads),
                               .head_size = static_cast<int>(config_.head_size),
                               .rotated = static_cast<int>(config_.rope.rotated()),
                               .qkv = to.qkv,
                               .q_gamma = weights.q_norm,
                               .k_gamma = weights.k_norm,
                               .norm_epsilon = config_.norm_epsilon,
                               .rope = rope_.as<float2>(),
                               .positions = positions,
                               .sequences = sequence_ids,
                               .slots = slots,
                               .keys = keys_.data() + cache_offset(layer, sequence),
                               .values = values_.data() + cache_offset(layer, sequence),
                               .sequence_stride = sequence_stride(),
                               .head_stride = head_stride(),
                               .q = q_.data(),
                               .plain_q = to.plain_q,
                               .plain_k = to.plain_k},
                              stream_.get()),
          "RoPE");
  }

  void output(std::uint32_t layer, int rows, const LayerOutputs& to) {
    products_->added(weights_.layers[layer].output, to.out, rows, x_.as<float>());
  }

  void down(std::uint32_t layer, int rows) {
    products_->added(weights_.layers[layer].down, inner_.data(), rows, x_.as<float>());
  }

  void mlp(std::uint32_t layer, int rows) {
    products_->gated(weights_.layers[layer], rows, x_.as<float>(), inner_.data());
    down(layer, rows);
  }

  /// Logits of `rows` hidden states from `first` on, to the rows of sequences from `sequence` on.
  void logits_of(int first, int rows, int sequence) {
    products_->head(x_row(first), rows, logits_row(sequence));
  }

  const DeviceModel& model_;
  const ModelConfig& config_;
  const DeviceWeights& weights_;
  CudaDecoderOptions options_;
  cuda::Stream stream_;
  int rows_ = 0;  ///< most tokens at once

  DeviceBuffer keys_, values_;  // [layer, sequence, kv_head, slot, dim]
  DeviceBuffer x_;              // [row, hidden] float32
  DeviceBuffer qkv_, q_, out_, inner_, logits_, logit_rows_;
  DeviceBuffer attention_workspace_, rope_, prompt_, iota_, zeros_;
  DeviceBuffer chunk_outputs_;  // two layers of a chunk, in turn
  DeviceBuffer step_outputs_;   // all layers of a step
  DeviceBuffer state_memory_;
  cuda::StepState state_{};
  std::int32_t* row_sequences_ = nullptr;  // [row]: row
  std::uint64_t* step_count_ = nullptr;
  Sampling sampling_;
  cuda::PinnedBuffer ring_, staged_ids_;
  std::array<Event, kRing> ring_events_;
  Event ids_event_;
  bool ids_staged_ = false;
  std::uint64_t published_ = 0;
  std::vector<std::uint32_t> fed_;  // tokens, by sequence
  std::unique_ptr<LayerProducts> products_;
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
std::uint64_t CudaDecoder::published() const { return impl_->published(); }
std::span<const std::int32_t> CudaDecoder::ids(std::uint64_t index) const {
  return impl_->ids(index);
}
std::vector<float> CudaDecoder::logits(int sequence) const { return impl_->logits(sequence); }
std::uint32_t CudaDecoder::tokens(int sequence) const { return impl_->tokens(sequence); }
const DeviceModel& CudaDecoder::model() const { return impl_->model(); }
std::uint64_t CudaDecoder::cache_bytes(std::uint64_t tokens) const {
  return impl_->cache_bytes(tokens);
}
cudaStream_t CudaDecoder::stream() const { return impl_->stream(); }
void CudaDecoder::synchronize() const { impl_->synchronize(); }
CaptureShape CudaDecoder::capture_shape() const { return impl_->capture_shape(); }
const std::byte* CudaDecoder::step_capture() const { return impl_->step_capture(); }
std::vector<CudaDecoder::Part> CudaDecoder::parts(int rows) { return impl_->parts(rows); }

}  // namespace kvlab
