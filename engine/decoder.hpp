// The token-by-token decoder on the CPU: one sequence, any policy at any budget, by the one rule.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/checkpoint/model.hpp"
#include "engine/sequence_decoder.hpp"
#include "policies/cache_config.hpp"

namespace kvlab {

/// The live tokens of one KV head, by age.
struct LiveTokens {
  std::span<const std::uint32_t> positions;
  std::span<const std::byte> states;     ///< [token, slot_bytes]: the policy's
  std::span<const float> features = {};  ///< [token, features of the policy]

  std::uint32_t size() const { return static_cast<std::uint32_t>(positions.size()); }
};

/// Watches a decoder. Calls come from the thread that feeds, in a fixed order: begin_append; for
/// each layer, evicted of every KV head, observed of every KV head, layer, residual; end_append.
/// Pointers live during the call.
class DecoderObserver {
 public:
  virtual ~DecoderObserver() = default;
  /// Before the layers of an append. `new_segment`: a prompt begins with it.
  virtual void begin_append(std::span<const std::int32_t> /*ids*/, std::uint32_t /*first*/,
                            SegmentKind /*kind*/, bool /*new_segment*/) {}
  /// One KV head evicted to the budget for the append. Called also where nothing was evicted;
  /// positions ascend.
  virtual void evicted(std::uint32_t /*layer*/, std::uint32_t /*kv_head*/, std::uint32_t /*now*/,
                       std::span<const std::uint32_t> /*victim_positions*/) {}
  /// One KV head observed: what each live token by age received (empty if the policy needs
  /// nothing).
  virtual void observed(std::uint32_t /*layer*/, std::uint32_t /*kv_head*/,
                        const LiveTokens& /*live*/, std::span<const Observation> /*seen*/) {}
  /// The tensors of a layer, before RoPE, and the attention outputs; see TraceWriter::layer.
  virtual void layer(std::uint32_t /*layer*/, std::span<const float> /*q*/,
                     std::span<const float> /*k*/, std::span<const float> /*v*/,
                     std::span<const float> /*out*/, std::span<const float> /*lse*/) {}
  /// The residual stream x [n, hidden] after the layer's attention output was added; not of models
  /// with a norm behind that, which an error before it does not reach as it is.
  virtual void residual(std::uint32_t /*layer*/, std::span<const float> /*x*/) {}
  virtual void end_append() {}  ///< after the last layer
};

class Decoder : public SequenceDecoder {
 public:
  /// `model` must outlive the decoder. Throws std::invalid_argument if the protected tokens do not
  /// fit a budget.
  Decoder(const Model& model, ResolvedConfig cache, unsigned threads);
  ~Decoder() override;

  void watch(DecoderObserver* observer);  ///< null: none

  /// Feeds tokens: a prompt is appended by its prefill, decoded tokens one by one (by `full`,
  /// which makes no difference between them, hundreds at once). Returns the logits [vocab] of the
  /// last one, valid until the next call. `all_logits`: where to put those of every token [n,
  /// vocab]. Throws std::invalid_argument for no tokens, std::out_of_range for an id outside the
  /// vocabulary.
  std::span<const float> feed(std::span<const std::int32_t> ids, SegmentKind kind,
                              std::vector<float>* all_logits = nullptr) override;
  void extend(Sampler& sampler, std::uint32_t count,
              const std::function<bool(std::int32_t id)>& on_id) override;

  /// Feeds decoders of one model without an observer, each as feed() would, bit for bit, with the
  /// weights read once for all. step(): ids [decoder], decoded ones. prompt(): the same for all;
  /// those decoders that are new and append it whole have it computed once. `logits`: where to put
  /// those of the last tokens [decoder, vocab], or null.
  static void step(std::span<Decoder* const> decoders, std::span<const std::int32_t> ids,
                   float* logits);
  static void prompt(std::span<Decoder* const> decoders, std::span<const std::int32_t> ids,
                     float* logits);

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
