// The KV caches of a batch of sequences. In each layer, each KV head of a sequence (a *pair*) has
// about as many *slots* as its budget (PairSlots says exactly how many), and a policy decides which
// token is evicted. Live tokens are counted on the host, so steps only launch kernels. Everything
// is enqueued on one stream.
//
// Where the key of a token is at each moment (its value is always in the corresponding place). The
// queries go to q(), or to DraftMemory::q for drafts:
//
//   append   write()     the projection's k ──RoPE──► AppendMemory::cache, after the live tokens.
//                        For cache positions, a rotated copy is in `cache_position_keys`
//            attend()    queries see the append memory. observe_queries() adds up the attention
//                        that each token received. The call for the layer's last part also gives
//                        the policy the new tokens (keep()). The tokens that stay are moved
//                        ──compact──► slots of the pair, or rows of its tiers. All others are
//                        evicted
//   step     write()     k ──RoPE──► slot `next_slots`: the first free slot, or the victim's, whose
//                        key it overwrites
//                        With tiers: ──► `newest_keys`; store_in_tiers() stores it in row
//                        `next_rows` of the first tier
//            observe     (EvictionKernels) The policy's states change, and the next victim gets
//                        into `next_slots`. With tiers, if the first tier is full, it then demotes
//                        one token, and so does each full tier below it, down to the first tier
//                        that has a free row (demote_pairs()). The row of the victim may be
//                        overwritten by a demoted token at once, although its slot counts as live
//                        until the next step or append
//   no step evicts       with every=W or scope=layer, before_token() compacts when a pair has
//                        compact_evict_at live tokens, or when its first tier is full: in place or,
//                        with tiers, through append memory. With `once`, only the end of a prompt
//                        evicts. See Modifiers::steps_evict()
//   turn     write()     in each layer, the first write() of the next append copies the live tokens
//                        from slots to append memory and, except with `once`, evicts to the budget.
//                        With tiers they are dequantized; StagedTiers keeps their quantized data
//   drafts   begin_drafts()   evicts the victim that the last step chose, in place
//            write_drafts()   k ──RoPE──► the slots after the live tokens
//            accept_drafts()  the policy gets the accepted tokens; compacts in place
//   sequence start()          the tokens are dropped: `lengths` become 0
//            copy_sequence()  slots and rows are copied to the same slots of the other sequence
//
// A token is identified by its slot, which also indexes positions, states and features. Only a
// compaction moves a token to another slot. On tiers, its key and value are in a *row* of the pair;
// TierStorage::row_of_slot and slot_of_row convert between the two. If no pair has a second tier, a
// token's row has the same index as its slot.
//
// Slots and rows are counted in two ways. Within a pair, they are counted from 0: `next_slots`,
// `next_rows`, the contents of row_of_slot and slot_of_row, and the slots of a compaction. Arrays
// [slot] and [row] have the slots or rows of all pairs of all layers: a pair's slots begin at
// `first_slots`, and its rows at DeviceTierPlan::first_row.
//
// What the host counts: nothing that grows, if a sequence has neither modifiers, shared slots nor
// tiers. The numbers of its live tokens follow from the number of tokens that it was fed
// (PairSlots::older()). For other sequences, see counts(), Counts and TierCounts.
//
// Keys and values may be in the caller's blocks (KvCacheConfig::pages). Quantized tiers have no
// blocks, drafts or gathered ranks (KvCacheConfig::ranks).
#pragma once

#include <memory>
#include <numeric>

#include "kernels/cache/slot_storage.hpp"
#include "kernels/evict/cache_positions.hpp"
#include "kernels/pointwise.hpp"
#include "kernels/quantized/centre.hpp"
#include "kernels/quantized/tiers.hpp"
#include "policies/rule/live_tokens.hpp"
#include "policies/tiers/tier_counts.hpp"

namespace kvlab::kernels {

/// Some tokens of one append. They go through a layer together.
struct AppendChunk {
  std::uint32_t first;  ///< index of the chunk's first token within the append
  int rows;
};

/// Where to write the attention outputs of some rows. `plain_keys`: the rows' keys before RoPE,
/// `key_row` elements apart. Features are computed from them. If `plain_keys` is null, the copy
/// that write() made is used.
struct AttendedRows {
  void* out;   // [row, query_head, dim]
  float* lse;  // [row, query_head], or null
  const void* plain_keys = nullptr;
  std::size_t key_row = 0;
};

/// The parts of a RoPE table. An append, a step and drafts each fill their own rows before the
/// first layer and read them in all layers, so they may take turns.
enum class RopeRows { append, step, drafts };

/// The sequences of a step. Each has one token.
struct StepRows {
  int count;
  const std::uint32_t* now;  // [row], device: position of the row's token; kIdle: the sequence does
                             // not take part in this step
  int first = 0;             ///< sequence of the first row
  RopeRows ropes = RopeRows::step;
};

/// A range of layers; all layers by default.
struct LayerRange {
  std::uint32_t first = 0, end = ~std::uint32_t{0};
};

/// Memory for one layer of one sequence during an append of many tokens. It holds the live tokens,
/// then the new tokens, and the observations of both.
struct AppendMemory {
  AppendMemory() = default;
  /// `slots`: number of slots per KV head, for live and new tokens together.
  AppendMemory(cuda::Arena& arena, const KvCacheConfig& config, std::uint32_t slots);

  /// [kv_head, slot]; `lengths` counts the tokens that were live before the append.
  kvlab_cache_view cache{};
  std::byte* states = nullptr;      // [kv_head, slot, slot_bytes]
  float* features = nullptr;        // [kv_head, slot, feature]; or null
  std::byte* plain_keys = nullptr;  // [new token, kv_head, dim], before RoPE; or null
  std::byte* cache_position_keys =
      nullptr;                          // [kv_head, slot, dim], rotated to cache positions; or null
  std::int64_t* first_slots = nullptr;  // [kv_head]
  kvlab_observation* seen = nullptr;    // [kv_head, slot]; null if nothing is observed
  StagedTiers staged{};                 ///< tiers and quantized data of the live tokens
};

/// Scratch memory for an append or a compaction, for the layer that is being processed.
struct AppendScratch {
  AppendScratch() = default;
  /// `slots`: see AppendMemory.
  AppendScratch(cuda::Arena& arena, const KvCacheConfig& config, std::uint32_t slots);

  RowSoftmax* rows = nullptr;  // [token of the part, query_head]; null if nothing is observed
  float* weights = nullptr;    // [age of a query]; null: all weights are 1
  std::byte *observe_workspace = nullptr, *compact_workspace = nullptr;
  std::uint64_t* ranks = nullptr;  ///< see compact_rows()
};

/// Memory for the drafts of all sequences. Their rows, one for each token, are in the order of the
/// sequences.
struct DraftMemory {
  DraftMemory() = default;
  DraftMemory(cuda::Arena& arena, const KvCacheConfig& config, const PairSlots& slots);
  /// Whether attention over drafts splits the keys of a pair among thread blocks.
  static bool splits_keys(const KvCacheConfig& config);

  std::byte* q = nullptr;           // [layer, row, query_head, dim], rotated
  std::byte* plain_keys = nullptr;  // [layer, sequence, token, kv_head, dim], before RoPE; or null
  RowSoftmax* softmax = nullptr;    // [layer, row, query_head]; null if nothing is observed
  std::int32_t *row_sequences = nullptr, *row_slots = nullptr, *row_positions = nullptr;  // [row]
  std::int32_t* first_rows = nullptr;                 // [sequence + 1]
  std::uint32_t *now = nullptr, *appended = nullptr;  // [sequence]
  kvlab_observation* seen = nullptr;                  // [slot of one layer]
  float* weights = nullptr;                           // [age of a query]; null: all weights are 1
  std::uint64_t* ranks = nullptr;                     ///< see compact_rows()
  std::byte *attention_workspace = nullptr, *observe_workspace = nullptr,
            *compact_workspace = nullptr;
};

/// Throws std::invalid_argument unless all sequences evict in a way that drafts support.
void want_one_way_to_evict(const KvCacheConfig& config);

class KvCache {
 public:
  /// Throws std::invalid_argument if nothing bounds the number of tokens of a cache, or if there
  /// are drafts and the sequences differ in modifiers or share slots. Throws std::runtime_error if
  /// the device's memory is too small.
  KvCache(KvCacheConfig config, cudaStream_t stream);
  KvCache(const KvCache&) = delete;
  /// Device memory in bytes. If `longest_append` is above 0, `work` includes the memory for an
  /// append with that many live and new tokens together.
  struct Bytes {
    std::uint64_t storage, work;
  };
  static Bytes bytes(const KvCacheConfig& config, std::uint32_t longest_append = 0);

  /// Enqueues all later work on `stream`.
  void enqueue_on(cudaStream_t stream) { stream_ = stream; }
  cudaStream_t stream() const { return stream_; }
  /// Drops all tokens. Settings stay, and buffers keep their addresses, so captured CUDA graphs
  /// stay valid. Synchronizes.
  void clear();
  /// Drops the tokens of one sequence, even in the middle of an append or a step, and applies the
  /// settings. Other sequences are not affected. Throws std::invalid_argument, and changes nothing,
  /// if a pair has too few slots for its new budget.
  void start(int sequence, const SequenceSettings& settings = {});
  /// Makes sequence `to` a copy of sequence `from`: tokens, states and settings. Throws
  /// std::invalid_argument unless both sequences were configured with the same budgets, tiers and
  /// modifiers.
  void copy_sequence(int from, int to);
  /// Allocates memory for appends with `slots` live and new tokens. The memory always has at least
  /// as many slots as the largest pair, because a compaction looks at every slot of the cache that
  /// it reads. Synchronizes if the memory has to grow.
  void reserve(std::uint32_t slots = 0);
  /// Reserves the memory that before_token() may need. Without this, an allocation in
  /// before_token() could fail for one sequence after another sequence has already changed.
  void reserve_for_steps();

  // Appends of many tokens to the caches of one sequence that already has `fed` tokens. Each layer
  // processes the append in parts. For each part, call write() and then attend(). attend() of the
  // last part adds the tokens to the layer's caches. Only one append may be active. A layer must be
  // complete before the next layer begins. With config().interleaves_appends, parts may come in any
  // order of layers, and steps of other sequences may run between them.

  /// Begins an append. `ends_prompt`: the append is the last of a prompt segment.
  void begin(int sequence, std::uint32_t fed, std::uint32_t tokens, bool ends_prompt);
  /// Returns where to write a part's q, k and v, and how to rotate them. Requires that fill_ropes()
  /// has filled the part's rows of the RoPE tables. The caller sets the other arguments.
  RopeWriteArgs write(std::uint32_t layer, const AppendChunk& part);
  void attend(std::uint32_t layer, const AppendChunk& part, const AttendedRows& to);
  /// Ends a prompt segment after `fed` tokens, if its last append did not have `ends_prompt`.
  void end_prompt(int sequence, std::uint32_t fed, LayerRange layers = {});

  // Steps of one token. The host only counts tokens; the launches are the same in every step, so a
  // CUDA graph can hold them. For each layer call write(), store_in_tiers(), the attention kernel
  // with the arguments from step(), and compute_features().

  /// Call before a step that feeds one token to a sequence that has `fed` tokens. `layers`: the
  /// layers of the step.
  void before_token(int sequence, std::uint32_t fed, LayerRange layers = {});
  RopeWriteArgs write(std::uint32_t layer, const StepRows& rows) const;
  /// Call after write(): stores the new tokens on their tiers. No-op without tiers.
  void store_in_tiers(std::uint32_t layer, const StepRows& rows) const;
  /// The arguments of the attention, without its workspace.
  EvictingAttentionArgs step(std::uint32_t layer, const StepRows& rows,
                             const AttendedRows& to) const;
  /// Computes the features of the new tokens. Only the kernel that updates the policy reads them.
  void compute_features(std::uint32_t layer, const StepRows& rows, const AttendedRows& to) const;

  // Drafts: several tokens of some sequences are verified together, in the slots after the live
  // tokens. Only with config().draft_tokens. For each layer call write_drafts() and then
  // attend_drafts(). Only start() and clear() may come between begin_drafts() and accept_drafts().

  /// Begins a verification. `fed` [sequence]: number of tokens that the sequence was fed. `tokens`
  /// [sequence]: number of tokens to verify, the last token of the text included; 0: the sequence
  /// takes no part. At least one sequence must take part. Fills the rows of the RoPE tables. Throws
  /// std::invalid_argument, and changes nothing, if the policy weighs queries and the parameters of
  /// the sequences differ.
  void begin_drafts(std::span<const std::uint32_t> fed, std::span<const std::uint32_t> tokens);
  /// The drafts' rows are in the order of sequences. The caller sets qkv.
  RopeWriteArgs write_drafts(std::uint32_t layer) const;
  void attend_drafts(std::uint32_t layer, const AttendedRows& to) const;
  /// Ends the verification: appends the first accepted[sequence] tokens of each sequence, and drops
  /// its other tokens. Skips sequences that start() has dropped.
  void accept_drafts(std::span<const std::uint32_t> accepted);

  // RoPE, queries and workspaces.

  /// Fills `rows` rows of each RoPE table for `user`: for `positions` or, if that is null, for the
  /// positions from `first` on. No-op if all keys are cached before RoPE.
  void fill_ropes(RopeRows user, const std::int32_t* positions, std::uint32_t first,
                  int rows) const;
  /// Sets the RoPE arguments to the rows that fill_ropes() has filled for `user`.
  void rotate(RopeRows user, std::uint32_t table, RopeWriteArgs& args) const;
  std::byte* q() const { return work_->q; }
  std::byte* plain_keys() const { return work_->plain_k; }
  const std::int32_t* iota() const { return work_->iota; }
  std::byte* workspace(int index) const;

  // Counts of a sequence that was fed `fed` tokens.

  /// Bytes of keys and values. live_bytes() adds up the peak bytes of each KV head, and
  /// held_bytes() adds up the current bytes.
  std::uint64_t live_bytes(int sequence, std::uint32_t fed) const;
  std::uint64_t held_bytes(int sequence, std::uint32_t fed, bool after_append) const;
  /// Live tokens of a KV head.
  std::uint32_t live(int sequence, std::uint32_t layer, std::uint32_t head,
                     std::uint32_t fed) const;
  /// Live positions, ascending. Synchronizes.
  std::vector<std::uint32_t> kept_positions(int sequence, std::uint32_t layer,
                                            std::uint32_t head) const;
  /// Maximum number of tokens that a verification can append before a KV head evicts a token;
  /// kUnlimited: no limit.
  std::uint32_t until_eviction(int sequence, std::uint32_t fed) const;
  /// Number of tokens, over all layers and KV heads, that were evicted before the last append or
  /// step added its tokens. `before`: number of tokens that the sequence had been fed by then.
  std::uint64_t evictions(int sequence, std::uint32_t before) const;
  /// For benchmarks: behaves as if `tokens` tokens had been fed to every sequence. The contents of
  /// their keys and values are undefined; states and features are zero. Synchronizes.
  void pretend(std::uint32_t tokens);

  /// Bytes allocated for the keys and values of all sequences, free slots included.
  std::uint64_t allocated_bytes() const;

  /// Whether caches have tier plans.
  bool is_quantized() const { return !tier_counts_.empty(); }
  const KvCacheConfig& config() const { return config_; }
  const PairSlots& slots() const { return slots_; }
  const SlotStorage& storage() const { return *storage_; }
  /// The append memory after this layer's append. It is valid until another layer uses it.
  const AppendMemory& append_memory(std::uint32_t layer) const {
    return *memories_[config_.interleaves_appends ? layer : 0];
  }

 private:
  /// Token counts of a pair that has modifiers, shared slots or a tier plan.
  struct Counts : LiveTokenCount {
    std::uint64_t max_bytes = 0;  ///< peak bytes on tiers
    std::uint32_t fed = 0;        ///< number of tokens that were appended
  };
  /// The position of the first new token and the number of new tokens, which a compaction reads
  /// from device memory.
  struct Appended {
    std::uint32_t now, tokens;
  };
  struct Work {
    Work(cuda::Arena& arena, const KvCacheConfig& config, const PairSlots& slots);
    std::byte* q;        // [row, query_head, dim]
    float* inv_freq;     // [table, dim / 2]
    float2* rope;        // [table, row of append, step or drafts, dim / 2]
    std::byte* plain_k;  // [row, kv_head, dim], before RoPE, for features if keys are normed;
                         // otherwise null
    std::int32_t *iota, *zeros;    // [row]
    Appended *nothing, *appended;  // Both hold the position of the first new token. `nothing` has a
                                   // count of 0 tokens, `appended` the number of new tokens
    Appended* ended;               // the position after a prompt, with a count of 0 tokens
    std::byte* workspaces;
  };
  /// The append in progress.
  struct Append {
    int sequence = 0;
    std::uint32_t fed = 0, tokens = 0;
    bool ends_prompt = false;
    bool uses_cache_positions = false;  ///< keys are rotated to cache positions when they are read
    std::uint32_t tail = kNoTail;
  };

  /// The verification in progress.
  struct Drafts {
    std::vector<std::uint32_t> fed, tokens;                        // [sequence]
    std::vector<bool> dropped = std::vector<bool>(tokens.size());  // [sequence]: by start()
    bool has(std::size_t sequence) const { return tokens[sequence] > 0 && !dropped[sequence]; }
    bool any() const {
      for (std::size_t s = 0; s < tokens.size(); ++s)
        if (has(s)) return true;
      return false;
    }
    int rows() const {
      return static_cast<int>(std::accumulate(tokens.begin(), tokens.end(), std::uint32_t{0}));
    }
  };

  std::size_t halves() const { return static_cast<std::size_t>(config_.head_size) / 2; }
  const float* inv_freq(std::uint32_t table) const { return work_->inv_freq + table * halves(); }
  AttendedRows attach_keys(AttendedRows rows) const;
  template <class T>
  void copy_to_device(T* to, const T* from, std::size_t count) const {
    cuda::check(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyHostToDevice, stream_),
                "a cache's numbers");
  }
  template <class T>
  void clear(T* part, std::size_t count) const {
    cuda::check(cudaMemsetAsync(part, 0, count * sizeof(T), stream_), "a cache's work");
  }

  /// Calls each(pair) for all KV heads of a sequence in a layer.
  template <class Each>
  void each_pair(int sequence, Each each) const {
    const std::size_t heads = static_cast<std::size_t>(config_.kv_heads),
                      first = static_cast<std::size_t>(sequence) * heads;
    for (std::size_t head = 0; head < heads; ++head) each(first + head);
  }
  std::uint32_t end_of(LayerRange layers) const {
    return std::min(layers.end, static_cast<std::uint32_t>(config_.layers.size()));
  }
  /// Calls each(layer, pair) for all KV heads of a sequence.
  template <class Each>
  void each_head(int sequence, LayerRange layers, Each each) const {
    for (std::uint32_t layer = layers.first; layer < end_of(layers); ++layer)
      each_pair(sequence, [&](std::size_t pair) { each(layer, pair); });
  }
  template <class Each>
  void each_head(int sequence, Each each) const {
    each_head(sequence, {}, each);
  }
  kvlab_cache_view cache_of(std::uint32_t layer, const StepRows& rows) const {
    kvlab_cache_view cache = storage_->cache_of(layer, rows.first);
    cache.sequences = rows.count;
    return cache;
  }
  const QuantizedCache& quantized_cache_of(std::uint32_t layer, const StepRows& rows) const {
    return quantized_[layer * config_.sequences.size() + static_cast<std::size_t>(rows.first)];
  }

  const SlotSequence& settings(int sequence) const {
    return sequences_[static_cast<std::size_t>(sequence)];
  }
  /// Whether counts_ and tier_counts_ are kept up to date for this sequence. If not, the number of
  /// live tokens is computed from the number of tokens that it was fed.
  bool counts(int sequence) const {
    return settings(sequence).modifiers != Modifiers{} || settings(sequence).share ||
           is_quantized();
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
  void drop(std::size_t first, std::size_t count);
  float2* rope_rows(RopeRows user, std::uint32_t table) const;
  /// Number of tokens that a pair evicts before its next append or step.
  std::uint32_t surplus(std::uint32_t layer, std::size_t pair, bool after_prompt) const;
  std::uint32_t older(int sequence, std::uint32_t layer, std::size_t pair, std::uint32_t fed) const;
  void evict_to_budget(int sequence, std::uint32_t fed, bool after_prompt, LayerRange layers);
  void count_append(int sequence, std::uint32_t layer, std::uint32_t tokens);
  void count_evictions(int sequence, std::uint32_t layer, bool after_prompt);
  void count_evictions_of(std::uint32_t layer, std::size_t pair, bool after_prompt);
  std::vector<std::int32_t> share_slots(const AppendMemory& memory, int sequence,
                                        std::uint32_t layer, std::uint32_t fed);
  void share_slots_of_live(int sequence, std::uint32_t fed);
  /// The append memory that compactions in place use.
  const AppendMemory& compaction_memory() const { return *memories_.back(); }
  /// The arguments of a compaction from append memory to a sequence's slots in a layer.
  kvlab_compact_args to_slots(const AppendMemory& memory, int sequence, std::uint32_t layer,
                              const Appended* appended, bool stays) const;
  /// Compacts a sequence's tokens in a layer: from the slots to the append memory, from the append
  /// memory to the slots, or within the slots. The slots may have tiers.
  void compact(const AppendMemory& memory, kvlab_compact_args args, int sequence,
               std::uint32_t layer, bool after_prompt) const;
  /// compact() for tokens that are not quantized. `ranks`: memory for
  /// KvCacheConfig::gathered_ranks() ranks.
  void compact_rows(const kvlab_compact_args& args, std::uint64_t* ranks) const;
  /// Copies the live tokens of a layer to the append memory, and evicts to the budget unless
  /// `stays` is set. Only a sequence with modifiers or shared slots may set `stays`. `fed`: number
  /// of tokens that the sequence was fed.
  void take_live(const AppendMemory& memory, int sequence, std::uint32_t layer, std::uint32_t fed,
                 bool stays) const;
  void compact_in_place(int sequence, std::uint32_t layer, std::uint32_t fed,
                        bool after_prompt) const;
  void copy_nothing(std::uint32_t fed) const;
  static std::uint64_t append_bytes(const KvCacheConfig& config, std::uint32_t slots,
                                    std::uint32_t max_slots);
  void number(const kvlab_cache_view& cache) const;
  void append_to_tiers(std::uint32_t layer, std::size_t pair, std::uint32_t tokens);
  std::uint64_t bytes_on_tiers(std::uint32_t layer, std::size_t pair) const;
  void count_bytes(std::uint32_t layer, std::size_t pair);
  /// Sets how the modifiers change ranks in a compaction.
  void modify(kvlab_compact_args& args, int sequence, bool after_prompt) const;

  // For the append in progress.
  void begin_layer(std::uint32_t layer);
  void observe(std::uint32_t layer, const kvlab_prefill_args& queries);
  void keep(std::uint32_t layer);
  void centre(std::uint32_t layer, std::uint32_t first, std::uint32_t tokens);
  void find_centre(std::uint32_t layer);
  float* centres_of(std::uint32_t layer) const;
  /// Whether a sequence's keys are centred in a layer. They are not centred in a layer whose tokens
  /// are all in 16 bit.
  bool centres_keys(std::uint32_t layer, int sequence) const;
  void keep_by_shares(std::uint32_t layer, kvlab_compact_args args);
  void keep_plain_keys(std::uint32_t layer, const AppendChunk& part, const AttendedRows& to);
  void make_features_of_new(std::uint32_t layer);
  void rotate_keys_to_cache_positions(std::uint32_t layer, const CachePositionArgs& shape,
                                      bool rotates_older);
  CachePositionArgs cache_position_args(std::uint32_t layer, const AppendChunk& part) const;
  const void* attended_keys(const AppendMemory& memory) const {
    return append_.uses_cache_positions ? memory.cache_position_keys : memory.cache.keys;
  }
  std::uint32_t appended_slots() const;
  void copy_weights();

  // For the drafts in progress.
  void want_same_params(std::span<const std::uint32_t> tokens) const;
  const SlotSequence& first_with_drafts() const;
  void evict_before_drafts();
  void append_drafts(std::span<const std::uint32_t> accepted);
  void write_appended(std::span<const std::uint32_t> tokens, bool only_appends) const;
  std::byte* draft_queries(std::uint32_t layer) const;
  std::byte* plain_keys_of_drafts(std::uint32_t layer) const;
  kvlab_prefill_args draft_attention(std::uint32_t layer) const;
  void keep_plain_keys_of_drafts(std::uint32_t layer, const AttendedRows& keys) const;
  kvlab_observation* observe_drafts(std::uint32_t layer, std::uint32_t tail) const;
  void make_features_of_drafts(std::uint32_t layer) const;
  void compact_drafts(std::uint32_t layer, kvlab_observation* seen) const;

  KvCacheConfig config_;
  cudaStream_t stream_;
  PairSlots slots_;
  cuda::Placed<SlotStorage> storage_;
  cuda::Placed<Work> work_;
  std::uint32_t append_slots_ = 0;  ///< slots of memories_, for live and new tokens
  cuda::Placed<AppendScratch> scratch_;
  /// One append memory that all layers use in turn. With interleaves_appends: one for each layer,
  /// and one more for compactions.
  std::vector<cuda::Placed<AppendMemory>> memories_;
  Append append_;
  cuda::Placed<DraftMemory> draft_memory_;
  Drafts drafts_;
  std::vector<bool> stepped_;  // [sequence]: whether its last token was appended by a step
  std::vector<SlotSequence> sequences_;  // [sequence]: the current settings
  std::vector<Counts> counts_;           // [layer, pair]
  std::vector<TierCounts> tier_counts_;  // [layer, pair]; empty if no pair is quantized
  // [layer, sequence]: the quantized caches of this sequence and all later ones; empty if no pair
  // is quantized
  std::vector<QuantizedCache> quantized_;
  std::vector<std::uint32_t> shared_when_;  // [sequence]: number of tokens that the sequence had
                                            // been fed when slots were last shared
};

}  // namespace kvlab::kernels
