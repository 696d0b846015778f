// One layer that appends some tokens at a time through kvlab.h: drafted ones, parts of a prompt,
// the KV heads of one rank. What a token is hangs on its sequence, position and head alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/kernels/paged_layer.hpp"

namespace kvlab {

/// A pair's live tokens, slot by slot, and what hangs on them, by names.
using LiveTokens = std::map<std::string, std::vector<std::byte>>;
/// The first index at which they differ; -1: nowhere.
int first_difference(std::span<const std::byte> a, std::span<const std::byte> b);
/// CHECKs that they are equal, and says where they are not.
void check_equal(const LiveTokens& expected, const LiveTokens& found);

/// Which KV heads a layer has, of a model with so many; 0: all of them.
struct OwnHeads {
  int first = 0, all = 0;
};

class AppendingLayer {
 public:
  using Counts = std::vector<int>;  ///< [sequence]

  /// Room for `free_slots` tokens of a sequence behind a budget's. `size.prompts`: one for each
  /// sequence.
  AppendingLayer(const LayerSize& size, const Paging& paging, int free_slots, OwnHeads heads = {});

  /// What the next calls work on: the next tokens of each sequence, of which those from `right` on
  /// are others, as wrong drafts are.
  void put(const Counts& tokens, const Counts& right);
  /// Writes and attends; then shows what the right ones give and bring, and no others.
  void attend(cudaStream_t stream = nullptr);
  void observe(cudaStream_t stream = nullptr);
  /// What ends an append, of all that was put since the last one; to another layer, or in place.
  kvlab_shrink_args end_args(const AppendingLayer& to) const;
  /// The same, where it was a captured graph that did it: what comes next comes behind it.
  void ended(AppendingLayer& to);

  /// From now on tokens at positions below this one are alike in all sequences.
  void begin_alike(int tokens) { alike_ = static_cast<std::uint32_t>(tokens); }
  /// The other sequences have what the first one has put: its blocks of `page` slots, and by
  /// kvlab_copy_prefix all else.
  cudaError_t share_prefix(int page);

  /// All of it, in place.
  void append(const Counts& tokens, const Counts& right);
  /// One token of each sequence, by kvlab_evicting_attention; then `evict_to_budget` as an append
  /// wants it.
  void decode();
  void evict_to_budget();

  LiveTokens live(int pair) const;
  /// Of the right tokens, and of decoded ones.
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
  OwnHeads of_;
  const kvlab_policy* policy_;
  std::vector<kvlab_column> computed_;  ///< none where one of the policy's features is not
  std::size_t feature_count_ = 0;
  int max_tokens_;
  std::vector<std::uint32_t> position_;  ///< [sequence]: of the append's first token
  int begun_ = 0;                        ///< tokens of it that are there
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
