#include "engine/draft/tree_shape.hpp"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <vector>

#include "tests/catch.hpp"

using namespace kvlab;

namespace {

/// Calls `each` with every tree of up to `nodes` nodes.
template <class Each>
void every_tree(std::uint32_t nodes, const Each& each, TreeShape tree = {}) {
  each(tree);
  if (tree.nodes() == nodes) return;
  // Nodes are added in the order of their depth, so that no tree occurs twice.
  for (std::uint32_t parent = tree.parents.back(); parent < tree.nodes(); ++parent) {
    TreeShape larger = tree;
    larger.parents.push_back(parent);
    every_tree(nodes, each, larger);
  }
}

}  // namespace

TEST_CASE("The tree of the dynamic program is the best of all trees of up to ten nodes") {
  const std::vector<double> acceptance = GENERATE(
      std::vector<double>{0.8, 0.1, 0.05}, std::vector<double>{0.4, 0.25, 0.15, 0.1, 0.05},
      std::vector<double>{0.1, 0.6}, std::vector<double>{0.5}, std::vector<double>{0.3, 0.0, 0.3});
  constexpr std::uint32_t kNodes = 10;
  std::map<std::pair<std::uint32_t, std::uint32_t>, double> best;  // [nodes, depth]
  std::size_t trees = 0;
  every_tree(kNodes, [&](const TreeShape& tree) {
    trees += tree.nodes() == kNodes;
    std::vector<std::size_t> children(tree.nodes());
    for (std::size_t node = 1; node < tree.nodes(); ++node) ++children[tree.parents[node]];
    if (std::ranges::max(children) > acceptance.size()) return;
    const double expected = expected_tokens(tree, acceptance);
    for (std::uint32_t depth = tree.depth(); depth < kNodes; ++depth) {
      double& own = best[{static_cast<std::uint32_t>(tree.nodes()), depth}];
      own = std::max(own, expected);
    }
  });
  CHECK(trees == 4862);  // the ninth Catalan number
  for (std::uint32_t nodes = 1; nodes <= kNodes; ++nodes)
    for (std::uint32_t depth = 0; depth < kNodes; ++depth) {
      CAPTURE(nodes, depth);
      const auto found = best.find({nodes, depth});
      if (found == best.end()) {
        CHECK_THROWS_AS(best_tree(acceptance, nodes, depth), std::invalid_argument);
        continue;
      }
      const TreeShape tree = best_tree(acceptance, nodes, depth);
      CHECK(tree.nodes() == nodes);
      CHECK(tree.depth() <= depth);
      CHECK(std::ranges::is_sorted(tree.parents));
      CHECK(expected_tokens(tree, acceptance) == Approx(found->second).epsilon(1e-12));
    }
}

TEST_CASE("Expected tokens are the sum over nodes of the products along their paths") {
  CHECK(expected_tokens(chain(3), std::vector<double>{0.5}) == Approx(1 + 0.5 + 0.25 + 0.125));
  CHECK(expected_tokens(fan(3), std::vector<double>{0.5, 0.25}) == Approx(1 + 0.5 + 0.25));
  CHECK(expected_tokens({{0, 0, 0, 2}}, std::vector<double>{0.5, 0.25}) ==
        Approx(1 + 0.5 + 0.25 + 0.25 * 0.5));
}

TEST_CASE("A tree is cut below a depth") {
  const TreeShape tree{{0, 0, 0, 1, 3}};
  CHECK(tree.depth() == 3);
  CHECK(tree.cut(1) == fan(2));
  CHECK(tree.cut(0) == TreeShape{});
  CHECK(tree.cut(9) == tree);
}

TEST_CASE("The fastest tree weighs measured times against expected tokens") {
  const std::vector<double> acceptance{0.8, 0.1};
  // Drafts take no time, and all verifications take the same time. The fastest tree is then the
  // best one of the largest measured size.
  CHECK(fastest_tree(acceptance, {.draft_step = 0, .verification = {{4, 1.0}, {8, 1.0}}}) ==
        best_tree(acceptance, 8, 7));
  // A draft step takes as long as a verification of one node, so no tree is faster than decoding.
  CHECK(fastest_tree(acceptance, {.draft_step = 1, .verification = {{1, 1.0}, {2, 1.0}}}) ==
        TreeShape{});
  // The slower the drafts, the flatter is the fastest tree.
  CHECK(fastest_tree(acceptance, {.draft_step = 1, .verification = {{3, 4.0}}}).depth() == 2);
  CHECK(fastest_tree(acceptance, {.draft_step = 9, .verification = {{3, 4.0}}}).depth() == 1);
  CHECK_THROWS_AS(fastest_tree(acceptance, {}), std::invalid_argument);
}
