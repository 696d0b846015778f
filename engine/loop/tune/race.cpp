#include "engine/loop/tune/race.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

namespace kvlab {
namespace {

constexpr double kMargin = 0.05;  // of the leader's KL

using Rounds = std::vector<std::vector<std::size_t>>;

class Runner {
 public:
  Runner(const RaceField& field, const RaceRun& run)
      : field_(field), run_(run), rounds_(race_texts(field.lengths.size())) {
    const auto all = static_cast<double>(
        std::accumulate(field.lengths.begin(), field.lengths.end(), std::uint64_t{0}));
    race_.exhaustive = static_cast<std::uint64_t>(all) * (field.contenders + 1);
    limit_ = std::max(field.share * static_cast<double>(race_.exhaustive), 3 * all);
    scores_.resize(field.contenders);
    left_.resize(field.contenders);
    std::iota(left_.begin(), left_.end(), std::size_t{0});
  }

  std::size_t first_contenders() const { return std::min(field_.contenders, affordable(0)); }

  Race race() {
    for (std::size_t round = 0; round < rounds_.size(); ++round) {
      const std::size_t most = affordable(round);
      if (left_.size() > most) left_.resize(most), spared(round);
      add_texts(round);
      race_.rounds.push_back({rounds_[round], standings(round + 1 < rounds_.size())});
      left_.clear();
      for (const RaceEntry& entry : race_.rounds.back().entries)
        if (entry.fate == RaceFate::stays) left_.push_back(entry.contender);
      if (left_.size() == 1) race_.end = RaceEnd::ahead;
      if (left_.size() > 1 && round + 1 < rounds_.size() && stays_alike(round))
        race_.end = RaceEnd::alike;
      if (race_.end != RaceEnd::text) break;
    }
    race_.first = left_;
    return std::move(race_);
  }

 private:
  /// How many may run in this round, if every later one has half of the one before it.
  std::size_t affordable(std::size_t round) const {
    double each = 0, full = 0, share = 1;
    for (std::size_t r = round; r < rounds_.size(); ++r, share /= 2) {
      each += share * length_of(r);
      full += length_of(r);
    }
    const double room = limit_ - static_cast<double>(race_.work) - full;
    return std::max<std::size_t>(2, static_cast<std::size_t>(std::max(room / each, 0.0)));
  }

  /// Whether the leader would stay within the interval of every difference, were all text to show
  /// twice the differences of the text so far. The interval of texts shrinks with their number;
  /// that of one text's blocks is taken to shrink as the root of the length grows.
  bool stays_alike(std::size_t round) const {
    constexpr double kUnseen = 2;
    double done = 0, all = 0;
    std::size_t texts = 0;
    for (std::size_t r = 0; r < rounds_.size(); ++r) {
      if (r <= round) done += length_of(r), texts += rounds_[r].size();
      all += length_of(r);
    }
    const double shrinks =
        texts < 2 ? std::sqrt(done / all) : half_width(field_.lengths.size()) / half_width(texts);
    return std::ranges::none_of(race_.rounds.back().entries, [&](const RaceEntry& entry) {
      const double mean = entry.behind.mean, low = entry.behind.interval.low;
      return entry.fate == RaceFate::stays && !(kUnseen * mean <= shrinks * (mean - low));
    });
  }

  double length_of(std::size_t round) const {
    double tokens = 0;
    for (const std::size_t text : rounds_[round])
      tokens += static_cast<double>(field_.lengths[text]);
    return tokens;
  }

  /// Marks those of the round before that no longer take part.
  void spared(std::size_t round) {
    race_.limited = true;
    if (round == 0) return;
    for (RaceEntry& entry : race_.rounds.back().entries)
      if (entry.fate == RaceFate::stays && std::ranges::find(left_, entry.contender) == left_.end())
        entry.fate = RaceFate::spared;
  }

  void add_texts(std::size_t round) {
    for (const std::size_t text : rounds_[round]) {
      auto scores = run_(text, left_);
      for (std::size_t i = 0; i < left_.size(); ++i)
        scores_[left_[i]].push_back(std::move(scores[i]));
      ran_.push_back(text);
      race_.work += field_.lengths[text] * (left_.size() + 1);
    }
  }

  /// Those that ran, over all text so far. As long as more is to come, a small difference decides
  /// nothing: what is ahead on one text may be behind on the next.
  std::vector<RaceEntry> standings(bool more) {
    race_.last = left_;
    race_.kl = PairedScores(left_.size());
    for (std::size_t place = 0; place < ran_.size(); ++place) {
      std::vector<std::span<const double>> scores;
      for (const std::size_t contender : left_) scores.emplace_back(scores_[contender][place]);
      race_.kl.add_tokens(std::to_string(ran_[place]), scores);
    }
    const PairedScores& kl = race_.kl;
    std::vector<std::size_t> order(left_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, {}, [&](std::size_t i) { return kl.mean(i); });
    std::vector<RaceEntry> entries;
    for (const std::size_t i : order) {
      const Difference behind = kl.difference(i, order.front());
      const double margin = more ? kMargin * kl.mean(order.front()) : 0;
      entries.push_back({left_[i], kl.mean(i), behind,
                         behind.interval.low > margin ? RaceFate::behind : RaceFate::stays});
    }
    return entries;
  }

  const RaceField& field_;
  const RaceRun& run_;
  Rounds rounds_;
  double limit_ = 0;
  std::vector<std::size_t> left_;                         // the best first
  std::vector<std::size_t> ran_;                          // texts, as they came
  std::vector<std::vector<std::vector<double>>> scores_;  // [contender][text, as they came][token]
  Race race_;
};

}  // namespace

std::string_view name_of(RaceFate fate) {
  switch (fate) {
    case RaceFate::behind:
      return "significantly worse";
    case RaceFate::spared:
      return "dropped: work limit (--work) reached";
    default:
      return "stays";
  }
}

std::string_view name_of(RaceEnd end) {
  switch (end) {
    case RaceEnd::ahead:
      return "one is ahead";
    case RaceEnd::alike:
      return "the remaining differences are not significant";
    default:
      return "all text has been run";
  }
}

Rounds race_texts(std::size_t texts) {
  const std::size_t part = std::max<std::size_t>(1, texts / 4);
  Rounds rounds;
  for (std::size_t text = 0; text < texts; ++text) {
    const std::size_t round = std::min<std::size_t>(text / part, 2);
    if (round == rounds.size()) rounds.emplace_back();
    rounds[round].push_back(text);
  }
  return rounds;
}

double work_from(const RaceField& field, std::size_t text, std::size_t contenders) {
  double work = 0, left = static_cast<double>(contenders);
  for (const std::vector<std::size_t>& round : race_texts(field.lengths.size())) {
    if (round.back() < text) continue;
    for (const std::size_t t : round)
      if (t >= text) work += (left + 1) * static_cast<double>(field.lengths[t]);
    left /= 2;
  }
  return work;
}

std::size_t first_contenders(const RaceField& field) {
  const RaceRun none;
  return Runner(field, none).first_contenders();
}

Race run_race(const RaceField& field, const RaceRun& run) { return Runner(field, run).race(); }

}  // namespace kvlab
