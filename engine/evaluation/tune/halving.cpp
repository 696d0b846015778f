#include "engine/evaluation/tune/halving.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

namespace kvlab {
namespace {

constexpr double kMargin = 0.05;  // share of the leader's KL that counts as a small difference

using Rounds = std::vector<std::vector<std::size_t>>;

class Runner {
 public:
  Runner(const HalvingInput& field, const HalvingRunner& run)
      : field_(field), run_(run), rounds_(halving_texts(field.lengths.size())) {
    const auto all = static_cast<double>(
        std::accumulate(field.lengths.begin(), field.lengths.end(), std::uint64_t{0}));
    halving_.exhaustive = static_cast<std::uint64_t>(all) * (field.configurations + 1);
    limit_ = std::max(field.share * static_cast<double>(halving_.exhaustive), 3 * all);
    scores_.resize(field.configurations);
    left_.resize(field.configurations);
    std::iota(left_.begin(), left_.end(), std::size_t{0});
  }

  std::size_t first_round_size() const { return std::min(field_.configurations, affordable(0)); }

  Halving run() {
    for (std::size_t round = 0; round < rounds_.size(); ++round) {
      const std::size_t max_configurations = affordable(round);
      if (left_.size() > max_configurations) left_.resize(max_configurations), mark_dropped(round);
      add_texts(round);
      halving_.rounds.push_back({rounds_[round], rank_entries(round + 1 < rounds_.size())});
      left_.clear();
      for (const HalvingEntry& entry : halving_.rounds.back().entries)
        if (entry.status == HalvingStatus::stays) left_.push_back(entry.configuration);
      if (left_.size() == 1) halving_.end = HalvingEnd::ahead;
      if (left_.size() > 1 && round + 1 < rounds_.size() && stays_similar(round))
        halving_.end = HalvingEnd::alike;
      if (halving_.end != HalvingEnd::text) break;
    }
    halving_.first = left_;
    return std::move(halving_);
  }

 private:
  /// How many configurations may run in this round, if each later round has half as many as the
  /// round before it.
  std::size_t affordable(std::size_t round) const {
    double each = 0, full = 0, share = 1;
    for (std::size_t r = round; r < rounds_.size(); ++r, share /= 2) {
      each += share * length_of(r);
      full += length_of(r);
    }
    const double free_work = limit_ - static_cast<double>(halving_.work) - full;
    return std::max<std::size_t>(2, static_cast<std::size_t>(std::max(free_work / each, 0.0)));
  }

  /// Whether differences would stay insignificant over all text. Assumes the worst case that every
  /// difference becomes twice as large as over the text so far, while the intervals get narrower.
  /// The interval over texts narrows with the number of texts. The interval over the blocks of one
  /// text is assumed to narrow with the square root of the text's length.
  bool stays_similar(std::size_t round) const {
    constexpr double kUnseen = 2;
    double done = 0, all = 0;
    std::size_t texts = 0;
    for (std::size_t r = 0; r < rounds_.size(); ++r) {
      if (r <= round) done += length_of(r), texts += rounds_[r].size();
      all += length_of(r);
    }
    const double narrowing =
        texts < 2 ? std::sqrt(done / all) : half_width(field_.lengths.size()) / half_width(texts);
    return std::ranges::none_of(halving_.rounds.back().entries, [&](const HalvingEntry& entry) {
      const double mean = entry.from_lowest.mean, low = entry.from_lowest.interval.low;
      return entry.status == HalvingStatus::stays && !(kUnseen * mean <= narrowing * (mean - low));
    });
  }

  double length_of(std::size_t round) const {
    double tokens = 0;
    for (const std::size_t text : rounds_[round])
      tokens += static_cast<double>(field_.lengths[text]);
    return tokens;
  }

  /// Marks the configurations of the previous round that do not continue because of the work limit.
  void mark_dropped(std::size_t round) {
    halving_.limited = true;
    if (round == 0) return;
    for (HalvingEntry& entry : halving_.rounds.back().entries)
      if (entry.status == HalvingStatus::stays &&
          std::ranges::find(left_, entry.configuration) == left_.end())
        entry.status = HalvingStatus::dropped;
  }

  void add_texts(std::size_t round) {
    for (const std::size_t text : rounds_[round]) {
      auto scores = run_(text, left_);
      for (std::size_t i = 0; i < left_.size(); ++i)
        scores_[left_[i]].push_back(std::move(scores[i]));
      ran_.push_back(text);
      halving_.work += field_.lengths[text] * (left_.size() + 1);
    }
  }

  /// Ranks the configurations that ran in this round, over all text so far. If more text follows
  /// (`more`), a small difference does not eliminate a configuration, because it may reverse on the
  /// next text.
  std::vector<HalvingEntry> rank_entries(bool more) {
    halving_.last = left_;
    halving_.kl = PairedScores(left_.size());
    for (std::size_t place = 0; place < ran_.size(); ++place) {
      std::vector<std::span<const double>> scores;
      for (const std::size_t configuration : left_)
        scores.emplace_back(scores_[configuration][place]);
      halving_.kl.add_tokens(std::to_string(ran_[place]), scores);
    }
    const PairedScores& kl = halving_.kl;
    std::vector<std::size_t> order(left_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, {}, [&](std::size_t i) { return kl.mean(i); });
    std::vector<HalvingEntry> entries;
    for (const std::size_t i : order) {
      const Difference from_lowest = kl.difference(i, order.front());
      const double margin = more ? kMargin * kl.mean(order.front()) : 0;
      entries.push_back(
          {left_[i], kl.mean(i), from_lowest,
           from_lowest.interval.low > margin ? HalvingStatus::eliminated : HalvingStatus::stays});
    }
    return entries;
  }

  const HalvingInput& field_;
  const HalvingRunner& run_;
  Rounds rounds_;
  double limit_ = 0;
  std::vector<std::size_t> left_;  // best first
  std::vector<std::size_t> ran_;   // texts in the order in which they ran
  std::vector<std::vector<std::vector<double>>>
      scores_;  // [configuration][text, in the order in which they ran][token]
  Halving halving_;
};

}  // namespace

std::string_view name_of(HalvingStatus status) {
  switch (status) {
    case HalvingStatus::eliminated:
      return "significantly worse";
    case HalvingStatus::dropped:
      return "dropped: work limit (--work) reached";
    default:
      return "stays";
  }
}

std::string_view name_of(HalvingEnd end) {
  switch (end) {
    case HalvingEnd::ahead:
      return "one configuration is significantly better";
    case HalvingEnd::alike:
      return "the remaining differences are not significant";
    default:
      return "all text was used";
  }
}

Rounds halving_texts(std::size_t texts) {
  const std::size_t part = std::max<std::size_t>(1, texts / 4);
  Rounds rounds;
  for (std::size_t text = 0; text < texts; ++text) {
    const std::size_t round = std::min<std::size_t>(text / part, 2);
    if (round == rounds.size()) rounds.emplace_back();
    rounds[round].push_back(text);
  }
  return rounds;
}

double work_from(const HalvingInput& field, std::size_t text, std::size_t configurations) {
  double work = 0, left = static_cast<double>(configurations);
  for (const std::vector<std::size_t>& round : halving_texts(field.lengths.size())) {
    if (round.back() < text) continue;
    for (const std::size_t t : round)
      if (t >= text) work += (left + 1) * static_cast<double>(field.lengths[t]);
    left /= 2;
  }
  return work;
}

std::size_t first_round_size(const HalvingInput& field) {
  const HalvingRunner none;
  return Runner(field, none).first_round_size();
}

Halving successive_halving(const HalvingInput& field, const HalvingRunner& run) {
  return Runner(field, run).run();
}

}  // namespace kvlab
