// Reports to observers what an evicting cache does: its live tokens, their observations, the policy
// states, and q, k and v. After each append it copies everything to the host and waits for the
// copy, so it is only for verification.
#pragma once

#include <map>

#include "engine/cuda/cache/evicting_cache.hpp"

namespace kvlab {

class CacheWatch {
 public:
  /// `cache` must outlive this object, and must have been made with `watched`.
  CacheWatch(const EvictingCache& cache, const ModelConfig& config, const CaptureShape& shape,
             int sequences, cudaStream_t stream);

  void watch(int sequence, DecoderObserver* observer);
  bool watches(int sequence) const { return observers_.contains(sequence); }
  bool watches_any() const { return !observers_.empty(); }

  // Reports an append of many tokens to a watched sequence: begin(), then part() for each part of
  // each layer, then end().
  void begin(int sequence, std::span<const std::int32_t> ids, std::uint32_t first, SegmentKind kind,
             bool new_segment);
  /// Call it after the attention of the part.
  void part(std::uint32_t layer, const PromptChunk& part, const LayerOutputs& outputs);
  void end();

  /// A token that a step fed to a watched sequence. report_step() reports all such tokens of a
  /// step; `outputs` is LayerOutputMemory::step_data().
  struct Fed {
    int sequence;
    std::int32_t id;
    std::uint32_t position;
    SegmentKind kind;
    bool new_segment;
  };
  void report_step(std::span<const Fed> fed, const std::byte* outputs);

 private:
  /// One KV head's live tokens, oldest first.
  struct Head {
    std::vector<std::uint32_t> positions;
    std::vector<std::byte> states;
    std::vector<float> features;
    std::vector<Observation> seen;
  };
  /// Copies of a layer's arrays on the host, indexed by slot.
  struct Slots {
    std::vector<std::uint32_t> positions;
    std::vector<std::byte> states;
    std::vector<float> features;
    std::vector<Observation> seen;
    Head head(std::size_t first, std::size_t count) const;
  };

  const kernels::KvCacheConfig& config_of() const { return cache_.slots().config(); }
  Slots read(const kvlab_cache_view& cache, const std::byte* states, const float* features,
             const kvlab_observation* seen, std::size_t count) const;
  void show_append(std::uint32_t layer);
  std::vector<Head> ring(std::uint32_t layer, std::uint32_t first, std::uint32_t appended) const;
  void show_layer(int sequence, std::uint32_t layer, std::uint32_t first, std::uint32_t appended,
                  const std::vector<Head>& heads, const CapturedLayer& captured);

  const EvictingCache& cache_;
  const ModelConfig& config_;
  CaptureShape shape_;
  std::size_t sequences_;
  cudaStream_t stream_;
  std::map<int, DecoderObserver*> observers_;
  std::map<std::tuple<int, std::uint32_t, std::uint32_t>, std::vector<std::uint32_t>> live_;
  int sequence_ = 0;  // sequence of the append
  std::uint32_t first_ = 0, appended_ = 0;
  CapturedLayer captured_;
};

}  // namespace kvlab
