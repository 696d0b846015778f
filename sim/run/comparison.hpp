// What can be told apart, and what is said of it: the one place where two configurations are
// compared. Figures are paired: over the same queries, tokens or draws of the same texts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/live_counts.hpp"

namespace kvlab {

struct Interval {
  double low = std::numeric_limits<double>::quiet_NaN(), high = low;
};

/// One mean less another, over the same texts; or one mean by itself.
struct Difference {
  double mean = 0;
  double standard_error = std::numeric_limits<double>::quiet_NaN();  ///< NaN: not known
  Interval interval = {};                                            ///< 95%; NaN: not known
  std::size_t texts = 0;

  /// Whether zero lies outside the interval. Without an interval nothing is told apart.
  bool told_apart() const { return interval.low > 0 || interval.high < 0; }
  bool ahead() const { return interval.high < 0; }  ///< the first is less, and can be told apart
  bool behind() const { return interval.low > 0; }
  Difference reversed() const {
    return {-mean, standard_error, {-interval.high, -interval.low}, texts};
  }
};

/// What several configurations scored on one text. NaN: not measured there.
struct PairedText {
  std::string text;                              ///< its hash, or any name of its own
  double weight = 1;                             ///< among texts
  std::vector<double> means = {};                ///< [configuration]
  std::vector<std::vector<double>> blocks = {};  ///< [configuration][block]; or empty
  std::vector<double> block_weights = {};        ///< [block]; empty: alike
  bool answers = false;                          ///< blocks are single answers, 1 right or 0 wrong
};

/// Paired figures of several configurations. Of two texts or more, an error is that of the means of
/// texts (Student's factor); of one text, of its blocks, and says nothing of another text; of one
/// text of fewer than kLeastBlocks blocks there is none. Of answers, however few: shares by
/// share_interval(), differences by share_difference().
class PairedScores {
 public:
  static constexpr std::size_t kLeastBlocks = 8;
  static constexpr std::size_t kBlockTokens = 64;  ///< neighbours depend on each other

  explicit PairedScores(std::size_t configurations) : configurations_(configurations) {}

  /// A text that is there already, by its name, counts once.
  void add(PairedText text);
  /// One sequence's scores by token [configuration][token], which follow those of the same text
  /// before; blocks of kBlockTokens, texts by their tokens.
  void add_tokens(const std::string& text, std::span<const std::span<const double>> scores);

  std::size_t texts() const { return texts_.size(); }
  std::uint64_t tokens() const;  ///< that add_tokens() got
  double mean(std::size_t configuration) const { return average(configuration).mean; }
  Difference average(std::size_t configuration) const;
  /// `a` less `b`, over the texts that have both.
  Difference difference(std::size_t a, std::size_t b) const;

 private:
  std::size_t configurations_;
  std::vector<PairedText> texts_;
};

/// One share of right answers less another, over the same `count` draws: in `gained` of them the
/// first alone is right, in `lost` the other. Exact, by the draws in which they differ.
Difference share_difference(std::uint64_t gained, std::uint64_t lost, std::uint64_t count);
/// All shares from which `hits` of `count` is not too far (Clopper and Pearson, 95%).
Interval share_interval(std::uint64_t hits, std::uint64_t count);

/// Half of a 95% interval of the mean of so many texts, by the scatter of one; NaN of fewer than
/// two.
double half_width(std::size_t texts);

inline constexpr double kSameMemory = 1.02;
/// Mean and peak are at most those of `other`, but for 2%.
bool holds_no_more(const Memory& own, const Memory& other);
inline bool same_memory(const Memory& a, const Memory& b) {
  return holds_no_more(a, b) && holds_no_more(b, a);
}

/// A configuration that is to be judged, in the order of the grid.
struct Contender {
  std::string name;
  double error = 0;  ///< lower is better
  Memory memory = {};
  bool last_resort = false;  ///< taken only where no other ties
};
/// Whether it is: `random`, which knows nothing.
inline bool is_last_resort(std::string_view policy) { return policy == "random"; }

/// The error of the `a`-th less that of the `b`-th.
using DifferenceOf = std::function<Difference(std::size_t a, std::size_t b)>;

/// What is said of contenders at a budget. Indices are of the contenders as given.
struct Verdict {
  std::vector<std::size_t> order;  ///< those that hold no more than the budget, least error first;
                                   ///< all, where none holds as little
  std::vector<Difference> behind;  ///< [order]: its error less that of the first
  std::vector<std::size_t> tied;   ///< with the first, of least memory: the winner in front
  std::vector<std::size_t> more;   ///< those that hold more: never better, whatever their error
  std::vector<std::size_t> frontier;  ///< of all, by bytes: those that none dominates, which is to
                                      ///< hold no more and to be told apart as better
  bool over_budget = false;           ///< none holds as little as the budget

  std::size_t winner() const { return tied.front(); }
  bool ties(std::size_t contender) const;  ///< whether it is among `tied`
};

/// `budget_bytes`: what the budget's tokens take; a contender's peak may be 2% more. Throws
/// std::invalid_argument of none.
Verdict verdict_of(std::span<const Contender> contenders, double budget_bytes,
                   const DifferenceOf& difference);

/// What a verdict was given on.
struct VerdictScope {
  std::string budget;                    ///< "64 tokens"
  double budget_bytes = 0;               ///< 0: not known
  std::string figure;                    ///< "KL"
  std::size_t texts = 0;                 ///< different ones
  std::uint64_t tokens = 0;              ///< scored; 0: not known
  std::uint64_t draws = 0;               ///< of a task, instead of texts
  std::string unmeasured = {};           ///< "answers were not asked"
  std::vector<std::string> filled = {};  ///< whose guards leave a policy nothing to decide
};
inline constexpr std::uint64_t kEnoughTokens = 1000;  ///< scored ones; fewer tell little apart

/// Whether all that a policy may keep is guarded, sinks and the most recent tokens, so that it is
/// `window` with sinks whatever its name; `params` as results have them.
bool guards_fill(std::string_view policy, std::string_view params, std::uint32_t budget_tokens);

}  // namespace kvlab
