#include "engine/draft/acceptance.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <vector>

#include "engine/draft/tree_shape.hpp"
#include "tests/catch.hpp"

using namespace kvlab;

namespace {

constexpr std::size_t kVocab = 8;

/// Goes through every possible sequence of decisions, one sequence in each run. A run repeats some
/// first decisions of the previous run, takes the next possible decision after them, and from then
/// on always the first possible one. weight() is the probability of the run's decisions.
class EveryChance final : public Chance {
 public:
  bool happens(double probability) override { return decide({1 - probability, probability}) == 1; }
  std::int32_t sample(std::span<const double> probabilities) override {
    return static_cast<std::int32_t>(decide({probabilities.begin(), probabilities.end()}));
  }

  double weight() const {
    double weight = 1;
    for (const Decision& decision : decisions_) weight *= decision.probabilities[decision.taken];
    return weight;
  }
  /// Goes on to the next run. Returns false after the last.
  bool next() {
    at_ = 0;
    while (!decisions_.empty()) {
      Decision& last = decisions_.back();
      last.taken = possible(last.probabilities, last.taken + 1);
      if (last.taken < last.probabilities.size()) return true;
      decisions_.pop_back();
    }
    return false;
  }

 private:
  struct Decision {
    std::vector<double> probabilities;
    std::size_t taken;
  };
  static std::size_t possible(const std::vector<double>& p, std::size_t from) {
    while (from < p.size() && !(p[from] > 0)) ++from;
    return from;
  }
  std::size_t decide(std::vector<double> probabilities) {
    if (at_ == decisions_.size()) {
      const std::size_t first = possible(probabilities, 0);
      decisions_.push_back({std::move(probabilities), first});
    }
    return decisions_[at_++].taken;
  }

  std::vector<Decision> decisions_;
  std::size_t at_ = 0;
};

using Text = std::vector<std::int32_t>;

/// A distribution over the vocabulary that depends on the text before it and on `model`. Some
/// tokens are impossible.
std::vector<double> distribution(const Text& text, std::uint32_t model) {
  std::uint32_t x = 1664525u * (model + 1);
  for (const std::int32_t id : text)
    x = x * 1664525u + 1013904223u + static_cast<std::uint32_t>(id);
  std::vector<double> p(kVocab);
  double sum = 0;
  for (double& each : p) {
    x = x * 1664525u + 1013904223u;
    each = x >> 29 == 0 ? 0 : std::exp(3.0 * static_cast<double>(x >> 8) / (1 << 24));
    sum += each;
  }
  for (double& each : p) each /= sum;
  return p;
}

/// Keeps only the most likely token.
std::vector<double> greedy(std::vector<double> p) {
  const auto best = std::ranges::max_element(p);
  const std::size_t id = static_cast<std::size_t>(best - p.begin());
  p.assign(p.size(), 0);
  p[id] = 1;
  return p;
}

using Predictor = std::function<std::vector<double>(const Text&)>;

/// Drafts a tree with `drafter` and verifies it with `target`, for every possible sequence of
/// decisions. Returns the probability of each resulting text. Texts are cut to two tokens, or
/// continued by the target to two tokens.
std::map<Text, double> texts(const TreeShape& shape, const Predictor& drafter,
                             const Predictor& target) {
  std::map<Text, double> probabilities;
  EveryChance chance;
  do {
    DraftTree tree{.nodes = std::vector<DraftTree::Node>(shape.nodes())};
    std::vector<Text> before(shape.nodes());  // the drafts up to a node
    for (std::uint32_t node = 1; node < shape.nodes(); ++node)
      tree.nodes[shape.parents[node]].children.push_back(node);
    for (std::uint32_t node = 0; node < shape.nodes(); ++node) {
      DraftTree::Node& own = tree.nodes[node];
      if (node > 0) {
        before[node] = before[shape.parents[node]];
        before[node].push_back(own.id);
      }
      if (own.children.empty()) continue;
      own.q = drafter(before[node]);
      const std::vector<float> logits(own.q.begin(), own.q.end());
      const auto ids = sample_children(own.q, logits, own.children.size(), chance);
      for (std::size_t i = 0; i < ids.size(); ++i) tree.nodes[own.children[i]].id = ids[i];
    }
    const Verified verified = verify_drafts(
        tree, [&](std::uint32_t node) { return target(before[node]); }, chance);
    Text text = before[verified.path.back()];
    text.push_back(verified.next);
    if (text.size() < 2) text.push_back(chance.sample(target(text)));
    text.resize(2);
    probabilities[text] += chance.weight();
  } while (chance.next());
  return probabilities;
}

void check_lossless(const TreeShape& shape, const Predictor& drafter, const Predictor& target) {
  const auto found = texts(shape, drafter, target);
  double error = 0, sum = 0;
  for (std::int32_t a = 0; a < static_cast<std::int32_t>(kVocab); ++a)
    for (std::int32_t b = 0; b < static_cast<std::int32_t>(kVocab); ++b) {
      const double expected =
          target({})[static_cast<std::size_t>(a)] * target({a})[static_cast<std::size_t>(b)];
      const auto own = found.find({a, b});
      const double got = own == found.end() ? 0 : own->second;
      error = std::max(error, std::abs(got - expected));
      sum += got;
    }
  CHECK(error < 1e-12);
  CHECK(std::abs(sum - 1) < 1e-12);
}

}  // namespace

TEST_CASE("Over all random decisions, accepted text has exactly the target's probabilities") {
  const TreeShape shape = GENERATE(chain(1), chain(2), fan(2), fan(3), TreeShape{{0, 0, 0, 1}});
  const std::uint32_t seed = GENERATE(1u, 2u, 3u);
  CAPTURE(shape.parents, seed);
  const Predictor drafter = [&](const Text& text) { return distribution(text, 2 * seed); };
  const Predictor target = [&](const Text& text) { return distribution(text, 2 * seed + 1); };
  check_lossless(shape, drafter, target);
  check_lossless(shape, target, target);
}

TEST_CASE("A greedy drafter, whose children are not random, is lossless too") {
  const TreeShape shape = GENERATE(chain(2), fan(3), TreeShape{{0, 0, 0, 1, 2}});
  const Predictor drafter = [](const Text& text) { return greedy(distribution(text, 5)); };
  const Predictor target = [](const Text& text) { return distribution(text, 6); };
  check_lossless(shape, drafter, target);
  check_lossless(shape, drafter, [&](const Text& text) { return greedy(target(text)); });
}

TEST_CASE("A greedy target accepts exactly the children that equal its own token") {
  EveryChance chance;
  const std::vector<double> p{0, 0, 1, 0}, q{0, 1, 0, 0};
  const std::vector<std::int32_t> with{1, 2, 3}, without{1, 3};
  const NextToken accepted = next_token(p, q, with, chance);
  CHECK(accepted.id == 2);
  CHECK(accepted.child == 1);
  const NextToken sampled = next_token(p, q, without, chance);
  CHECK(sampled.id == 2);
  CHECK(sampled.child == -1);
  CHECK_FALSE(chance.next());
}

TEST_CASE("Children differ, and follow the logits once the distribution has nothing left") {
  EveryChance chance;
  const std::vector<float> logits{0.0f, 3.0f, 1.0f, 2.0f};
  CHECK(sample_children({0, 1, 0, 0}, logits, 3, chance) == std::vector<std::int32_t>{1, 3, 2});
  CHECK(sample_children({0, 1, 0, 0}, logits, 9, chance) == std::vector<std::int32_t>{1, 3, 2, 0});
  CHECK(sample_children({0, 1, 0, 0}, logits, 0, chance).empty());
}
