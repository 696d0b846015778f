// Paired scores of several configurations over the same queries, tokens or samples of the same
// texts: means, differences, standard errors and 95% intervals. All of kvlab's statistics are
// computed here.
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

/// The difference of two means over the same texts, or a single mean.
struct Difference {
  double mean = 0;
  double standard_error = std::numeric_limits<double>::quiet_NaN();  ///< NaN: unknown
  Interval interval = {};                                            ///< 95%; NaN: unknown
  std::size_t texts = 0;

  /// Whether zero is outside the interval. Without an interval, no difference is significant.
  bool significantly_different() const { return interval.low > 0 || interval.high < 0; }
  bool ahead() const {
    return interval.high < 0;
  }  ///< whether the first mean is significantly lower
  bool is_worse() const { return interval.low > 0; }
  Difference reverse() const {
    return {-mean, standard_error, {-interval.high, -interval.low}, texts};
  }
  /// The same difference with another standard error. The interval is scaled in proportion to it.
  Difference with_error(double error) const;
};

/// The scores of several configurations on one text. A score of NaN was not measured.
struct PairedText {
  std::string text;  ///< hash of the text, or any unique name
  /// Number of scored tokens, or any measure of length that is comparable between the texts.
  double tokens = 1;
  std::vector<double> means = {};                ///< [configuration]
  std::vector<std::vector<double>> blocks = {};  ///< [configuration][block]; may be empty
  std::vector<double> block_weights = {};        ///< [block]; empty: equal weights
  bool is_binary = false;  ///< whether each block is a single answer: 1 right, 0 wrong
};

/// Paired scores of several configurations. Every text has weight 1, regardless of its length. So a
/// mean is the mean over texts, not over tokens. The 95% interval is
///
///   - for two texts or more, Student's interval over the texts. Its coverage is at least 95% for
///     any mixture of lengths, because unequal variances only make it wider (Ibragimov and Mueller,
///     2010). If all texts but one are short, it is at least as wide as the interval of the long
///     text alone, so a short text never makes it narrower;
///   - for one text, Student's interval over its blocks, which says nothing about other texts;
///   - for one text of fewer than kMinBlocks blocks, unknown;
///   - for answers, share_interval() and share_difference().
class PairedScores {
 public:
  static constexpr std::size_t kMinBlocks = 8;
  /// Tokens per block, because the scores of neighbouring tokens are correlated.
  static constexpr std::size_t kBlockTokens = 64;
  /// A text is short if a longer text has more than kShortText times as many tokens.
  static constexpr double kShortText = 16;

  explicit PairedScores(std::size_t configurations) : configurations_(configurations) {}

  /// Adds a text. If a text with the same name has been added before, the new one is ignored.
  void add(PairedText text);
  /// Adds one sequence's scores by token, [configuration][token]. The sequences of a text must
  /// follow one another. Every kBlockTokens tokens of a sequence form a block, and the remainder
  /// forms another.
  void add_tokens(const std::string& text, std::span<const std::span<const double>> scores);

  std::size_t texts() const { return texts_.size(); }
  std::uint64_t tokens() const;  ///< tokens that add_tokens() received
  double mean(std::size_t configuration) const { return average(configuration).mean; }
  Difference average(std::size_t configuration) const;
  /// The mean of `a` minus the mean of `b`, over the texts on which both were measured.
  Difference difference(std::size_t a, std::size_t b) const;
  /// The texts on which every configuration was measured.
  PairedScores restrict_to_common() const;
  const std::vector<PairedText>& all() const { return texts_; }

 private:
  std::size_t configurations_;
  std::vector<PairedText> texts_;
};

/// The share of right answers of a first configuration minus that of a second, over the same
/// `count` samples. In `gained` samples only the first configuration is right, and in `lost`
/// samples only the second. The interval is exact. It is computed from the samples in which the two
/// configurations differ.
Difference share_difference(std::uint64_t gained, std::uint64_t lost, std::uint64_t count);
/// The 95% confidence interval (Clopper and Pearson) of a share that was observed as `hits` of
/// `count` samples.
Interval share_interval(std::uint64_t hits, std::uint64_t count);

/// Half width of a 95% interval of the mean of `texts` texts, in units of the standard deviation of
/// one text; NaN for fewer than two texts.
double half_width(std::size_t texts);

}  // namespace kvlab
