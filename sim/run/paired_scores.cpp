#include "sim/run/paired_scores.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "traces/base/numeric/nan.hpp"

namespace kvlab {
namespace {

using Values = std::vector<double>;

constexpr double kOutside = 0.05;  // probability that the value is outside a 95% interval

/// The regularized incomplete beta function, computed as a continued fraction by Lentz's method.
double incomplete_beta(double a, double b, double x) {
  if (x <= 0 || x >= 1) return x <= 0 ? 0 : 1;
  if (x > (a + 1) / (a + b + 2)) return 1 - incomplete_beta(b, a, 1 - x);
  constexpr double kTiny = 1e-300, kEnough = 1e-15;
  const auto or_tiny = [](double value) { return std::abs(value) < kTiny ? kTiny : value; };
  double c = 1, d = 1 / or_tiny(1 - (a + b) * x / (a + 1)), fraction = d;
  for (int m = 1; m < 1000; ++m) {
    const double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
    const double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
    double step = 1;
    for (const double term : {even, odd}) {
      d = 1 / or_tiny(1 + term * d);
      c = or_tiny(1 + term / c);
      step = d * c;
      fraction *= step;
    }
    if (std::abs(step - 1) < kEnough) break;
  }
  const double front =
      std::lgamma(a + b) - std::lgamma(a) - std::lgamma(b) + a * std::log(x) + b * std::log1p(-x);
  return std::exp(front) * fraction / a;
}

/// The point in (0, 1) at which a decreasing function is zero.
template <class Function>
double root_of(Function falling) {
  double low = 0, high = 1;
  for (int i = 0; i < 100; ++i) {
    const double middle = (low + high) / 2;
    (falling(middle) > 0 ? low : high) = middle;
  }
  return (low + high) / 2;
}

/// Half width of Student's 95% interval for a mean of `count` values, in units of the standard
/// error.
double student(std::size_t count) {
  const auto freedom = static_cast<double>(count - 1);
  // P(|t| > x) = I(freedom / (freedom + x²)), which increases with its argument.
  const double at =
      root_of([&](double x) { return kOutside - incomplete_beta(freedom / 2, 0.5, x); });
  return std::sqrt(freedom * (1 - at) / at);
}

/// The standard error of a weighted mean, computed as that of a ratio of two sums. It is valid for
/// nearly equal weights. The blocks of one text have nearly equal weights, because only the last
/// block may be shorter.
double error_of(const Values& values, const Values& weights) {
  const auto n = static_cast<double>(values.size());
  double sum = 0, weight = 0, squares = 0;
  for (std::size_t i = 0; i < values.size(); ++i)
    sum += weights[i] * values[i], weight += weights[i];
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double off = weights[i] * (values[i] - sum / weight);
    squares += off * off;
  }
  return std::sqrt(n / (n - 1) * squares) / weight;
}

/// One term of a linear combination of configurations' metrics.
struct Term {
  std::size_t configuration;
  double factor;
};

double sum_of(std::span<const Term> terms, const auto& value) {
  double sum = 0;
  for (const Term& term : terms) sum += term.factor * value(term.configuration);
  return sum;
}

/// For right and wrong answers: returns the share of right answers of one configuration, or the
/// difference between the shares of two configurations.
Difference accuracy_difference(const PairedText& text, std::span<const Term> terms) {
  const Values& own = text.blocks[terms.front().configuration];
  const Values& other = text.blocks[terms.back().configuration];
  std::uint64_t right = 0, gained = 0, lost = 0;
  const std::size_t samples = std::min(own.size(), other.size());
  for (std::size_t i = 0; i < samples; ++i)
    right += own[i] == 1, gained += own[i] > other[i], lost += own[i] < other[i];
  if (terms.size() == 2) return share_difference(gained, lost, samples);
  const auto n = static_cast<double>(own.size());
  const double share = static_cast<double>(right) / n;
  return {share, std::sqrt(share * (1 - share) / n), share_interval(right, own.size()), 1};
}

/// A standard error, and half the width of the 95% interval. NaN: unknown.
struct Scatter {
  double error = kNaN, half = kNaN;
};

Scatter scatter_of(const Values& values, const Values& weights) {
  const double error = error_of(values, weights);
  return {error, student(values.size()) * error};
}

/// The scatter of one text, computed from its blocks; unknown for fewer than kMinBlocks blocks.
Scatter scatter_of_blocks(const PairedText& text, std::span<const Term> terms) {
  if (text.blocks.empty()) return {};
  std::size_t blocks = std::numeric_limits<std::size_t>::max();
  for (const Term& term : terms) blocks = std::min(blocks, text.blocks[term.configuration].size());
  Values means, weights;
  for (std::size_t b = 0; b < blocks; ++b) {
    const double value = sum_of(terms, [&](std::size_t c) { return text.blocks[c][b]; });
    const double weight = text.block_weights.empty() ? 1 : text.block_weights[b];
    if (std::isfinite(value) && weight > 0) means.push_back(value), weights.push_back(weight);
  }
  return means.size() < PairedScores::kMinBlocks ? Scatter{} : scatter_of(means, weights);
}

/// The longest text, if all other texts are short compared with it (kShortText); otherwise null.
const PairedText* only_long_text(std::span<const PairedText* const> texts) {
  const auto tokens = [](const PairedText* text) { return text->tokens; };
  const PairedText* longest = *std::ranges::max_element(texts, {}, tokens);
  const auto is_short = [&](const PairedText* text) {
    return PairedScores::kShortText * text->tokens < longest->tokens;
  };
  return std::ranges::count_if(texts, is_short) + 1 == std::ssize(texts) ? longest : nullptr;
}

Difference difference_of(std::span<const PairedText> all, std::span<const Term> terms) {
  Values means;
  std::vector<const PairedText*> texts;
  for (const PairedText& text : all) {
    const double mean = sum_of(terms, [&](std::size_t c) { return text.means[c]; });
    if (!std::isfinite(mean) || !(text.tokens > 0)) continue;
    means.push_back(mean);
    texts.push_back(&text);
  }
  Difference found{.mean = kNaN, .texts = texts.size()};
  if (texts.empty()) return found;
  if (texts.size() == 1 && texts[0]->is_binary && !texts[0]->blocks.empty())
    return accuracy_difference(*texts[0], terms);
  found.mean = std::accumulate(means.begin(), means.end(), 0.0) / static_cast<double>(means.size());
  Scatter scatter;
  if (const PairedText* alone = only_long_text(texts)) scatter = scatter_of_blocks(*alone, terms);
  if (texts.size() > 1) {
    const Scatter text_scatter = scatter_of(means, Values(means.size(), 1));
    if (!(scatter.half > text_scatter.half)) scatter = text_scatter;
  }
  found.standard_error = scatter.error;
  found.interval = {found.mean - scatter.half, found.mean + scatter.half};
  return found;
}

}  // namespace

Difference Difference::with_error(double error) const {
  Difference found = *this;
  found.standard_error = error;
  const double wider = error / standard_error;
  if (std::isfinite(wider))
    found.interval = {mean + wider * (interval.low - mean), mean + wider * (interval.high - mean)};
  return found;
}

void PairedScores::add(PairedText text) {
  if (std::ranges::find(texts_, text.text, &PairedText::text) != texts_.end()) return;
  texts_.push_back(std::move(text));
}

void PairedScores::add_tokens(const std::string& text,
                              std::span<const std::span<const double>> scores) {
  auto own = std::ranges::find(texts_, text, &PairedText::text);
  if (own == texts_.end())
    own = texts_.insert(own, {.text = text,
                              .tokens = 0,
                              .means = Values(configurations_),
                              .blocks = std::vector<Values>(configurations_)});
  const std::size_t length = scores.front().size();
  for (std::size_t first = 0, count = 0; first < length; first += count) {
    if (own->block_weights.empty() || own->block_weights.back() == kBlockTokens) {
      own->block_weights.push_back(0);
      for (Values& blocks : own->blocks) blocks.push_back(0);
    }
    double& filled = own->block_weights.back();
    count = std::min(kBlockTokens - static_cast<std::size_t>(filled), length - first);
    const auto tokens = static_cast<double>(count);
    for (std::size_t c = 0; c < scores.size(); ++c) {
      const auto values = scores[c].subspan(first, count);
      const double mean = std::accumulate(values.begin(), values.end(), 0.0) / tokens;
      double& block = own->blocks[c].back();
      block += (mean - block) * tokens / (filled + tokens);
      own->means[c] += (mean - own->means[c]) * tokens / (own->tokens + tokens);
    }
    filled += tokens;
    own->tokens += tokens;
  }
}

std::uint64_t PairedScores::tokens() const {
  double sum = 0;
  for (const PairedText& text : texts_) sum += text.tokens;
  return static_cast<std::uint64_t>(sum);
}

Difference PairedScores::average(std::size_t configuration) const {
  const Term terms[] = {{configuration, 1}};
  return difference_of(texts_, terms);
}

PairedScores PairedScores::restrict_to_common() const {
  PairedScores common(configurations_);
  for (const PairedText& text : texts_)
    if (std::ranges::all_of(text.means, [](double mean) { return std::isfinite(mean); }))
      common.texts_.push_back(text);
  return common;
}

Difference PairedScores::difference(std::size_t a, std::size_t b) const {
  const Term terms[] = {{a, 1}, {b, -1}};
  return difference_of(texts_, terms);
}

Interval share_interval(std::uint64_t hits, std::uint64_t count) {
  if (count == 0) return {0, 1};
  const auto h = static_cast<double>(hits), misses = static_cast<double>(count - hits);
  // P(hits or more) increases with the share, and P(hits or fewer) decreases with it.
  const double low = hits == 0 ? 0 : root_of([&](double share) {
    return kOutside / 2 - incomplete_beta(h, misses + 1, share);
  });
  const double high = hits == count ? 1 : root_of([&](double share) {
    return 1 - incomplete_beta(h + 1, misses, share) - kOutside / 2;
  });
  return {low, high};
}

double half_width(std::size_t texts) {
  return texts < 2 ? kNaN : student(texts) / std::sqrt(static_cast<double>(texts));
}

Difference share_difference(std::uint64_t gained, std::uint64_t lost, std::uint64_t count) {
  Difference found{.texts = 1};
  if (count == 0) return found.mean = kNaN, found;
  const auto n = static_cast<double>(count), gain = static_cast<double>(gained),
             loss = static_cast<double>(lost);
  const double differ = (gain + loss) / n;
  found.mean = (gain - loss) / n;
  found.standard_error = std::sqrt(std::max(0.0, differ - found.mean * found.mean) / n);
  const Interval share = share_interval(gained, gained + lost);
  // adding 0.0 converts -0 to 0
  found.interval = {differ * (2 * share.low - 1) + 0.0, differ * (2 * share.high - 1)};
  return found;
}

}  // namespace kvlab
