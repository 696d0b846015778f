#include "engine/draft/drafting_decoder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

namespace kvlab {
namespace {

// Number of steps at the start that draft nothing, so that their time is measured.
constexpr std::uint32_t kFullSteps = 4;
// Number of verifications of fans (see fan()) that are measured before a tree is planned.
constexpr std::uint32_t kProbes = 64;

class RandomChance final : public Chance {
 public:
  explicit RandomChance(Sampler& sampler) : sampler_(sampler) {}

  bool happens(double probability) override { return sampler_.uniform() < probability; }
  std::int32_t sample(std::span<const double> probabilities) override {
    const double target = sampler_.uniform();
    double sum = 0;
    std::size_t last = 0;  // the last id with a probability above 0
    for (std::size_t id = 0; id < probabilities.size(); ++id) {
      if (!(probabilities[id] > 0)) continue;
      sum += probabilities[id];
      last = id;
      if (target < sum) break;
    }
    return static_cast<std::int32_t>(last);
  }

 private:
  Sampler& sampler_;
};

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// The children of each node, in the order in which they are sampled.
std::vector<std::vector<std::uint32_t>> children_of(const TreeShape& shape) {
  std::vector<std::vector<std::uint32_t>> children(shape.nodes());
  for (std::uint32_t node = 1; node < shape.nodes(); ++node)
    children[shape.parents[node]].push_back(node);
  return children;
}

void add_to(std::vector<DraftStats::Count>& counts, std::size_t index, bool accepted) {
  counts.resize(std::max(counts.size(), index + 1));
  ++counts[index].tested;
  counts[index].accepted += accepted;
}

}  // namespace

double DraftStats::tokens_per_verification() const {
  if (verifications == 0) return 0;
  return 1 + static_cast<double>(accepted) / static_cast<double>(verifications);
}

double DraftStats::acceptance() const {
  Count all;
  for (const Count& count : by_depth) all.tested += count.tested, all.accepted += count.accepted;
  return all.share();
}

double DraftStats::speedup() const {
  if (full_step == 0 || drafting_seconds == 0) return 0;
  const auto tokens = static_cast<double>(accepted + verifications);
  return full_step * tokens / drafting_seconds;
}

double DraftingDecoder::Times::median() const {
  if (seconds_.empty()) return 0;
  std::vector<double> sorted = seconds_;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::ranges::nth_element(sorted, middle);
  return *middle;
}

DraftingDecoder::DraftingDecoder(const Model& model, const ResolvedConfig& drafter,
                                 DraftOptions options, unsigned threads)
    : target_(model, {}, threads),
      drafter_(model, drafter, threads),
      vocab_(model.config().vocab),
      options_(std::move(options)) {
  const std::size_t nodes = std::max<std::size_t>(options_.shape.nodes(), options_.planned_nodes);
  if (nodes > kMaxTreeNodes || nodes > vocab_)
    throw std::invalid_argument(
        fmt::format("draft: a tree of {} nodes is too large; it should have at most {}", nodes,
                    std::min(kMaxTreeNodes, vocab_)));
}

std::span<const float> DraftingDecoder::feed(std::span<const std::int32_t> ids, SegmentKind kind,
                                             std::vector<float>* all_logits) {
  if (all_logits) throw std::logic_error("a drafting decoder returns only the last logits");
  const auto logits = target_.feed_with(drafter_, ids, kind);
  logits_.assign(logits.begin(), logits.end());
  return logits_;
}

void DraftingDecoder::extend(Sampler& sampler, std::uint32_t count,
                             const std::function<bool(std::int32_t)>& on_id) {
  if (tokens() == 0)
    throw std::invalid_argument("decoder: there is nothing to extend; feed a prompt first");
  if (count == 0) return;
  RandomChance chance(sampler);
  std::int32_t last = sampler.pick(logits_);
  bool goes_on = on_id(last);
  for (std::uint32_t sampled = 1; goes_on && sampled < count;) {
    const TreeShape shape = next_shape(count - sampled - 1);
    const Stopwatch watch;
    const DraftTree tree = draft(last, shape, sampler, chance);
    const std::vector<std::int32_t> ids = verify(tree, shape, sampler, chance);
    std::size_t used = 0;
    while (goes_on && used < ids.size()) goes_on = on_id(ids[used++]);
    // The last sampled token is not fed.
    const auto fed = std::span(path_).first(used);
    target_.accept(rows_, fed);
    drafter_.accept(rows_, fed);
    last = ids[used - 1];
    logits_.assign(verified_row(fed.back()).begin(), verified_row(fed.back()).end());
    sampled += static_cast<std::uint32_t>(used);
    if (shape.nodes() > 1)
      counts_.drafting_seconds += watch.seconds();
    else
      full_steps_.add(watch.seconds());
  }
}

/// The shape of the next tree. The first kFullSteps trees have no draft tokens, so that the time of
/// a step without drafts is measured.
TreeShape DraftingDecoder::next_shape(std::uint32_t max_depth) {
  if (full_steps_.size() < kFullSteps) return {};
  if (options_.planned_nodes == 0) return options_.shape.cut(max_depth);
  if (probes_ == kProbes) plan();
  if (probes_ >= kProbes) return options_.shape.cut(max_depth);
  // Cycles through fans of N, N / 2, N / 4, … nodes, where N is planned_nodes.
  std::vector<TreeShape> fans;
  for (std::uint32_t nodes = options_.planned_nodes; nodes > 1; nodes /= 2)
    fans.push_back(fan(nodes - 1));
  return fans[probes_++ % fans.size()].cut(max_depth);
}

void DraftingDecoder::plan() {
  ++probes_;
  const DraftStats measured = stats();
  std::vector<double> acceptance;
  // Smooths the measured shares, because few tests alone give no reliable share: for the i-th
  // child, adds one test with 2^-i acceptances.
  double prior = 1;
  for (const DraftStats::Count& count : measured.by_child) {
    prior /= 2;
    acceptance.push_back((static_cast<double>(count.accepted) + prior) /
                         static_cast<double>(count.tested + 1));
  }
  options_.shape = fastest_tree(
      acceptance, {.draft_step = measured.draft_step, .verification = measured.verification});
}

/// Drafts a tree of this shape after the token `last`.
DraftTree DraftingDecoder::draft(std::int32_t last, const TreeShape& shape, Sampler& sampler,
                                 Chance& chance) {
  const auto children = children_of(shape);
  const auto depths = shape.depths();
  DraftTree tree{.nodes = std::vector<DraftTree::Node>(shape.nodes())};
  tree.nodes.front().id = last;
  DraftRows rows;
  std::vector<std::uint32_t> row_of(shape.nodes());  // index in `rows` of a node with children
  for (std::uint32_t level = 0; level < depths.back(); ++level) {
    std::vector<std::uint32_t> nodes, parents;
    std::vector<std::int32_t> ids;
    for (std::uint32_t node = 0; node < shape.nodes(); ++node) {
      if (depths[node] != level || children[node].empty()) continue;
      row_of[node] = static_cast<std::uint32_t>(rows.paths.size() + nodes.size());
      nodes.push_back(node);
      parents.push_back(row_of[shape.parents[node]]);
      ids.push_back(tree.nodes[node].id);
    }
    const Stopwatch watch;
    const auto logits = drafter_.draft(rows, ids, parents);
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      DraftTree::Node& node = tree.nodes[nodes[i]];
      const auto row = logits.subspan(i * vocab_, vocab_);
      node.children = children[nodes[i]];
      node.q = sampler.probabilities(row);
      const auto own = sample_children(node.q, row, node.children.size(), chance);
      for (std::size_t c = 0; c < own.size(); ++c) tree.nodes[node.children[c]].id = own[c];
    }
    draft_steps_.add(watch.seconds());
  }
  return tree;
}

/// Verifies the tree in one pass. Returns the accepted draft tokens and the token that follows
/// them.
std::vector<std::int32_t> DraftingDecoder::verify(const DraftTree& tree, const TreeShape& shape,
                                                  const Sampler& sampler, Chance& chance) {
  const Stopwatch watch;
  std::vector<std::int32_t> ids;
  for (const DraftTree::Node& node : tree.nodes) ids.push_back(node.id);
  rows_ = {};
  verified_logits_ = target_.draft(rows_, ids, shape.parents);
  const Verified verified = verify_drafts(
      tree, [&](std::uint32_t node) { return sampler.probabilities(verified_row(node)); }, chance);
  path_ = verified.path;
  if (shape.nodes() > 1) {
    verifications_[static_cast<std::uint32_t>(shape.nodes())].add(watch.seconds());
    count(tree, path_);
  }
  std::vector<std::int32_t> text;
  for (std::size_t i = 1; i < path_.size(); ++i) text.push_back(ids[path_[i]]);
  text.push_back(verified.next);
  return text;
}

void DraftingDecoder::count(const DraftTree& tree, std::span<const std::uint32_t> path) {
  ++counts_.verifications;
  counts_.accepted += path.size() - 1;
  for (std::size_t depth = 0; depth < path.size(); ++depth) {
    const auto& children = tree.nodes[path[depth]].children;
    if (children.empty()) continue;
    const bool accepted = depth + 1 < path.size();
    add_to(counts_.by_depth, depth, accepted);
    for (std::size_t child = 0; child < children.size(); ++child)
      add_to(counts_.by_child, child, accepted && children[child] == path[depth + 1]);
  }
}

DraftStats DraftingDecoder::stats() const {
  DraftStats stats = counts_;
  stats.draft_step = draft_steps_.median();
  stats.full_step = full_steps_.median();
  for (const auto& [nodes, times] : verifications_)
    stats.verification.emplace_back(nodes, times.median());
  stats.shape = options_.shape;
  return stats;
}

}  // namespace kvlab
