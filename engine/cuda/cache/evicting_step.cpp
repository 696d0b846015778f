// A decode step of a cache that evicts: each sequence's new token takes the victim's slot.
#include "engine/cuda/cache/evicting_cache.hpp"
#include "engine/cuda/fill.hpp"

namespace kvlab {

class EvictingCache::Step final : public CacheStep {
 public:
  Step(const EvictingCache& cache, int rows, const LayerOutputMemory& outputs)
      : cache_(cache),
        rows_(rows),
        now_(reinterpret_cast<const std::uint32_t*>(cache.batch_.state().positions)),
        columns_(cache.columns() > 0 ? columns(outputs) : std::vector<kernels::ColumnArgs>{}),
        attention_(cache.kernels_, layers(outputs), cache.branch_, cache.stream_) {}

  void begin() const override {
    if (cache_.rotation_ == KeyRotation::by_age) return;
    const Rope& rope = cache_.config_.rope();
    cuda::check(cuda::fill_rope_rows(cache_.work_->inv_freq, static_cast<int>(rope.inv_freq.size()),
                                     cache_.batch_.state().positions, 0, rows_, rope.factor,
                                     cache_.work_->rope, cache_.stream_),
                "RoPE");
  }

  kernels::RopeWriteArgs write(std::uint32_t layer) const override {
    const kernels::SlotCache cache = cache_.storage_->cache(layer, rows_);
    kernels::RopeWriteArgs args{};
    args.keys = cache.keys;
    args.values = cache.values;
    args.sequences = cache_.batch_.rows();
    args.next = {.first_slot = cache.first_slot,
                 .next_slots = cache.next_slots,
                 .positions = cache.positions,
                 .now = now_};
    args.q = cache_.work_->q;
    args.plain_k = cache_.work_->plain_k;
    if (cache_.rotation_ == KeyRotation::by_age) return args;
    args.rotated = static_cast<int>(cache_.config_.rope().rotated());
    args.rope = cache_.work_->rope;
    args.positions = cache_.batch_.rows();
    return args;
  }

  void attend(std::uint32_t layer) const override {
    attention_.attend(layer);
    // Only what observes reads them. The keys must be there still.
    if (!columns_.empty())
      cuda::check(kernels::make_columns(columns_[layer], cache_.stream_), "columns");
  }
  void observe(std::uint32_t layer) const override { attention_.observe(layer); }
  void end() const override { attention_.join(); }

 private:
  std::vector<kernels::EvictingAttentionArgs> layers(const LayerOutputMemory& outputs) const {
    const bool squeezed = cache_.rotation_ != KeyRotation::by_position;
    std::vector<kernels::EvictingAttentionArgs> layers;
    for (std::uint32_t layer = 0; layer < cache_.config_.layers; ++layer) {
      const LayerOutputs to = outputs.step(layer);
      layers.push_back({.cache = cache_.storage_->cache(layer, rows_),
                        .policy = cache_.storage_->policy(layer),
                        .numbering = squeezed ? Positions::cache : Positions::original,
                        .two_frames = cache_.rotation_ == KeyRotation::two_frames,
                        .now = now_,
                        .q = cache_.work_->q,
                        .inv_freq = cache_.work_->inv_freq,
                        .rotated = static_cast<int>(cache_.config_.rope().rotated()),
                        .rope_factor = cache_.config_.rope().factor,
                        .out = to.out,
                        .lse = to.lse,
                        .workspace = nullptr,
                        .settled = true});
    }
    return layers;
  }

  std::vector<kernels::ColumnArgs> columns(const LayerOutputMemory& outputs) const {
    std::vector<kernels::ColumnArgs> layers;
    for (std::uint32_t layer = 0; layer < cache_.config_.layers; ++layer) {
      const kernels::SlotCache cache = cache_.storage_->cache(layer, rows_);
      const PlainKeys keys = cache_.plain_keys(outputs.step(layer));
      layers.push_back({.cache = cache,
                        .columns = cache_.options_.columns(),
                        .slots = cache.next_slots,
                        .tokens = 1,
                        .now = now_,
                        .keys = keys.first,
                        .key_row = static_cast<std::int64_t>(keys.row),
                        .unit_keys = cache_.storage_->unit_keys_of(layer, 0),
                        .to = cache_.storage_->columns,
                        .output = cache_.model_.weights().layers[layer].output.weight,
                        .hidden = static_cast<int>(cache_.config_.hidden)});
    }
    return layers;
  }

  const EvictingCache& cache_;
  int rows_;
  const std::uint32_t* now_;
  std::vector<kernels::ColumnArgs> columns_;  // [layer]; empty without
  ObservedAttention attention_;
};

std::unique_ptr<const CacheStep> EvictingCache::step(int rows,
                                                     const LayerOutputMemory& outputs) const {
  return std::make_unique<const Step>(*this, rows, outputs);
}

}  // namespace kvlab
