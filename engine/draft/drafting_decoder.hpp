// Self-speculation on the CPU: the model drafts tokens with a policy's cache, and verifies them in
// one pass over the full cache. The text has the distribution that the full cache alone gives it;
// greedy text is equal token for token.
//
//   drafter: evict to the budget ─► draft a tree of tokens, one level per pass
//   target:  one pass over all nodes, each of which attends to the text and its ancestors
//   both:    append the accepted tokens with the target's queries, keys and values, and observe
//
// The drafter evicts to the budget before it drafts. While it drafts, it evicts no further tokens
// and observes nothing. When tokens are accepted, it observes what a replay of the text observes,
// so its kept tokens depend only on the text.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "engine/decoder.hpp"
#include "engine/draft/acceptance.hpp"
#include "engine/draft/tree_shape.hpp"

namespace kvlab {

/// Which trees are drafted.
struct DraftOptions {
  TreeShape shape = chain(4);
  /// If not 0: first drafts fans (see fan()) of up to this many nodes to measure acceptance and
  /// times. Then drafts the tree that is fastest by these measurements, and ignores `shape`.
  std::uint32_t planned_nodes = 0;
};

struct DraftStats {
  /// The draft tokens that verifications tested, and how many of them were accepted.
  struct Count {
    std::uint64_t tested = 0, accepted = 0;
    double share() const {
      return tested ? static_cast<double>(accepted) / static_cast<double>(tested) : 0;
    }
  };

  std::uint64_t verifications = 0;  ///< verifications of at least one draft token
  std::uint64_t accepted = 0;       ///< accepted draft tokens
  /// [depth]: how often the accepted path reached a node with children at this depth, and how often
  /// one of these children was accepted.
  std::vector<Count> by_depth;
  /// [i]: how often a node on the accepted path had an i-th child, and how often this child was
  /// accepted.
  std::vector<Count> by_child;
  double draft_step = 0;  ///< median seconds of one level in the drafter; 0: not measured
  double full_step = 0;   ///< median seconds of a step without drafts; 0: not measured
  /// Median seconds of a verification, by its number of nodes.
  std::vector<std::pair<std::uint32_t, double>> verification;
  double drafting_seconds = 0;  ///< time of all drafts and verifications together
  TreeShape shape;              ///< shape of the last tree

  double tokens_per_verification() const;
  /// Among the nodes on accepted paths that have children: the share with an accepted child. For
  /// chains, this is the share of tested draft tokens that were accepted.
  double acceptance() const;
  /// The time of a step without drafts, divided by the time per token with drafts. 0: not measured.
  double speedup() const;
};

class DraftingDecoder final : public SequenceDecoder {
 public:
  /// `model` must outlive the decoder. `drafter`: the drafter's cache. Throws std::invalid_argument
  /// if the decoder does not support this cache, or if a tree has more nodes than kMaxTreeNodes or
  /// more children than the vocabulary has ids.
  DraftingDecoder(const Model& model, const ResolvedConfig& drafter, DraftOptions options,
                  unsigned threads);

  /// Feeds tokens. Does not support `all_logits`, which must be null.
  std::span<const float> feed(std::span<const std::int32_t> ids, SegmentKind kind,
                              std::vector<float>* all_logits = nullptr) override;
  void extend(Sampler& sampler, std::uint32_t count,
              const std::function<bool(std::int32_t id)>& on_id) override;

  std::uint32_t tokens() const override { return target_.tokens(); }
  /// Peak bytes of the full cache plus those of the drafter's cache.
  std::uint64_t kv_bytes_peak() const override {
    return target_.kv_bytes_peak() + drafter_.kv_bytes_peak();
  }
  /// Evictions of the drafter's cache; the full cache evicts nothing.
  std::uint64_t evictions() const override { return drafter_.evictions(); }
  std::vector<std::vector<std::uint32_t>> kept() const override { return drafter_.kept(); }
  const Decoder& drafter() const { return drafter_; }
  DraftStats stats() const;

 private:
  /// The seconds of several runs of the same work.
  class Times {
   public:
    void add(double seconds) { seconds_.push_back(seconds); }
    std::size_t size() const { return seconds_.size(); }
    double median() const;

   private:
    std::vector<double> seconds_;
  };

  std::span<const float> verified_row(std::uint32_t node) const {
    return verified_logits_.subspan(std::size_t{node} * vocab_, vocab_);
  }
  TreeShape next_shape(std::uint32_t max_depth);
  void plan();
  DraftTree draft(std::int32_t last, const TreeShape& shape, Sampler& sampler, Chance& chance);
  std::vector<std::int32_t> verify(const DraftTree& tree, const TreeShape& shape,
                                   const Sampler& sampler, Chance& chance);
  void count(const DraftTree& tree, std::span<const std::uint32_t> path);

  Decoder target_, drafter_;
  std::uint32_t vocab_;
  DraftOptions options_;
  std::vector<float> logits_;  // [vocab]: those of the last fed token
  // Results of the latest verification.
  std::span<const float> verified_logits_;  // [node, vocab], in target_
  DraftRows rows_;
  std::vector<std::uint32_t> path_;  // node 0, and then the accepted nodes

  DraftStats counts_;
  std::uint32_t probes_ = 0;
  Times draft_steps_, full_steps_;
  std::map<std::uint32_t, Times> verifications_;  // [nodes]
};

}  // namespace kvlab
