#include "engine/cuda/cache/evicting_cache.hpp"

#include "engine/cuda/fill.hpp"

namespace kvlab {

using cuda::check;

namespace {

std::vector<std::uint32_t> layer_indices(const ModelConfig& config) {
  std::vector<std::uint32_t> layer_indices;
  std::uint32_t before = 0;
  for (const RowSpec& row : config.rows) {
    layer_indices.push_back(before);
    before += row.window > 0 ? 0 : 1;
  }
  return layer_indices;
}

/// The kernels of a compiled policy; null for a registered one.
std::unique_ptr<kernels::PolicyKernels> compile_policy(const CudaDecoderOptions& options) {
  if (!options.entry()->source) return nullptr;
  return std::make_unique<kernels::PolicyKernels>(options.entry());
}

/// Adds to the configuration what needs a device: kernels of compiled policies, and weights.
kernels::KvCacheConfig complete(const DeviceModel& model, const CudaDecoderOptions& options,
                                const kernels::PolicyKernels* compiled) {
  kernels::KvCacheConfig config = slots_config(model, options);
  if (compiled) static_cast<kernels::DevicePolicy&>(config.kernels) = compiled->policy();
  for (kernels::SlotLayer& layer : config.layers)
    layer.output = model.weights().layers[layer.number].output.weight;
  return config;
}

}  // namespace

EvictingCache::EvictingCache(const DeviceModel& model, const BatchState& batch,
                             CudaDecoderOptions options, cudaStream_t stream)
    : model_(model),
      config_(model.config()),
      batch_(batch),
      options_(std::move(options)),
      stream_(stream),
      layer_indices_(layer_indices(config_)),
      compiled_(compile_policy(options_)),
      slots_(complete(model, options_, compiled_.get()), stream),
      rings_(model, batch, options_, stream) {}

CacheBytes EvictingCache::bytes(const DeviceModel& model, const CudaDecoderOptions& options) {
  const auto slots = kernels::KvCache::bytes(slots_config(model, options), options.longest_prompt);
  const CacheBytes rings = WindowRings::bytes(model, options);
  return {slots.storage + rings.storage, slots.work + rings.work};
}

BatchState::Row EvictingCache::row(std::uint32_t fed) const {
  const bool idle = fed == 0;
  return {.position = idle ? -1 : static_cast<std::int32_t>(fed),
          .slot = 0,
          .length = static_cast<std::int32_t>(idle ? 0 : fed + 1)};
}

std::uint32_t EvictingCache::prefill_chunk(int sequence) const {
  return options_.caches.at(static_cast<std::size_t>(sequence)).prefill.chunk;
}

std::vector<std::vector<std::uint32_t>> EvictingCache::kept(int sequence, std::uint32_t fed) const {
  std::vector<std::vector<std::uint32_t>> kept(config_.layers);
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
    for (std::uint32_t head = 0; head < config_.kv_heads; ++head)
      kept[layer].push_back(rings_.has(layer)
                                ? rings_.kept(layer, fed)
                                : slots_.live(sequence, layer_indices_[layer], head, fed));
  return kept;
}

void EvictingCache::pretend(std::uint32_t tokens) {
  rings_.pretend();
  slots_.pretend(tokens);
  if (options_.is_quantized()) return;
  const kernels::SlotStorage& storage = slots_.storage();
  const auto total = static_cast<std::size_t>(slots_.slots().total());
  for (const bool key : {true, false})
    check(cuda::fill_normal(model_.type(), key ? storage.keys : storage.values,
                            total * config_.head_size, 1.0f, key ? 1 : 0, stream_),
          "filling a cache with random values");
  check(cudaStreamSynchronize(stream_), "filling a cache with random values");
}

kernels::AttendedRows EvictingCache::attended_rows(const LayerOutputs& to) const {
  const std::size_t head = config_.head_size, kv = config_.kv_heads * head;
  kernels::AttendedRows rows{.out = to.out, .lse = to.lse};
  if (config_.norms_each_head()) {
    if (to.plain_k) rows.plain_keys = to.plain_k, rows.key_row = kv;
  } else {
    rows.plain_keys = to.qkv + config_.query_heads * model_.key_bytes();
    rows.key_row = config_.query_heads * head + 2 * kv;
  }
  return rows;
}

kernels::RopeWriteArgs EvictingCache::rope_args(kernels::RopeRows user, std::uint32_t layer,
                                                kernels::RopeWriteArgs args) const {
  args.q = slots_.q();
  args.plain_k = slots_.plain_keys();
  slots_.rotate(user, config_.rows[layer].table, args);
  return args;
}

// --- Prompts -------------------------------------------------------------------------------------

class EvictingCache::Prompt final : public DeviceAppend {
 public:
  Prompt(EvictingCache& cache, int sequence, std::uint32_t fed, std::uint32_t tokens,
         bool ends_prompt)
      : DeviceAppend(cache.config_.layers, tokens), cache_(cache), sequence_(sequence), fed_(fed) {
    cache.slots_.begin(sequence, fed, tokens, ends_prompt);
  }

 private:
  kernels::RopeWriteArgs write_part(std::uint32_t layer, const PromptChunk& part) override {
    const bool is_all = part.rows == static_cast<int>(tokens());
    if (layer == 0 || !is_all)
      cache_.slots_.fill_ropes(kernels::RopeRows::append, nullptr, fed_ + part.first, part.rows);
    if (cache_.rings_.has(layer))
      return cache_.rope_args(kernels::RopeRows::append, layer,
                              cache_.rings_.write(layer, sequence_, fed_ + part.first));
    return cache_.slots_.write(cache_.index_of(layer), part);
  }

  void attend_part(std::uint32_t layer, const PromptChunk& part, const LayerOutputs& to) override {
    if (cache_.rings_.has(layer))
      cache_.rings_.attend(layer, sequence_, fed_ + part.first, part.rows, cache_.slots_.q(), to);
    else
      cache_.slots_.attend(cache_.index_of(layer), part, cache_.attended_rows(to));
  }

  EvictingCache& cache_;
  int sequence_;
  std::uint32_t fed_;
};

std::unique_ptr<DeviceAppend> EvictingCache::append(int sequence, std::uint32_t fed,
                                                    std::uint32_t tokens, bool ends_prompt) {
  return std::make_unique<Prompt>(*this, sequence, fed, tokens, ends_prompt);
}

// --- Steps ---------------------------------------------------------------------------------------

class EvictingCache::Step final : public CacheStep {
 public:
  Step(const EvictingCache& cache, int rows, const LayerOutputMemory& outputs)
      : cache_(cache),
        rows_{rows, reinterpret_cast<const std::uint32_t*>(cache.batch_.state().positions)},
        outputs_(outputs),
        attention_(cache.slots_.config().kernels, layers(), cache.branch_, cache.stream_) {}

  void begin() const override {
    cache_.slots_.fill_ropes(kernels::RopeRows::step, cache_.batch_.state().positions, 0,
                             rows_.count);
  }

  kernels::RopeWriteArgs write(std::uint32_t layer) const override {
    if (cache_.rings_.has(layer))
      return cache_.rope_args(kernels::RopeRows::step, layer, cache_.rings_.write(layer));
    return cache_.slots_.write(cache_.index_of(layer), rows_);
  }

  void attend(std::uint32_t layer) const override {
    const LayerOutputs to = outputs_.step(layer);
    if (cache_.rings_.has(layer))
      return cache_.rings_.attend(layer, rows_.count, cache_.slots_.q(), to);
    const std::uint32_t index = cache_.index_of(layer);
    cache_.slots_.store_in_tiers(index, rows_);
    attention_.attend(index);
    // here, because the keys must still be in their slots
    cache_.slots_.compute_features(index, rows_, cache_.attended_rows(to));
  }
  void observe(std::uint32_t layer) const override {
    if (!cache_.rings_.has(layer)) attention_.observe(cache_.index_of(layer));
  }
  void end() const override { attention_.join(); }

 private:
  std::vector<kernels::EvictingAttentionArgs> layers() const {
    std::vector<kernels::EvictingAttentionArgs> layers;
    for (std::uint32_t layer = 0; layer < cache_.config_.layers; ++layer) {
      if (cache_.rings_.has(layer)) continue;
      const auto index = static_cast<std::uint32_t>(layers.size());
      layers.push_back(
          cache_.slots_.step(index, rows_, cache_.attended_rows(outputs_.step(layer))));
      layers.back().workspace =
          cache_.slots_.workspace(static_cast<int>(index) % (2 * ObserverBranch::kHalf));
    }
    return layers;
  }

  const EvictingCache& cache_;
  kernels::StepRows rows_;
  const LayerOutputMemory& outputs_;
  ObservedAttention attention_;
};

std::unique_ptr<const CacheStep> EvictingCache::step(int rows,
                                                     const LayerOutputMemory& outputs) const {
  return std::make_unique<const Step>(*this, rows, outputs);
}

}  // namespace kvlab
