// A decode step of a cache that evicts: each sequence's new token takes the victim's slot.
#include "engine/cuda/cache/evicting_cache.hpp"
#include "engine/cuda/fill.hpp"
#include "kernels/codes/codes.hpp"

namespace kvlab {

class EvictingCache::Step final : public CacheStep {
 public:
  Step(const EvictingCache& cache, int rows, const LayerOutputMemory& outputs)
      : cache_(cache),
        rows_(rows),
        outputs_(outputs),
        now_(reinterpret_cast<const std::uint32_t*>(cache.batch_.state().positions)),
        coded_(coded(cache)),
        columns_(cache.columns() > 0 ? columns(outputs) : std::vector<kernels::ColumnArgs>{}),
        attention_(cache.kernels_, layers(outputs), cache.branch_, cache.stream_) {}

  void begin() const override { cache_.fill_ropes(cache_.batch_.state().positions, 0, rows_); }

  kernels::RopeWriteArgs write(std::uint32_t layer) const override {
    if (cache_.rings_.has(layer)) {
      kernels::RopeWriteArgs args = cache_.rings_.write(layer);
      cache_.rotate(layer, cache_.batch_.rows(), args);
      return args;
    }
    const kernels::SlotCache cache = cache_.storage_->cache(layer, rows_);
    kernels::RopeWriteArgs args{};
    args.keys = cache.keys;
    args.values = cache.values;
    args.sequences = cache_.batch_.rows();
    args.next = {.first_slot = cache.first_slot,
                 .next_slots = cache.next_slots,
                 .positions = cache.positions,
                 .now = now_};
    if (!coded_.empty()) {  // place_newest() does the rest
      const RungStorage& rungs = cache_.storage_->rungs;
      args.next = {.first_slot = rungs.newest,
                   .next_slots = reinterpret_cast<const std::int32_t*>(rungs.nothing),
                   .positions = nullptr,
                   .now = now_};
    }
    cache_.rotate(layer, cache_.batch_.rows(), args);
    return args;
  }

  void attend(std::uint32_t layer) const override {
    if (cache_.rings_.has(layer))
      return cache_.rings_.attend(layer, rows_, cache_.work_->q, outputs_.step(layer));
    if (!coded_.empty())
      cuda::check(kernels::place_newest(cache_.storage_->cache(layer, rows_), coded_[layer], now_,
                                        cache_.stream_),
                  "the newest tokens");
    attention_.attend(place(layer));
    // Only what observes reads them. The keys must be there still.
    if (!columns_.empty())
      cuda::check(kernels::make_columns(columns_[place(layer)], cache_.stream_), "columns");
  }
  void observe(std::uint32_t layer) const override {
    if (!cache_.rings_.has(layer)) attention_.observe(place(layer));
  }
  void end() const override { attention_.join(); }

 private:
  /// Which of the layers that the policy acts on.
  std::size_t place(std::uint32_t layer) const {
    std::size_t before = 0;
    for (std::uint32_t other = 0; other < layer; ++other)
      before += cache_.rings_.has(other) ? 0 : 1;
    return before;
  }

  static std::vector<kernels::CodedCache> coded(const EvictingCache& cache) {
    std::vector<kernels::CodedCache> layers;
    for (std::uint32_t layer = 0; cache.options_.coded() && layer < cache.config_.layers; ++layer)
      layers.push_back(cache.storage_->rungs.coded(layer, 0));
    return layers;
  }

  std::vector<kernels::EvictingAttentionArgs> layers(const LayerOutputMemory& outputs) const {
    const bool squeezed = cache_.rotation_ != KeyRotation::by_position;
    std::vector<kernels::EvictingAttentionArgs> layers;
    for (std::uint32_t layer = 0; layer < cache_.config_.layers; ++layer) {
      if (cache_.rings_.has(layer)) continue;
      const Rope& rope = cache_.config_.rows[layer].rope;
      const LayerOutputs to = outputs.step(layer);
      layers.push_back({.cache = cache_.storage_->cache(layer, rows_),
                        .policy = cache_.storage_->policy(layer),
                        .numbering = squeezed ? Positions::cache : Positions::original,
                        .two_frames = cache_.rotation_ == KeyRotation::two_frames,
                        .now = now_,
                        .q = cache_.work_->q,
                        .inv_freq = cache_.inv_freq(cache_.config_.rows[layer].table),
                        .rotated = static_cast<int>(rope.rotated()),
                        .rope_factor = rope.factor,
                        .out = to.out,
                        .lse = to.lse,
                        .workspace = nullptr,
                        .settled = true,
                        .sinks = cache_.model_.sinks(layer)});
      if (!coded_.empty()) layers.back().cache.coded = &coded_[layer];
    }
    return layers;
  }

  std::vector<kernels::ColumnArgs> columns(const LayerOutputMemory& outputs) const {
    std::vector<kernels::ColumnArgs> layers;
    for (std::uint32_t layer = 0; layer < cache_.config_.layers; ++layer) {
      if (cache_.rings_.has(layer)) continue;
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
                        .hidden = static_cast<int>(cache_.config_.hidden),
                        .values = cache_.storage_->rungs.newest_values});
    }
    return layers;
  }

  const EvictingCache& cache_;
  int rows_;
  const LayerOutputMemory& outputs_;
  const std::uint32_t* now_;
  std::vector<kernels::CodedCache> coded_;    // [layer]; empty without codes
  std::vector<kernels::ColumnArgs> columns_;  // [layer]; empty without
  ObservedAttention attention_;
};

std::unique_ptr<const CacheStep> EvictingCache::step(int rows,
                                                     const LayerOutputMemory& outputs) const {
  return std::make_unique<const Step>(*this, rows, outputs);
}

}  // namespace kvlab
