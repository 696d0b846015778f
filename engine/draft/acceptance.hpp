// Speculative sampling: decides which draft tokens are accepted, so that the resulting text has
// exactly the target's distribution (Leviathan et al. 2023; for trees, sampling without replacement
// as in Sequoia, Chen et al. 2024). Greedy decoding is the special case in which every distribution
// gives probability 1 to one token.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace kvlab {

/// Makes random decisions. A test overrides this class to enumerate all outcomes.
class Chance {
 public:
  virtual ~Chance() = default;
  /// Whether an event of this probability happens.
  virtual bool happens(double probability) = 0;
  /// Samples an id with these probabilities, which sum to 1.
  virtual std::int32_t sample(std::span<const double> probabilities) = 0;
};

/// A tree of draft tokens. Node 0 is the last token of the text, which is not a draft.
struct DraftTree {
  struct Node {
    std::int32_t id;
    std::vector<std::uint32_t> children;  ///< in the order in which they were sampled
    std::vector<double> q;                ///< the drafter's probabilities [vocab] of the next token
  };
  std::vector<Node> nodes;
};

/// Samples `count` different children of a node one after another: each from `q` [vocab] without
/// the children sampled before it. If no other id has a probability above 0 (with a greedy drafter
/// or top-k), the child is the id with the largest logit among those that are not yet children.
std::vector<std::int32_t> sample_children(std::vector<double> q, std::span<const float> logits,
                                          std::size_t count, Chance& chance);

/// The token that follows a node.
struct NextToken {
  std::int32_t id;
  std::int32_t child;  ///< index among the children; -1: no child was accepted
};
/// Decides which child of a node is accepted, in the order of `children`. If none is accepted,
/// samples the token from what the rejections leave of `p`. `p`: the target's probabilities; `q`:
/// those from which sample_children() sampled the children.
NextToken next_token(std::vector<double> p, std::vector<double> q,
                     std::span<const std::int32_t> children, Chance& chance);

struct Verified {
  std::vector<std::uint32_t> path;  ///< node 0, and then the accepted nodes
  std::int32_t next;                ///< the token that follows the last node of `path`
};
/// Follows the tree from node 0 as long as children are accepted. `p` returns the target's
/// probabilities of the token that follows a node.
Verified verify_drafts(const DraftTree& tree,
                       const std::function<std::vector<double>(std::uint32_t node)>& p,
                       Chance& chance);

}  // namespace kvlab
