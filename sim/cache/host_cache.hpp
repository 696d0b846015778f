// The cache of one KV head of one layer on the host: keys and values of the live tokens, and
// attention over them. The plain replay, the end-to-end evaluation, the CPU decoder and the Python
// package all use it, so their results are bit-identical.
//
// A token's row is its slot in the LiveSet. Its key is stored after RoPE. The states of a row are:
//
//   append ──► 16 bit ──► demoted by the tier plan ──► evicted, and the row is used again
//               (a token of an append of several tokens stays in 16 bit until the append ends)
//
// With centred keys, the centre is computed from keys of the append at position 0. So the keys of
// this append are stored without centring until it has ended. Then the centre is subtracted from
// them, and from each later key when it is stored. So all keys of a softmax have the same centre,
// or none. A centre from a file is known before the first key, so it is subtracted from every key
// when the key is stored.
//
// How a row's probabilities are computed: `multiply_fused` computes the logits. They are gathered
// in the order of the tokens' age (oldest first) and scaled. Their exponentials are divided by the
// sum of the exponentials. Then the values are added in the order of age.
//
// A step takes the next tokens of the text into the cache: one decoded token, a prompt, or a chunk
// of a prompt. A step has four parts. HostCache::step() runs them in this order, and every other
// caller keeps to it:
//
//   begin_step  1. Evict to the budget. At most budget - 1 tokens stay live, so the budget has a
//                  slot for a decoded token. The order of eviction is by protection, then by rank,
//                  then by position. Protected tokens are the first ones of the text (sinks) and
//                  the youngest ones (recent). They are evicted only when no other token is left.
//               2. Append the tokens. All tokens of a step are appended at once, even if they
//                  exceed the budget, so none of them is evicted before its own query attends.
//   attend      3. The query of each new token attends to the live tokens up to itself.
//   end_step    4. Observe. The policy learns how much attention each live token got in part 3.
//
// Eviction comes first, not last, because the eviction order depends on the position that is
// appended next: this position decides which tokens are recent, and a policy may use it to rank
// tokens. A caller may evict earlier, between two steps, for example right after a prompt to
// release memory. The result is the same, because a cache evicts only once for each position that
// is appended.
//
// With scope=layer and ada(), the caches of a layer evict together: the first cache that evicts
// computes the order or the budgets from the states of all caches. So all caches have to end a step
// before one of them begins the next.
//
// A draft token may turn out not to belong to the text, so it is not appended. It is stored in a
// spare row behind the rows of the live tokens, and the next step drops it:
//
//   rows   [ 0 … slot_count - 1: live tokens and free rows ][ draft nodes 0, 1, 2, … ]
//
// Draft tokens cause no eviction, observation or quantization. So the cache depends on the text
// alone, and it need not be copied before drafts.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "policies/aged_set.hpp"
#include "policies/features/features.hpp"
#include "policies/tally.hpp"
#include "traces/base/numeric/dtype.hpp"
#include "traces/base/numeric/panels.hpp"
#include "traces/base/numeric/rope.hpp"

namespace kvlab {

/// The parameters that all heads of a layer have in common.
struct HeadShape {
  std::uint32_t head_size, group;  ///< `group`: query heads that share a KV head
  Positions positions = Positions::original;
  float softmax_scale = 1.0f;
  std::uint32_t threshold16 = 0;  ///< request threshold, times 2^16
  std::uint32_t window = 0;       ///< number of tokens that a query sees, including itself; 0: all
  float softcap = 0;              ///< soft cap of scores; 0: none
  std::vector<float> sinks = {};  // [query head]: sink logits; empty: none
  /// After RoPE at original positions, keys and queries are rounded to this type.
  std::optional<Dtype> rounding = {};
};

/// Queries, keys and values of one KV head in an append, before RoPE, and where its outputs go.
/// Rows of tokens are `*_stride` floats apart.
struct HeadAppend {
  std::uint32_t first, tokens;
  const float* q;                 // [token, group, dim]
  std::size_t query_head_stride;  // floats between the queries of one token's heads
  std::size_t query_stride;       // floats between tokens, in q and in out
  const float *k, *v;             // [token, dim]
  std::size_t key_stride;
  float* out = nullptr;  // [token, group, dim]; null: outputs are not computed
  // [token, group]: log-sum-exp of the scores (natural logarithm). Must be null if probabilities
  // are shared.
  float* lse = nullptr;
  std::size_t lse_stride = 0;
};

/// Draft tokens form a tree of nodes, which are numbered in the order in which they attend. A path
/// is a node's ancestors, the oldest first, and then the node itself.
using DraftPath = std::vector<std::uint32_t>;

/// Attention rows of the full cache. Several caches share them: at original positions, a cache gets
/// its probabilities from such a row by leaving out the exponentials of tokens that are not live.
class FullRows {
 public:
  virtual ~FullRows() = default;
  /// Writes a query head's probabilities of the tokens `live` (ascending positions) to p.
  virtual void probabilities(std::uint32_t query, std::uint32_t head,
                             std::span<const std::uint32_t> live, float* p) = 0;
};

/// Rotates x [size] to a position by RoPE. If there is a type `rounding`, rounds the result to it,
/// because a model of that type also rounds there.
void rotate_rounded(const RopeTable& rope, const float* x, std::size_t size, std::uint32_t position,
                    std::optional<Dtype> rounding, float* y);
/// Whether a row has gone through the Hadamard rotation. In every format, quantized rows are stored
/// after the rotation, so that a query is rotated only once for all formats.
enum class RowState : std::uint8_t { plain, rotated };

/// Says whether a row is the key or the value of a token. Rotation::llama treats them differently.
enum class RowPart : std::uint8_t { key, value };

/// Replaces a plain row by its quantized and dequantized values. Throws std::invalid_argument for
/// elements or a row size that the format cannot hold.
void quantize_row(std::span<float> row, const RowFormat& format, RowPart part);
/// Quantizes a key and a value to the formats of a demotion_path(), one format after another. Both
/// are in the given state before the call, and rotated after it.
void quantize_token(std::span<const KvFormat> path, std::span<float> key, std::span<float> value,
                    RowState state);
/// Quantizes keys after RoPE as in KIVI: by channel, in groups of kQuantBlock tokens. Each group
/// has an fp16 minimum and an fp16 scale, which is never 0.
void quantize_by_channel(std::span<float> keys, std::size_t dim, int bits);

/// Number of queries that are multiplied by the keys together, so that the keys are read once for
/// all of them.
inline constexpr std::uint32_t kQueryBlock = 32;

class HostCache {
 public:
  /// `live` must be empty. `output`: the weights from which some features are computed.
  /// `feature_values`: the values of features that are supplied, not computed, for the prompt's
  /// tokens.
  HostCache(const HeadShape& shape, LiveSet live, OutputWeights output = {},
            FeaturesByName feature_values = {});

  /// Copies the state of `other` between two steps, without draft tokens. The copy shares its ranks
  /// with no other head until share_ranks() is called for it.
  HostCache(const HostCache& other);
  HostCache& operator=(const HostCache&) = delete;

  /// A whole step on this thread. `rope` must cover the append's last position.
  void step(const HeadAppend& append, const RopeTable& rope);

  // The parts of a step, for a caller that attends in its own way: with several threads, with
  // probabilities that several caches share, or for some of the queries at a time.

  /// Parts 1 and 2. Drops the draft tokens.
  void begin_step(const HeadAppend& append, const RopeTable& rope);

  /// Called with a query, a query head, and the probabilities that this head gives the oldest
  /// p.size() live tokens.
  using RowVisitor =
      std::function<void(std::uint32_t query, std::uint32_t head, std::span<const float> p)>;
  /// Options of attend().
  struct Attention {
    /// Supplies the probabilities as long as all tokens are in 16 bit at original positions. If
    /// null, the cache computes probabilities from its stored keys.
    FullRows* shared = nullptr;
    /// Caches with the same live tokens as this one, and the same keys and values in 16 bit.
    /// attend() also adds the observations to the tokens of these followers, so attend() need not
    /// be called for the followers.
    std::span<HostCache* const> followers = {};
    RowVisitor visit = {};  ///< may be empty
  };
  /// Part 3 for tokens [begin, end) of the append. Several threads may attend at once. It need not
  /// be called for queries for which neither outputs nor observations are needed.
  void attend(const HeadAppend& append, std::uint32_t begin, std::uint32_t end,
              const RopeTable& rope, const Attention& how);
  void attend(const HeadAppend& append, std::uint32_t begin, std::uint32_t end,
              const RopeTable& rope) {
    attend(append, begin, end, rope, Attention{});
  }
  /// Part 4.
  void end_step();
  /// Part 1 of the step that will append position `now`, for a caller that evicts before that step.
  /// Evicts nothing if the cache has already evicted for `now`.
  void evict_to_budget(std::uint32_t now);

  /// The positions that were evicted for the last step, ascending; or for the next step, if the
  /// cache has already evicted for it.
  std::span<const std::uint32_t> victims() const { return victims_; }
  /// What each live token received in the last step, by age; empty if the policy needs nothing.
  std::span<const Observation> observations() const { return seen_.observations(); }

  /// Evicts to the budget. Then stores draft tokens as the next nodes and computes their attention.
  /// Token i sees the live tokens and the nodes of `paths[i]`, whose last node is token i itself.
  /// `tokens.first` is the position that follows the text, which is the position of the first node
  /// of every path. If no tier is quantized, the outputs are bit-identical to those that one would
  /// get by appending the tokens of the path without further evictions.
  void attend_draft(const HeadAppend& tokens, std::span<const DraftPath> paths,
                    const RopeTable& rope);
  void drop_drafts() { drafts_ = 0; }

  /// Multiplies the values of the oldest p.size() live tokens by p and adds the products to out
  /// [dim].
  void accumulate(std::span<const float> p, float* out) const {
    accumulate(p, live_.slots().first(p.size()), out);
  }
  /// Whether the oldest `count` live tokens are in 16 bit.
  bool all_exact(std::size_t count) const;

  /// Drops all tokens of the text except the first `tokens`, see LiveSet::crop().
  void crop(std::uint32_t tokens) {
    live_.crop(tokens);
    evicted_for_.reset();
  }
  /// Ends a prompt segment.
  void end_prompt() {
    live_.end_prompt();
    evicted_for_.reset();
  }
  /// The live tokens as an AgedSet, which share_ranks() needs.
  AgedSet& aged_set() { return live_; }

  const LiveSet& live() const { return live_; }
  /// Number of rows in use. After a prompt it is the number of tokens that the budget allows.
  /// Before the end of the prompt it is at most twice the number of live tokens, or a small
  /// constant if that is larger.
  std::uint32_t row_count() const { return live_.slot_count(); }
  /// Bytes of the keys and values of the live tokens. A quantized row has the size of its format.
  /// Any other row has 4 bytes for each element. Includes the centre, in float32.
  std::uint64_t live_bytes() const {
    std::uint64_t bytes = centre_.size() * sizeof(float);
    if (!rotates_)
      return bytes + std::uint64_t{live_.size()} * 2 * shape_.head_size * sizeof(float);
    for (const std::uint32_t row : live_.slots())
      bytes += (is_quantized(row) ? live_.tier_plan()[tiers_[row]].format : KvFormat{})
                   .block_bytes_of(sizeof(float)) *
               shape_.head_size / kQuantBlock;
    return bytes;
  }
  /// Bytes of memory that keys and values use, including spare rows. Keys are stored in panels of
  /// sixteen rows.
  std::size_t bytes() const {
    return keys_.bytes() + (values_.capacity() + plain_keys_.capacity()) * sizeof(float);
  }

 private:
  /// The positions of some queries: `positions` are original positions, `cache_positions` are cache
  /// positions.
  struct QueryPositions {
    std::vector<std::uint32_t> positions, cache_positions;  // [token]
  };
  /// The products of queries with the keys of all rows, [query, head, row]. The queries are rotated
  /// by RoPE to their original positions (at_position), to their cache positions
  /// (at_cache_position), or to their original positions and then by the Hadamard rotation
  /// (hadamard_rotated). An array is empty if no key needs it.
  struct Products {
    std::vector<float> at_position, at_cache_position, hadamard_rotated;
    std::size_t stride = 0;
  };
  /// The rows of the tokens that a query sees, the oldest first. The first of them has the age
  /// `first_age`.
  struct SeenRows {
    std::span<const std::uint32_t> rows;
    std::uint32_t first_age = 0;
  };
  class Received;

  /// Part 2.
  void append(const HeadAppend& append, const RopeTable& rope);
  std::uint32_t visible(const HeadAppend& append, std::uint32_t token) const {
    return live_.size() - append.tokens + token + 1;
  }
  /// The age of the oldest live token that a query at `position` sees.
  std::uint32_t first_visible(std::uint32_t position) const;
  bool has_spare_rows() const;
  void compact();
  void grow_to(std::size_t rows);
  void store(const HeadAppend& append, std::span<const std::uint32_t> rows,
             std::span<const std::uint32_t> positions, const RopeTable& rope);
  void rotate_to_cache_positions(const RopeTable& rope, std::uint32_t next);
  /// Quantizes the rows of the live tokens of ages [first, last) to the formats of their tiers.
  void demote(std::uint32_t first, std::uint32_t last);
  void quantize_as_kivi(std::uint32_t before);
  void find_centre(const HeadAppend& append, const RopeTable& rope);
  void centre_live_keys();
  void subtract_centre(std::span<float> key) const;
  bool is_quantized(std::uint32_t row) const {
    return tiers_[row] >= 0 && !live_.tier_plan()[tiers_[row]].format.exact();
  }
  std::vector<float> rotate_queries(const HeadAppend& append, std::uint32_t begin,
                                    std::span<const std::uint32_t> to, const RopeTable& rope) const;
  Products multiply(const HeadAppend& append, std::uint32_t begin, const QueryPositions& at,
                    std::size_t rows, const RopeTable& rope) const;
  void gather_scores(const Products& products, std::size_t query, const SeenRows& seen,
                     std::span<float> scores) const;
  void find_probabilities(const Products& products, std::size_t query, const SeenRows& seen,
                          std::span<float> p, float* lse) const;
  void accumulate(std::span<const float> p, std::span<const std::uint32_t> rows, float* out) const;
  void write_output(const HeadAppend& append, std::uint32_t token, std::uint32_t head,
                    std::span<const float> p, std::span<const std::uint32_t> rows) const;

  HeadShape shape_;
  LiveSet live_;
  bool rotates_ = false;  // whether quantized rows are stored after the Hadamard rotation
  FeatureMaker features_;
  FeaturesByName feature_values_;
  std::vector<std::uint32_t> victims_;
  std::optional<std::uint32_t> evicted_for_;  // the position for which it has already evicted
  // A token's row is its slot.
  Panels keys_;                // [row, dim], rotated
  std::vector<float> values_;  // [row, dim]
  // [row, dim], before RoPE; only with cache positions
  std::vector<float> plain_keys_;
  // [row]: the position to which the key is rotated; only with cache positions
  std::vector<std::uint32_t> rotated_to_;
  // [row]: the tier whose format the row has; -1: not quantized; only if rotates_
  std::vector<int> tiers_;
  // How many of the oldest tokens have a key, or a value, that KIVI has quantized.
  std::uint32_t kivi_keys_ = 0, kivi_values_ = 0;
  std::vector<float> centre_;  // [dim], of keys after RoPE; empty: there is none
  bool centred_ = false;       // whether the centre was subtracted from the stored keys
  std::uint32_t old_ = 0;      // how many of the oldest live tokens are rotated to cache positions
  std::uint32_t drafts_ = 0;   // number of draft tokens

  std::mutex seen_mutex_;
  Tally seen_;
};

}  // namespace kvlab
