#include "engine/draft/acceptance.hpp"

#include <algorithm>
#include <numeric>

namespace kvlab {
namespace {

/// Divides by the sum. Returns false, and changes nothing, if the sum is 0.
bool normalize(std::vector<double>& p) {
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  if (!(sum > 0)) return false;
  for (double& x : p) x /= sum;
  return true;
}

/// Makes `q` the distribution from which the child `id` was sampled. If `q` has no mass left,
/// sample_children() did not choose the child at random, so the child gets probability 1.
void certain_if_exhausted(std::vector<double>& q, std::size_t id, bool has_mass) {
  if (!has_mass) q[id] = 1;
}

}  // namespace

std::vector<std::int32_t> sample_children(std::vector<double> q, std::span<const float> logits,
                                          std::size_t count, Chance& chance) {
  std::vector<std::int32_t> children;
  const auto is_child = [&](std::size_t id) {
    return std::ranges::count(children, static_cast<std::int32_t>(id)) > 0;
  };
  const auto most_likely = [&] {
    std::size_t best = logits.size();
    for (std::size_t id = 0; id < logits.size(); ++id)
      if (!is_child(id) && (best == logits.size() || logits[id] > logits[best])) best = id;
    return static_cast<std::int32_t>(best);
  };
  count = std::min(count, q.size());
  bool has_mass = normalize(q);
  while (children.size() < count) {
    const std::int32_t id = has_mass ? chance.sample(q) : most_likely();
    children.push_back(id);
    if (!has_mass) continue;
    q[static_cast<std::size_t>(id)] = 0;
    has_mass = normalize(q);
  }
  return children;
}

NextToken next_token(std::vector<double> p, std::vector<double> q,
                     std::span<const std::int32_t> children, Chance& chance) {
  bool has_mass = normalize(q);
  for (std::size_t child = 0; child < children.size(); ++child) {
    const auto id = static_cast<std::size_t>(children[child]);
    certain_if_exhausted(q, id, has_mass);
    if (p[id] > 0 && chance.happens(std::min(1.0, p[id] / q[id])))
      return {children[child], static_cast<std::int32_t>(child)};
    std::vector<double> rest(p.size());
    for (std::size_t i = 0; i < p.size(); ++i) rest[i] = std::max(0.0, p[i] - q[i]);
    // If p equals q, `rest` is 0 everywhere. Then only rounding can have rejected the child, and p
    // stays as it is.
    if (normalize(rest)) p = std::move(rest);
    q[id] = 0;
    has_mass = has_mass && normalize(q);
  }
  return {chance.sample(p), -1};
}

Verified verify_drafts(const DraftTree& tree,
                       const std::function<std::vector<double>(std::uint32_t node)>& p,
                       Chance& chance) {
  Verified verified{.path = {0}, .next = -1};
  for (;;) {
    const DraftTree::Node& node = tree.nodes[verified.path.back()];
    std::vector<std::int32_t> ids;
    for (const std::uint32_t child : node.children) ids.push_back(tree.nodes[child].id);
    const NextToken next = next_token(p(verified.path.back()), node.q, ids, chance);
    verified.next = next.id;
    if (next.child < 0) return verified;
    verified.path.push_back(node.children[static_cast<std::size_t>(next.child)]);
  }
}

}  // namespace kvlab
