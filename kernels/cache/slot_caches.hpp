// The caches of a batch of sequences, layer by layer: each KV head has as many slots as its budget,
// and a policy decides which token is evicted. This is the protocol: room before an append,
// attention in memory of the append's own, a compaction to slots or tiers, numbers by cache
// position, counts of what is live; and steps, in which the victim's slot takes the next token.
// Everything is enqueued on one stream.
#pragma once

#include <memory>

#include "kernels/cache/slot_storage.hpp"
#include "kernels/evict/cache_positions.hpp"
#include "kernels/pointwise.hpp"
#include "kernels/quantized/tiers.hpp"
#include "policies/tiers/tier_counts.hpp"

namespace kvlab::kernels {

/// Tokens of one append that go through a layer together.
struct AppendChunk {
  std::uint32_t first;  ///< of the append's tokens
  int rows;
};

/// Where the attention of some rows goes, and their keys before RoPE, `key_row` elements from one
/// to the next, of which features are made; null: what write() has put aside.
struct AttendedRows {
  void* out;   // [row, query_head, dim]
  float* lse;  // [row, query_head], or null
  const void* plain_keys = nullptr;
  std::size_t key_row = 0;
};

/// The sequences of a step, each with one token.
struct StepRows {
  int count;
  const std::uint32_t* now;  // [row], device: its position; kIdle: the sequence sits out
  int first = 0;             ///< sequence of the first row
};

/// Some layers.
struct LayerRange {
  std::uint32_t first = 0, end = ~std::uint32_t{0};
};

/// One layer of one sequence while many tokens are appended at once: the live tokens, the new ones
/// behind them, and what is counted of them. Used by one layer after the other.
struct AppendMemory {
  AppendMemory() = default;
  /// `slots`: for live and new tokens together.
  AppendMemory(cuda::Arena& arena, const SlotsConfig& config, std::uint32_t slots);

  /// [kv_head, slot]; lengths are those of the tokens that were live already.
  kvlab_cache cache{};
  std::byte* states = nullptr;      // [kv_head, slot, slot_bytes]
  float* features = nullptr;        // [kv_head, slot, feature]; or null
  std::byte* plain_keys = nullptr;  // [new token, kv_head, dim], before RoPE; or null
  std::byte* cache_position_keys =
      nullptr;                          // [kv_head, slot, dim], rotated to cache positions; or null
  std::int64_t* first_slots = nullptr;  // [kv_head]
  kvlab_observation* seen = nullptr;    // [kv_head, slot]; null where nothing is observed
  RowSoftmax* rows = nullptr;           // [part token, query_head]; null where nothing is observed
  float* weights = nullptr;             // [age of a query]; null: all weigh 1
  StagedTiers staged{};                 ///< where the live tokens lie on tiers
  std::byte *observe_workspace = nullptr, *compact_workspace = nullptr;
};

class SlotCaches {
 public:
  /// Throws std::invalid_argument where a cache has no bound at all, std::runtime_error where the
  /// device's memory does not do.
  SlotCaches(SlotsConfig config, cudaStream_t stream);
  SlotCaches(const SlotCaches&) = delete;
  /// What it allocates; where the longest append is known, with what that adds.
  struct Bytes {
    std::uint64_t storage, work;
  };
  static Bytes bytes(const SlotsConfig& config, std::uint32_t longest_append = 0);

  /// What follows is enqueued there.
  void enqueue_on(cudaStream_t stream) { stream_ = stream; }
  cudaStream_t stream() const { return stream_; }
  /// Nothing is live. The memory stays where it is, so that a graph goes on serving. Waits.
  void clear();
  /// Memory for appends with so many tokens, those that are live among them, and for whatever a
  /// pair can hold: a compaction looks at every slot of the cache that it takes the live ones from.
  /// Waits, where it has to grow.
  const AppendMemory& reserve(std::uint32_t slots = 0);
  /// What before_token() may need, so that it does not fail behind another's.
  void reserve_for_steps();

  // Many tokens on their way into the caches of one sequence, behind the `fed` ones that these have
  // had: one layer after the other, in parts; of each part first write(), then attend(). With a
  // layer's last part its caches have appended the tokens. One append at a time.

  /// `ends_prompt`: a prompt segment ends with it.
  void begin(int sequence, std::uint32_t fed, std::uint32_t tokens, bool ends_prompt);
  /// Where q, k and v of a part are written, and how they are rotated, once its rows of RoPE are
  /// there: fill_ropes(). The rest of the arguments is the caller's.
  RopeWriteArgs write(std::uint32_t layer, const AppendChunk& part);
  void attend(std::uint32_t layer, const AppendChunk& part, const AttendedRows& to);
  /// A prompt segment has ended with the last of `fed` tokens, which has not come by an append
  /// that says so.
  void end_prompt(int sequence, std::uint32_t fed, LayerRange layers = {});

  // Steps. The host counts; all else is nothing but launches, the same from step to step, so that a
  // graph can hold them: of each layer write(), store_in_tiers(), attend with what step() says,
  // bring().

  /// Before a step, of some layers, that feeds one token to the sequence behind `fed`.
  void before_token(int sequence, std::uint32_t fed, LayerRange layers = {});
  RopeWriteArgs write(std::uint32_t layer, const StepRows& rows) const;
  /// Behind that write, where tokens lie on tiers.
  void store_in_tiers(std::uint32_t layer, const StepRows& rows) const;
  /// But for its workspace.
  EvictingAttentionArgs step(std::uint32_t layer, const StepRows& rows,
                             const AttendedRows& to) const;
  /// The features of the new tokens. Only what observes reads them.
  void bring(std::uint32_t layer, const StepRows& rows, const AttendedRows& to) const;

  // Rows of RoPE and of queries.

  /// By every table that keys are rotated by where they are cached: of given positions, or from
  /// `first` on.
  void fill_ropes(const std::int32_t* positions, std::uint32_t first, int rows) const;
  /// As fill_ropes() has left them.
  void rotate(std::uint32_t table, RopeWriteArgs& args) const;
  std::byte* q() const { return work_->q; }
  std::byte* plain_keys() const { return work_->plain_k; }
  const std::int32_t* iota() const { return work_->iota; }
  std::byte* workspace(int index) const;

  // What is held of a sequence that has been fed so many tokens.

  /// Bytes of keys and values, at most and now.
  std::uint64_t live_bytes(int sequence, std::uint32_t fed) const;
  std::uint64_t held_bytes(int sequence, std::uint32_t fed) const;
  /// Of a KV head.
  std::uint32_t live(int sequence, std::uint32_t layer, std::uint32_t head,
                     std::uint32_t fed) const;
  /// Positions, ascending. Waits.
  std::vector<std::uint32_t> kept_positions(int sequence, std::uint32_t layer,
                                            std::uint32_t head) const;
  /// How many were evicted, all layers and KV heads, when the last append came behind so
  /// many tokens.
  std::uint64_t evictions(int sequence, std::uint32_t behind) const;
  /// Benchmarks: as if so many tokens had come, of whose keys and values nothing is said. Waits.
  void pretend(int sequence, std::uint32_t tokens);

  /// Of keys and values of all sequences, room for others among them.
  std::uint64_t allocated_bytes() const;

  /// Whether tokens lie on tiers.
  bool is_quantized() const { return !tier_counts_.empty(); }
  const SlotsConfig& config() const { return config_; }
  const PairSlots& slots() const { return slots_; }
  const SlotStorage& storage() const { return *storage_; }
  /// As an append left its last layer.
  const AppendMemory& append_memory() const { return *memory_; }

 private:
  /// Of a pair under modifiers, shared slots or a tier plan, what follows from all that was
  /// appended: live tokens now, before the last append, and at most.
  struct Counts {
    std::uint32_t live = 0, behind = 0, most = 0;
    std::uint64_t max_bytes = 0;  ///< on tiers
  };
  /// As a compaction takes it.
  struct Appended {
    std::uint32_t now, tokens;
  };
  struct Work {
    Work(cuda::Arena& arena, const SlotsConfig& config, const PairSlots& slots);
    std::byte* q;                  // [row, query_head, dim]
    float* inv_freq;               // [table, dim / 2]
    float2* rope;                  // [table, row, dim / 2]
    std::byte* plain_k;            // [row, kv_head, dim], before RoPE, where norms hide it; or null
    std::int32_t *iota, *zeros;    // [row]
    Appended *nothing, *appended;  // at the first new token's position: none; all
    Appended* ended;               // none, at the position behind a prompt
    std::byte* workspaces;
  };
  /// The one that goes on.
  struct Append {
    int sequence = 0;
    std::uint32_t fed = 0, tokens = 0;
    bool ends_prompt = false;
    bool uses_cache_positions = false;  ///< keys are read rotated to cache positions
    std::uint32_t tail = kNoTail;
  };

  std::size_t halves() const { return static_cast<std::size_t>(config_.head_size) / 2; }
  const float* inv_freq(std::uint32_t table) const { return work_->inv_freq + table * halves(); }
  AttendedRows with_keys(AttendedRows rows) const;
  template <class T>
  void copy(T* to, const T* from, std::size_t count) const {
    cuda::check(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyHostToDevice, stream_),
                "a cache's numbers");
  }
  template <class T>
  void clear(T* part, std::size_t count) const {
    cuda::check(cudaMemsetAsync(part, 0, count * sizeof(T), stream_), "a cache's work");
  }

  /// each(pair) for all KV heads of a sequence in a layer.
  template <class Each>
  void each_pair(int sequence, Each each) const {
    const std::size_t heads = static_cast<std::size_t>(config_.kv_heads),
                      first = static_cast<std::size_t>(sequence) * heads;
    for (std::size_t head = 0; head < heads; ++head) each(first + head);
  }
  std::uint32_t end_of(LayerRange layers) const {
    return std::min(layers.end, static_cast<std::uint32_t>(config_.layers.size()));
  }
  /// each(layer, pair) for all KV heads of a sequence.
  template <class Each>
  void each_head(int sequence, LayerRange layers, Each each) const {
    for (std::uint32_t layer = layers.first; layer < end_of(layers); ++layer)
      each_pair(sequence, [&](std::size_t pair) { each(layer, pair); });
  }
  template <class Each>
  void each_head(int sequence, Each each) const {
    each_head(sequence, {}, each);
  }
  kvlab_cache cache_of(std::uint32_t layer, const StepRows& rows) const {
    kvlab_cache cache = storage_->cache_of(layer, rows.first);
    cache.sequences = rows.count;
    return cache;
  }
  const QuantizedCache& quantized_cache_of(std::uint32_t layer, const StepRows& rows) const {
    return quantized_[layer * config_.sequences.size() + static_cast<std::size_t>(rows.first)];
  }

  const SlotSequence& of(int sequence) const {
    return config_.sequences[static_cast<std::size_t>(sequence)];
  }
  bool counts(int sequence) const {
    return of(sequence).modifiers != Modifiers{} || of(sequence).share || is_quantized();
  }
  Counts& counts_of(std::uint32_t layer, std::size_t pair) {
    return counts_[layer * slots_.pairs() + pair];
  }
  const Counts& counts_of(std::uint32_t layer, std::size_t pair) const {
    return counts_[layer * slots_.pairs() + pair];
  }
  TierCounts& tiers_of(std::uint32_t layer, std::size_t pair) {
    return tier_counts_[layer * slots_.pairs() + pair];
  }
  std::uint32_t surplus(std::uint32_t layer, std::size_t pair, bool after_prompt) const;
  std::uint32_t older(int sequence, std::uint32_t layer, std::size_t pair, std::uint32_t fed) const;
  void evict_to_budget(int sequence, std::uint32_t fed, bool after_prompt, LayerRange layers);
  void count_append(int sequence, std::uint32_t layer, std::uint32_t tokens);
  void count_evictions(int sequence, std::uint32_t layer, bool after_prompt);
  void count_evictions_of(std::uint32_t layer, std::size_t pair, bool after_prompt);
  std::vector<std::int32_t> share_slots(int sequence, std::uint32_t layer, std::uint32_t fed);
  void share_slots_of_live(int sequence, std::uint32_t fed);
  /// What takes tokens from an append's memory to a sequence's slots in a layer.
  kvlab_shrink_args to_slots(int sequence, std::uint32_t layer, const Appended* appended,
                             bool stays) const;
  /// Between a sequence's slots in a layer, which may have tiers, and an append's memory.
  void compact(kvlab_shrink_args args, int sequence, std::uint32_t layer, bool after_prompt) const;
  /// The live tokens of a layer, or those that stay, to an append's memory.
  void take_live(int sequence, std::uint32_t layer, bool stays) const;
  void compact_in_place(int sequence, std::uint32_t layer, bool after_prompt) const;
  void number(const kvlab_cache& cache) const;
  void append_to_tiers(std::uint32_t layer, std::size_t pair, std::uint32_t tokens);
  std::uint64_t bytes_on_tiers(std::uint32_t layer, std::size_t pair) const;
  void count_bytes(std::uint32_t layer, std::size_t pair);
  /// What a compaction does to ranks.
  void modify(kvlab_shrink_args& args, int sequence, bool after_prompt) const;

  // Of the append that goes on.
  void begin_layer(std::uint32_t layer);
  void observe(std::uint32_t layer, const kvlab_prefill_args& queries);
  void keep(std::uint32_t layer);
  void keep_by_shares(std::uint32_t layer, kvlab_shrink_args args);
  void keep_plain_keys(const AppendChunk& part, const AttendedRows& to);
  void make_features_of_new(std::uint32_t layer);
  void rotate_keys_to_cache_positions(const CachePositionArgs& shape, bool of_older);
  CachePositionArgs cache_position_args(std::uint32_t layer, const AppendChunk& part) const;
  const void* attended_keys() const {
    return append_.uses_cache_positions ? memory_->cache_position_keys : memory_->cache.keys;
  }
  std::uint32_t appended_slots() const;
  void copy_weights();

  SlotsConfig config_;
  cudaStream_t stream_;
  PairSlots slots_;
  cuda::Placed<SlotStorage> storage_;
  cuda::Placed<Work> work_;
  cuda::Placed<AppendMemory> memory_;
  Append append_;
  std::vector<Counts> counts_;           // [layer, pair]
  std::vector<TierCounts> tier_counts_;  // [layer, pair]; empty if no pair is quantized
  // [layer, sequence]: starting at the sequence; empty if no pair is quantized
  std::vector<QuantizedCache> quantized_;
  std::vector<std::uint32_t> shared_when_;  // [sequence]: fed when slots were shared last
};

}  // namespace kvlab::kernels
