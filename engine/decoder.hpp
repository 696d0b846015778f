// The CPU decoder: one sequence, fed token by token, under any policy and budget.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/checkpoint/model.hpp"
#include "engine/sequence_decoder.hpp"
#include "policies/cache_config.hpp"
#include "sim/cache/host_cache.hpp"

namespace kvlab {

/// The parameters that the caches of a layer's KV heads have in common.
HeadShape head_shape(const ModelConfig& model, std::uint32_t layer, const ResolvedConfig& cache);

/// The live tokens of one KV head, oldest first.
struct LiveTokens {
  std::span<const std::uint32_t> positions;
  std::span<const std::byte> states;     ///< [token, slot_bytes]: policy state
  std::span<const float> features = {};  ///< [token, feature of the policy]

  std::uint32_t size() const { return static_cast<std::uint32_t>(positions.size()); }
};

/// Watches a decoder. All functions are called from the thread that feeds it, in this order:
/// begin_append(); for each layer, evicted() of every KV head, observed() of every KV head,
/// layer(), residual(); end_append(). Spans are valid only during the call.
class DecoderObserver {
 public:
  virtual ~DecoderObserver() = default;
  /// Called before the layers of an append. `new_segment`: the append begins a new prompt.
  virtual void begin_append(std::span<const std::int32_t> /*ids*/, std::uint32_t /*first*/,
                            SegmentKind /*kind*/, bool /*new_segment*/) {}
  /// Called after a KV head has evicted to the budget, even if it evicted no token. Positions
  /// ascend.
  virtual void evicted(std::uint32_t /*layer*/, std::uint32_t /*kv_head*/, std::uint32_t /*now*/,
                       std::span<const std::uint32_t> /*victim_positions*/) {}
  /// Called after a KV head has observed an append. `seen`: the observation of each live token,
  /// oldest first; empty if the policy needs no observations.
  virtual void observed(std::uint32_t /*layer*/, std::uint32_t /*kv_head*/,
                        const LiveTokens& /*live*/, std::span<const Observation> /*seen*/) {}
  /// Called with a layer's queries, keys and values before RoPE, and its attention outputs. Shapes
  /// are those of TraceWriter::layer.
  virtual void layer(std::uint32_t /*layer*/, std::span<const float> /*q*/,
                     std::span<const float> /*k*/, std::span<const float> /*v*/,
                     std::span<const float> /*out*/, std::span<const float> /*lse*/) {}
  /// Called with the residual stream x [n, hidden] after the layer's attention output was added.
  /// Not called for models that normalize the attention output before they add it, because the norm
  /// changes an error of the output before the error reaches the residual stream.
  virtual void residual(std::uint32_t /*layer*/, std::span<const float> /*x*/) {}
  virtual void end_append() {}  ///< after the last layer
};

/// Draft tokens that follow the text of a decoder, and what its layers computed for them. The draft
/// tokens form a tree: each attends to the text, to its ancestors in the tree and to itself.
struct DraftRows {
  struct Layer {
    std::vector<float> q, k, v;  // [node, heads, dim], before RoPE
  };
  std::vector<DraftPath> paths;  // [node]
  std::vector<Layer> layers;
};

class Decoder : public SequenceDecoder {
 public:
  /// `model` must outlive the decoder. Throws std::invalid_argument if the protected tokens do not
  /// fit into a budget.
  Decoder(const Model& model, ResolvedConfig cache, unsigned threads);
  ~Decoder() override;

  void watch(DecoderObserver* observer);  ///< null: no observer

  /// Feeds tokens. A prompt is appended in the configuration's prefill mode, and decoded tokens are
  /// appended one by one. If the results do not depend on how tokens are appended (under policy
  /// `full` without quantization), dense prompts and decoded tokens are appended in chunks of
  /// hundreds of tokens, which limits the memory. Returns the logits [vocab] of the last token,
  /// valid until the next call. If `all_logits` is not null, also writes the logits of every token
  /// [n, vocab] there. Throws std::invalid_argument if there are no tokens, and std::out_of_range
  /// for an id outside the vocabulary.
  std::span<const float> feed(std::span<const std::int32_t> ids, SegmentKind kind,
                              std::vector<float>* all_logits = nullptr) override;
  void extend(Sampler& sampler, std::uint32_t count,
              const std::function<bool(std::int32_t id)>& on_id) override;

  /// Feeds several decoders of the same model together, and reads the weights only once. The
  /// decoders must have no observers. The results are equal, bit for bit, to those of feed() for
  /// each decoder.
  ///
  /// step() feeds each decoder one decoded token, `ids` [decoder]. prompt() feeds the same prompt
  /// to all of them. Decoders that are still empty and append the prompt as a whole share one
  /// computation. `logits`: where to write the logits of the last tokens [decoder, vocab]; may be
  /// null.
  static void step(std::span<Decoder* const> decoders, std::span<const std::int32_t> ids,
                   float* logits);
  static void prompt(std::span<Decoder* const> decoders, std::span<const std::int32_t> ids,
                     float* logits);

  // Drafts. A drafter and its target are two decoders of one model without observers, with the same
  // text. The target has the full cache, and computes all keys and values that the drafter keeps.

  /// Feeds tokens to this decoder (the target), and passes the queries, keys and values that it
  /// computes to `drafter`. The appends have the sizes that the drafter's configuration requests.
  /// Returns the logits of the last token.
  std::span<const float> feed_with(Decoder& drafter, std::span<const std::int32_t> ids,
                                   SegmentKind kind);
  /// Runs draft tokens through the layers, and adds them to `drafts`. An empty `drafts` begins a
  /// new tree, so the draft tokens that are still in the cache are dropped first. Otherwise
  /// `drafts` must be that of the last call. Token i becomes a child of node `parents[i]` of
  /// `drafts`; the parent of the first node of a tree is ignored. Evicts to the budget, but appends
  /// and observes nothing. Returns the logits [n, vocab], valid until the next call.
  std::span<const float> draft(DraftRows& drafts, std::span<const std::int32_t> ids,
                               std::span<const std::uint32_t> parents);
  /// Drops the draft tokens in the cache. Then appends the nodes `path` of `drafts` as decoded
  /// tokens, one by one. `path` leads from node 0 to some node. `drafts` was computed by this
  /// decoder or by its target. Does not change the logits that feed() returned.
  void accept(const DraftRows& drafts, std::span<const std::uint32_t> path);

  std::uint32_t tokens() const override;
  std::uint64_t kv_bytes_peak() const override;
  std::uint64_t evictions() const override;
  std::vector<std::vector<std::uint32_t>> kept() const override;
  const LiveSet& live(std::uint32_t layer, std::uint32_t kv_head) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvlab
