#include "engine/draft/tree_shape.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace kvlab {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

/// F(m, l, b) is the largest expected number of tokens per verification of a tree with m nodes, at
/// most l levels of draft tokens, and b children of the root:
///
///   F(1, l, 0) = 1
///   F(m, l, b) = max over y of F(m - y, l, b - 1) + p_b * best(y, l - 1), if l > 0
///
/// p_b is the probability that the b-th child is accepted, y is the number of nodes of the subtree
/// whose root is the last child, and best(y, l) is the maximum of F(y, l, b) over b.
class DynamicProgram {
 public:
  DynamicProgram(std::span<const double> acceptance, std::uint32_t nodes, std::uint32_t depth)
      : acceptance_(acceptance),
        depths_(depth + 1),
        widths_(acceptance.size() + 1),
        cells_((nodes + 1) * depths_ * widths_),
        best_((nodes + 1) * depths_) {
    for (std::size_t m = 1; m <= nodes; ++m)
      for (std::size_t l = 0; l < depths_; ++l) fill(m, l);
  }

  bool has(std::size_t nodes, std::size_t depth) const {
    return best(nodes, depth).expected > kNone;
  }

  /// The parents of the best tree, level by level.
  TreeShape tree(std::uint32_t nodes, std::uint32_t depth) const {
    struct Subtree {
      std::uint32_t parent;
      std::size_t nodes, depth;
    };
    TreeShape tree{.parents = {}};
    std::vector<Subtree> level{{0, nodes, depth}};
    while (!level.empty()) {
      std::vector<Subtree> below;
      for (const Subtree& each : level) {
        const auto node = static_cast<std::uint32_t>(tree.parents.size());
        tree.parents.push_back(each.parent);
        std::vector<std::size_t> sizes;  // nodes of each child's subtree, last child first
        std::size_t left = each.nodes;
        for (std::size_t b = best(left, each.depth).choice; b > 0; --b) {
          sizes.push_back(cell(left, each.depth, b).choice);
          left -= sizes.back();
        }
        for (auto size = sizes.rbegin(); size != sizes.rend(); ++size)
          below.push_back({node, *size, each.depth - 1});
      }
      level = std::move(below);
    }
    return tree;
  }

 private:
  struct Value {
    double expected = kNone;
    // The choice that gives `expected`: in cells_ the number of nodes y, in best_ the number of
    // children b.
    std::size_t choice = 0;

    void improve(double value, std::size_t by) {
      if (value > expected) expected = value, choice = by;
    }
  };

  const Value& cell(std::size_t m, std::size_t l, std::size_t b) const {
    return cells_[(m * depths_ + l) * widths_ + b];
  }
  const Value& best(std::size_t m, std::size_t l) const { return best_[m * depths_ + l]; }

  void fill(std::size_t m, std::size_t l) {
    for (std::size_t b = 0; b < widths_; ++b) {
      Value& own = cells_[(m * depths_ + l) * widths_ + b];
      if (b == 0 && m == 1) own.expected = 1;
      for (std::size_t y = 1; b > 0 && l > 0 && y < m; ++y)
        own.improve(cell(m - y, l, b - 1).expected + acceptance_[b - 1] * best(y, l - 1).expected,
                    y);
      best_[m * depths_ + l].improve(own.expected, b);
    }
  }

  std::span<const double> acceptance_;
  std::size_t depths_, widths_;
  std::vector<Value> cells_;  // [nodes, depth, children]
  std::vector<Value> best_;   // [nodes, depth]
};

}  // namespace

std::vector<std::uint32_t> TreeShape::depths() const {
  std::vector<std::uint32_t> depths(nodes());
  for (std::size_t node = 1; node < nodes(); ++node) depths[node] = depths[parents[node]] + 1;
  return depths;
}

TreeShape TreeShape::cut(std::uint32_t depth) const {
  const auto all = depths();
  const auto end = std::ranges::upper_bound(all, depth);
  return {.parents = {parents.begin(), parents.begin() + (end - all.begin())}};
}

TreeShape chain(std::uint32_t tokens) {
  TreeShape tree;
  for (std::uint32_t i = 0; i < tokens; ++i) tree.parents.push_back(i);
  return tree;
}

TreeShape fan(std::uint32_t children) {
  return {.parents = std::vector<std::uint32_t>(children + 1)};
}

double expected_tokens(const TreeShape& tree, std::span<const double> acceptance) {
  std::vector<double> reached(tree.nodes(), 1);
  std::vector<std::size_t> children(tree.nodes());
  double sum = 1;
  for (std::size_t node = 1; node < tree.nodes(); ++node) {
    const std::uint32_t parent = tree.parents[node];
    const std::size_t index = children[parent]++;
    reached[node] = index < acceptance.size() ? reached[parent] * acceptance[index] : 0;
    sum += reached[node];
  }
  return sum;
}

TreeShape best_tree(std::span<const double> acceptance, std::uint32_t nodes, std::uint32_t depth) {
  const DynamicProgram program(acceptance, nodes, depth);
  if (nodes == 0 || !program.has(nodes, depth))
    throw std::invalid_argument(
        fmt::format("draft tree: no tree has {} nodes, {} levels and {} children per node; ask for "
                    "fewer nodes",
                    nodes, depth, acceptance.size()));
  return program.tree(nodes, depth);
}

TreeShape fastest_tree(std::span<const double> acceptance, const DraftTimes& times) {
  if (times.verification.empty())
    throw std::invalid_argument(
        "draft tree: no time of a verification was measured; measure at least one");
  const auto largest = std::ranges::max_element(times.verification)->first;
  const std::uint32_t max_depth = std::min(largest, kMaxTreeDepth);
  acceptance = acceptance.first(std::min<std::size_t>(acceptance.size(), kMaxTreeChildren));
  const DynamicProgram program(acceptance, largest, max_depth);
  TreeShape fastest;
  double shortest = std::numeric_limits<double>::infinity();
  for (const auto& [nodes, seconds] : times.verification)
    for (std::uint32_t depth = 0; depth <= max_depth; ++depth) {
      if (nodes == 0 || !program.has(nodes, depth)) continue;
      const TreeShape tree = program.tree(nodes, depth);
      const double time = (depth * times.draft_step + seconds) / expected_tokens(tree, acceptance);
      if (time < shortest) shortest = time, fastest = tree;
    }
  return fastest;
}

}  // namespace kvlab
