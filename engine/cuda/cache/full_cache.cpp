#include "engine/cuda/cache/full_cache.hpp"

#include "engine/cuda/fill.hpp"
#include "kernels/cache/rope_rows.hpp"
#include "kernels/host/transfer.hpp"

namespace kvlab {

using cuda::check;
using cuda::Placed;

namespace {

/// Slots of a sequence: one more than its maximum number of tokens. The last slot belongs to no
/// token; steps in which the sequence is idle write to it.
std::uint32_t capacity(const CudaDecoderOptions& options) { return options.slots + 1; }

/// Number of float2 elements from one RoPE table to the next.
std::size_t rope_stride(const ModelConfig& config, const CudaDecoderOptions& options) {
  return capacity(options) * config.head_size / 2;
}

}  // namespace

FullCache::Storage::Storage(cuda::Arena& arena, const DeviceModel& model,
                            const CudaDecoderOptions& options) {
  const ModelConfig& config = model.config();
  const std::size_t half = static_cast<std::size_t>(options.sequences) * capacity(options) *
                           config.heads().policy_layers().layers * config.kv_heads *
                           model.key_bytes();
  keys = arena.take<std::byte>(half);
  values = arena.take<std::byte>(half);
}

FullCache::Work::Work(cuda::Arena& arena, const DeviceModel& model,
                      const CudaDecoderOptions& options) {
  const ModelConfig& config = model.config();
  const std::size_t all = capacity(options), rows = static_cast<std::size_t>(options.rows());
  const auto slots = static_cast<int>(all);
  q = arena.take<std::byte>(rows * config.query_heads * model.key_bytes());
  rope = arena.take<float2>(config.rope_tables() * rope_stride(config, options));
  iota = arena.take<std::int32_t>(all);
  zeros = arena.take<std::int32_t>(rows);
  workspace = arena.take<std::byte>(
      kernels::decode_attention_workspace(model.attention_shape(slots), options.sequences, slots));
}

FullCache::FullCache(const DeviceModel& model, const BatchState& batch, CudaDecoderOptions options,
                     cudaStream_t stream)
    : model_(model),
      config_(model.config()),
      batch_(batch),
      options_(options),
      stream_(stream),
      storage_("the cache's keys and values", model, options),
      work_("attention", model, options),
      rings_(model, batch, options_, stream) {
  for (std::uint32_t layer = 0, before = 0; layer < config_.layers; ++layer) {
    layer_indices_.push_back(before);
    before += rings_.has(layer) ? 0 : 1;
  }
  // Slots are not initialized, because slots that were never written are never read. If one is read
  // by mistake, the sanitizer should report it.
  check(cudaMemsetAsync(work_->workspace, 0, kernels::kSignalBytes, stream), "attention");
  const auto slots = static_cast<int>(capacity(options));
  for (std::uint32_t table = 0; table < config_.rope_tables(); ++table) {
    const Rope& rope = config_.rope_of_table(table);
    const cuda::DeviceBuffer frequencies = cuda::upload(rope.inv_freq, "RoPE's frequencies");
    check(kernels::fill_rope_rows(frequencies.as<float>(), static_cast<int>(rope.inv_freq.size()),
                                  nullptr, 0, slots, rope.factor,
                                  work_->rope + table * rope_stride(config_, options_), stream),
          "RoPE's table");
    check(cudaStreamSynchronize(stream), "RoPE's table");
  }
  check(kernels::fill_iota(work_->iota, slots, stream), "positions");
  check(cudaMemsetAsync(work_->zeros, 0,
                        static_cast<std::size_t>(options.rows()) * sizeof(std::int32_t), stream),
        "a table");
  check(cudaStreamSynchronize(stream), "RoPE's table");
}

CacheBytes FullCache::bytes(const DeviceModel& model, const CudaDecoderOptions& options) {
  const CacheBytes rings = WindowRings::bytes(model, options);
  return {Placed<Storage>::bytes(model, options) + rings.storage,
          Placed<Work>::bytes(model, options) + rings.work};
}

BatchState::Row FullCache::row(std::uint32_t fed) const {
  const bool idle = fed == 0;
  return {.position = static_cast<std::int32_t>(fed),
          .slot = static_cast<std::int32_t>(idle ? options_.slots : fed),
          .length = static_cast<std::int32_t>(idle ? 0 : fed + 1)};
}

/// Number of tokens of a chunk: the number that fits in the buffers. Without eviction, the chunk
/// size does not change which tokens a query sees.
std::uint32_t FullCache::prefill_chunk(int /*sequence*/) const {
  return static_cast<std::uint32_t>(options_.rows());
}

std::uint64_t FullCache::live_bytes(int /*sequence*/, std::uint32_t fed) const {
  return model_.cache_bytes(fed);
}

/// Offset in bytes of a sequence's slots in a layer, from the start of the cache.
std::size_t FullCache::offset(std::uint32_t layer, int sequence) const {
  const std::size_t at = layer_indices_[layer] * static_cast<std::size_t>(options_.sequences) +
                         static_cast<std::size_t>(sequence);
  return at * static_cast<std::size_t>(shape(layer).sequence_stride) * bytes_of(model_.dtype());
}

kernels::RopeWriteArgs FullCache::write(std::uint32_t layer, int sequence) const {
  kernels::RopeWriteArgs args{};
  args.cache.keys = storage_->keys + offset(layer, sequence);
  args.cache.values = storage_->values + offset(layer, sequence);
  args.sequence_stride = shape(layer).sequence_stride;
  args.head_stride = shape(layer).head_stride;
  return args;
}

void FullCache::rotate(std::uint32_t layer, kernels::RopeWriteArgs& args) const {
  const RowSpec& row = config_.rows[layer];
  args.rotated = static_cast<int>(row.rope.rotated_dims());
  args.rope = &work_->rope[row.table * rope_stride(config_, options_)].x;
  args.q = work_->q;
}

kernels::AttentionShape FullCache::shape(std::uint32_t layer) const {
  return model_.attention_shape(static_cast<int>(capacity(options_)), layer);
}

class FullCache::Prompt final : public DeviceAppend {
 public:
  Prompt(const FullCache& cache, int sequence, std::uint32_t fed, std::uint32_t tokens)
      : DeviceAppend(cache.config_.layers, tokens), cache_(cache), sequence_(sequence), fed_(fed) {}

 private:
  kernels::RopeWriteArgs write_part(std::uint32_t layer, const PromptChunk& part) override {
    const std::uint32_t position = fed_ + part.first;
    const bool ring = cache_.rings_.has(layer);
    kernels::RopeWriteArgs args =
        ring ? cache_.rings_.write(layer, sequence_, position) : cache_.write(layer, sequence_);
    cache_.rotate(layer, args);
    args.rope_rows = cache_.work_->iota + position;
    if (ring) return args;
    args.slots = args.rope_rows;
    args.sequences = cache_.work_->zeros;
    return args;
  }

  void attend_part(std::uint32_t layer, const PromptChunk& part, const LayerOutputs& to) override {
    if (cache_.rings_.has(layer))
      return cache_.rings_.attend(layer, sequence_, fed_ + part.first, part.rows, cache_.work_->q,
                                  to);
    const std::size_t at = cache_.offset(layer, sequence_);
    check(kernels::prefill_attention(cache_.shape(layer),
                                     {.first = static_cast<int>(fed_ + part.first),
                                      .queries = part.rows,
                                      .q = cache_.work_->q,
                                      .keys = cache_.storage_->keys + at,
                                      .values = cache_.storage_->values + at,
                                      .out = to.out,
                                      .lse = to.lse},
                                     0, cache_.stream_),
          "prefill attention");
  }

  const FullCache& cache_;
  int sequence_;
  std::uint32_t fed_;
};

class FullCache::Step final : public CacheStep {
 public:
  Step(const FullCache& cache, int rows, const LayerOutputMemory& outputs)
      : cache_(cache), rows_(rows), outputs_(outputs) {}

  kernels::RopeWriteArgs write(std::uint32_t layer) const override {
    const bool ring = cache_.rings_.has(layer);
    kernels::RopeWriteArgs args = ring ? cache_.rings_.write(layer) : cache_.write(layer, 0);
    cache_.rotate(layer, args);
    args.rope_rows = cache_.batch_.state().positions;
    if (ring) return args;
    args.slots = cache_.batch_.state().slots;
    args.sequences = cache_.batch_.rows();
    return args;
  }

  void attend(std::uint32_t layer) const override {
    const LayerOutputs to = outputs_.step(layer);
    if (cache_.rings_.has(layer)) return cache_.rings_.attend(layer, rows_, cache_.work_->q, to);
    const std::size_t at = cache_.offset(layer, 0);
    check(kernels::decode_attention({.shape = cache_.shape(layer),
                                     .sequences = rows_,
                                     .slots = static_cast<int>(capacity(cache_.options_)),
                                     .q = cache_.work_->q,
                                     .keys = cache_.storage_->keys + at,
                                     .values = cache_.storage_->values + at,
                                     .lengths = cache_.batch_.state().lengths,
                                     .out = to.out,
                                     .lse = to.lse,
                                     .workspace = cache_.work_->workspace,
                                     .settled = true},
                                    cache_.stream_),
          "decode attention");
  }

 private:
  const FullCache& cache_;
  int rows_;
  const LayerOutputMemory& outputs_;
};

std::unique_ptr<DeviceAppend> FullCache::append(int sequence, std::uint32_t fed,
                                                std::uint32_t tokens, bool /*ends_prompt*/) {
  return std::make_unique<Prompt>(*this, sequence, fed, tokens);
}

std::unique_ptr<const CacheStep> FullCache::step(int rows, const LayerOutputMemory& outputs) const {
  return std::make_unique<const Step>(*this, rows, outputs);
}

void FullCache::pretend(std::uint32_t) {
  rings_.pretend();
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
    for (const bool key : {true, false}) {
      if (rings_.has(layer)) continue;
      const std::size_t at = offset(layer, 0);
      check(cuda::fill_normal(model_.type(), (key ? storage_->keys : storage_->values) + at,
                              static_cast<std::size_t>(shape(layer).sequence_stride) *
                                  static_cast<std::size_t>(options_.sequences),
                              1.0f, at + (key ? 1 : 0), stream_),
            "filling a cache with random values");
    }
}

}  // namespace kvlab
