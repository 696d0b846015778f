// Paired scores of several configurations over the same queries, tokens or samples of the same
// texts: means, differences, standard errors and 95% intervals. The only estimator in kvlab.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

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

  /// Whether zero lies outside the interval. Without an interval no difference is significant.
  bool significantly_different() const { return interval.low > 0 || interval.high < 0; }
  bool ahead() const { return interval.high < 0; }  ///< the first is significantly lower
  bool behind() const { return interval.low > 0; }
  Difference reverse() const {
    return {-mean, standard_error, {-interval.high, -interval.low}, texts};
  }
  /// The same with another standard error, and the interval in proportion.
  Difference with_error(double error) const;
};

/// What several configurations scored on one text. NaN: not measured there.
struct PairedText {
  std::string text;                              ///< its hash, or any name of its own
  double tokens = 1;                             ///< scored; in any unit that the texts share
  std::vector<double> means = {};                ///< [configuration]
  std::vector<std::vector<double>> blocks = {};  ///< [configuration][block]; or empty
  std::vector<double> block_weights = {};        ///< [block]; empty: alike
  bool is_binary = false;                        ///< blocks are single answers, 1 right or 0 wrong
};

/// Paired scores of several configurations. Every text has weight 1, however long it is: the mean
/// is that of the texts' means, and stands for texts, not for tokens. The 95% interval is
/// - of two texts or more, Student's over the texts. Its coverage is 95% or more for any mixture
///   of lengths, because unequal variances only make it wider (Ibragimov and Mueller, 2010). Where
///   all texts but one are short, it is at least as wide as that of the long text alone, so a short
///   text never makes it narrower;
/// - of one text, Student's over its blocks, which says nothing of another text;
/// - of one text of fewer than kMinBlocks blocks, unknown;
/// - of answers, share_interval() and share_difference().
class PairedScores {
 public:
  static constexpr std::size_t kMinBlocks = 8;
  static constexpr std::size_t kBlockTokens = 64;  ///< neighbours depend on each other
  /// A text is short beside one that has more than this many times its tokens.
  static constexpr double kShortText = 16;

  explicit PairedScores(std::size_t configurations) : configurations_(configurations) {}

  /// A text that is there already, by its name, counts once.
  void add(PairedText text);
  /// One sequence's scores by token [configuration][token]. The sequences of a text follow one
  /// another; each kBlockTokens tokens of them are a block, and what is left over is one.
  void add_tokens(const std::string& text, std::span<const std::span<const double>> scores);

  std::size_t texts() const { return texts_.size(); }
  std::uint64_t tokens() const;  ///< that add_tokens() got
  double mean(std::size_t configuration) const { return average(configuration).mean; }
  Difference average(std::size_t configuration) const;
  /// `a` less `b`, over the texts that have both.
  Difference difference(std::size_t a, std::size_t b) const;
  /// The texts on which every configuration was measured.
  PairedScores in_common() const;
  const std::vector<PairedText>& all() const { return texts_; }

 private:
  std::size_t configurations_;
  std::vector<PairedText> texts_;
};

/// One share of right answers less another, over the same `count` samples: in `gained` of them the
/// first alone is right, in `lost` the other. Exact, by the samples in which they differ.
Difference share_difference(std::uint64_t gained, std::uint64_t lost, std::uint64_t count);
/// All shares from which `hits` of `count` is not too far (Clopper and Pearson, 95%).
Interval share_interval(std::uint64_t hits, std::uint64_t count);

/// Half of a 95% interval of the mean of so many texts, by the scatter of one; NaN of fewer than
/// two.
double half_width(std::size_t texts);

}  // namespace kvlab
