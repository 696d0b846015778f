// The shape of a tree of draft tokens, and Sequoia's dynamic program, which finds the best shape
// (Chen et al. 2024, "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding").
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace kvlab {

/// Nodes in the order of their depth. Node 0 is the last token of the text, and the others are
/// draft tokens. Siblings follow each other in the order in which they are sampled.
struct TreeShape {
  std::vector<std::uint32_t> parents = {0};  ///< [node], ascending; that of node 0 is ignored

  std::size_t nodes() const { return parents.size(); }
  /// The depth of each node; node 0 has depth 0.
  std::vector<std::uint32_t> depths() const;
  std::uint32_t depth() const { return depths().back(); }
  /// The tree without the nodes that are deeper than `depth`.
  TreeShape cut(std::uint32_t depth) const;

  bool operator==(const TreeShape&) const = default;
};

/// `tokens` draft tokens in a row: node 0 has one child, which has one child, and so on.
TreeShape chain(std::uint32_t tokens);
/// Candidates for one position: node 0 has `children` children, which have no children themselves.
TreeShape fan(std::uint32_t children);

/// The expected number of tokens per verification, which is the expected number of accepted draft
/// tokens plus 1. `acceptance` [i]: the probability that the i-th child of a node is accepted.
/// Children beyond the end of `acceptance` are never accepted.
double expected_tokens(const TreeShape& tree, std::span<const double> acceptance);

/// The tree of exactly `nodes` nodes and at most `depth` levels of draft tokens with the largest
/// expected number of tokens per verification. A node has at most acceptance.size() children.
/// Throws std::invalid_argument if there is no such tree.
TreeShape best_tree(std::span<const double> acceptance, std::uint32_t nodes, std::uint32_t depth);

/// Limits of planned trees, so that planning takes less than a second.
inline constexpr std::uint32_t kMaxTreeNodes = 256, kMaxTreeDepth = 64, kMaxTreeChildren = 64;

/// Measured times, in seconds.
struct DraftTimes {
  double draft_step = 0;  ///< of one level of the tree in the drafter
  std::vector<std::pair<std::uint32_t, double>> verification;  ///< by number of nodes
};
/// The tree with the shortest time per token, over all depths up to kMaxTreeDepth and the numbers
/// of nodes for which a time was measured. A node has at most kMaxTreeChildren children. Throws
/// std::invalid_argument if no time was measured.
TreeShape fastest_tree(std::span<const double> acceptance, const DraftTimes& times);

}  // namespace kvlab
