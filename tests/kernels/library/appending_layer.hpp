// One layer that appends several tokens at a time through kvlab.h: drafts, or chunks of a prompt.
// It may have only some of the model's KV heads, as with tensor parallelism. A token's data depends
// only on its sequence, position and head.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/kernels/paged_layer.hpp"

namespace kvlab {

/// The data of a pair's live tokens, slot by slot, by the name of the array.
using LiveTokens = std::map<std::string, std::vector<std::byte>>;
/// The first index at which `a` and `b` differ; -1 if they are equal.
int first_difference(std::span<const std::byte> a, std::span<const std::byte> b);
/// CHECKs that both are equal, and reports the first difference of each array.
void check_equal(const LiveTokens& expected, const LiveTokens& found);

/// The KV heads that a layer has, starting with `first`, of a model with `all` KV heads. If `all`
/// is 0, the layer has all of them.
struct OwnHeads {
  int first = 0, all = 0;
};

class AppendingLayer {
 public:
  using Counts = std::vector<int>;  ///< [sequence]

  /// `free_slots`: the number of slots of each sequence in addition to its budget. `size.prompts`
  /// has one element for each sequence.
  AppendingLayer(const LayerSize& size, const Paging& paging, int free_slots, OwnHeads heads = {});

  /// Sets the input of the next calls: `tokens` tokens of each sequence. Only the first `right` of
  /// them are the sequence's next tokens. The others represent draft tokens that will be rejected.
  void put(const Counts& tokens, const Counts& right);
  /// Writes the tokens and attends. observe() then applies the observations and features of the
  /// `right` tokens only.
  void attend(cudaStream_t stream = nullptr);
  void observe(cudaStream_t stream = nullptr);
  /// Arguments of the compaction that ends an append. The append has all tokens since the last
  /// append. The compaction is in place if `to` is this layer.
  kvlab_compact_args end_args(const AppendingLayer& to) const;
  /// Updates the host's state after a captured graph has ended the append.
  void ended(AppendingLayer& to);

  /// From now on, tokens at positions below `tokens` are the same in all sequences.
  void begin_alike(int tokens) { alike_ = static_cast<std::uint32_t>(tokens); }
  /// Gives the tokens of the first sequence to the other sequences. These share its full pages of
  /// `page` slots, and kvlab_copy_prefix copies the tokens after the last full page.
  cudaError_t share_prefix(int page);

  /// Runs a whole append, in place.
  void append(const Counts& tokens, const Counts& right);
  /// Decodes one token of each sequence by kvlab_evicting_attention. evict_to_budget() then evicts
  /// as an append requires.
  void decode();
  void evict_to_budget();

  LiveTokens live(int pair) const;
  /// The outputs of the `right` tokens and of the decoded tokens.
  const std::vector<std::byte>& outputs() const { return outputs_; }
  const kvlab_policy* policy() const { return policy_; }
  int pairs() const { return sequences() * size_.kv_heads; }
  int sequences() const { return static_cast<int>(size_.prompts.size()); }

 private:
  std::size_t element() const { return size_.type == KVLAB_F32 ? 4 : 2; }
  int heads() const { return (size_.group + 2) * size_.kv_heads; }
  std::size_t head_bytes() const { return static_cast<std::size_t>(size_.head_size) * element(); }
  std::size_t query_bytes() const {
    return static_cast<std::size_t>(size_.group * size_.kv_heads) * head_bytes();
  }
  std::vector<std::byte> sample(int sequence, std::uint32_t position, bool right) const;
  void put_features(const std::vector<std::int32_t>& new_slots);
  void make_features(cudaStream_t stream);
  kvlab_policy_state state() const;
  kvlab_prefill_args prefill() const;
  void keep_outputs();

  LayerSize size_;
  OwnHeads own_heads_;
  const kvlab_policy* policy_;
  std::vector<kvlab_feature> computed_;  ///< empty if one of the policy's features is not computed
  std::size_t feature_count_ = 0;
  int max_tokens_;
  std::vector<std::uint32_t> position_;  ///< [sequence]: position of the append's first token
  int begun_ = 0;  ///< number of tokens of the append that are already written
  std::uint32_t alike_ = 0;
  Counts tokens_, right_, total_;
  PagedCache cache_;
  template <class T>
  using Array = DeviceArray<T>;
  Array<std::byte> states_, params_, qkv_, q_, out_, output_;
  Array<float> features_, unit_keys_, weights_;
  Array<kvlab_row_softmax> rows_;
  Array<kvlab_observation> seen_;
  Array<kvlab_rule> rules_;
  Array<std::uint32_t> now_, positions_, appended_, ended_, threshold16_, ids_;
  Array<std::uint64_t> seeds_;
  Array<std::int32_t> sequences_, slots_, first_query_, new_slots_;  // the last: [pair]
  std::unique_ptr<Array<std::byte>> parts_, observe_workspace_, compact_workspace_, workspace_;
  std::uint32_t tail_ = 0;
  std::vector<std::byte> outputs_;
};

}  // namespace kvlab
