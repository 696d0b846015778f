#include "engine/loop/eval/score.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <stdexcept>

#include "policies/catalogue.hpp"
#include "sim/metrics.hpp"

namespace kvlab {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr std::size_t kLeastSequences = 8;  // fewer: blocks are parts of sequences
constexpr std::uint32_t kParts = 16;

using Scores = std::vector<std::vector<LoopScores>>;

/// One configuration's scores by `tokens` of each sequence.
std::vector<EvalBlock> blocks_of(std::size_t c, const Scores& scores, std::size_t tokens) {
  std::vector<EvalBlock> blocks;
  if (tokens == 0) return blocks;
  std::size_t longest = 0;
  for (const auto& sequence : scores) longest = std::max(longest, sequence[c].nll.size());
  for (std::size_t first = 0; first < longest; first += tokens) {
    double nll = 0, seconds = 0;
    std::size_t count = 0, timed = 0;
    for (const auto& sequence : scores) {
      const LoopScores& one = sequence[c];
      for (std::size_t i = first; i < std::min(first + tokens, one.nll.size()); ++i, ++count) {
        nll += one.nll[i];
        if (i < one.seconds.size()) seconds += static_cast<double>(one.seconds[i]), ++timed;
      }
    }
    blocks.push_back(
        {.first = first,
         .nll = nll / static_cast<double>(count),
         .milliseconds_per_token = timed ? 1e3 * seconds / static_cast<double>(timed) : kNaN});
  }
  return blocks;
}

Estimate estimate(const BlockedRatio& ratio) {
  const BlockedRatio* const one[] = {&ratio};
  return mean_of(one);
}

/// A figure that is no number is no figure.
void refuse_not_finite(const ScoredSequences& sequences, std::size_t c) {
  for (std::size_t s = 0; s < sequences.scores.size(); ++s) {
    const std::vector<double>& nll = sequences.scores[s][c].nll;
    const auto wrong =
        std::ranges::find_if(nll, [](double value) { return !std::isfinite(value); });
    if (wrong != nll.end())
      throw std::runtime_error(fmt::format(
          "text {}: the log-likelihood of scored token {} is not finite; the model's weights may "
          "be damaged, or too large for its dtype",
          sequences.text[s] + 1, wrong - nll.begin()));
  }
}

/// Means and errors over all sequences, as sums by block.
void add_means(EvalScore& score, std::size_t c, const Scores& scores) {
  const std::uint32_t parts = scores.size() < kLeastSequences ? kParts : 1;
  BlockedRatio nll, kl, same;
  for (BlockedRatio* ratio : {&nll, &kl, &same})
    ratio->resize(static_cast<std::uint32_t>(scores.size()) * parts);
  for (std::size_t s = 0; s < scores.size(); ++s) {
    const LoopScores& one = scores[s][c];
    for (std::size_t i = 0; i < one.nll.size(); ++i) {
      const auto block = static_cast<std::uint32_t>(s * parts + i * parts / one.nll.size());
      nll.add(block, one.nll[i], 1);
      kl.add(block, one.kl[i], 1);
      same.add(block, one.same_first[i], 1);
    }
    score.tokens += one.nll.size();
    score.kv_bytes_peak = std::max(score.kv_bytes_peak, one.kv_bytes_peak);
  }
  const Estimate n = estimate(nll), k = estimate(kl);
  score.nll = n.value, score.nll_error = n.standard_error;
  score.perplexity = std::exp(n.value);
  score.perplexity_error = score.perplexity * n.standard_error;
  score.kl = k.value, score.kl_error = k.standard_error;
  score.same_first = estimate(same).value;
}

void add_percentiles(EvalScore& score, std::size_t c, const Scores& scores) {
  std::vector<double> kl;
  for (const auto& sequence : scores)
    kl.insert(kl.end(), sequence[c].kl.begin(), sequence[c].kl.end());
  score.kl_p50 = quantile(kl, 0.5);
  score.kl_p90 = quantile(kl, 0.9);
  score.kl_p99 = quantile(std::move(kl), 0.99);
}

void add_texts(EvalScore& score, std::size_t c, const ScoredSequences& sequences) {
  for (std::size_t s = 0; s < sequences.text.size(); ++s) {
    if (sequences.text[s] >= score.texts.size())
      score.texts.resize(sequences.text[s] + 1, {.nll = 0, .kl = 0, .tokens = 0});
    EvalText& text = score.texts[sequences.text[s]];
    const LoopScores& one = sequences.scores[s][c];
    for (const double nll : one.nll) text.nll += nll;
    for (const double kl : one.kl) text.kl += kl;
    text.tokens += one.nll.size();
  }
  std::vector<double> nll, kl;
  for (EvalText& text : score.texts) {
    nll.push_back(text.nll /= static_cast<double>(text.tokens));
    kl.push_back(text.kl /= static_cast<double>(text.tokens));
  }
  score.nll_deviation = spread_of(nll).deviation;
  score.kl_deviation = spread_of(kl).deviation;
}

/// The full cache was not there: nothing is compared with it.
void forget_full(EvalScore& score) {
  score.kl = score.kl_error = score.kl_p50 = score.kl_p90 = score.kl_p99 = score.same_first = kNaN;
  score.kl_deviation = kNaN;
  for (EvalText& text : score.texts) text.kl = kNaN;
}

/// Means of a figure over blocks of all sequences.
PairedBootstrap bootstrap_of(const ScoredSequences& sequences,
                             std::vector<double> LoopScores::*figure) {
  const Scores& scores = sequences.scores;
  std::size_t total = 0;
  for (const auto& sequence : scores) total += sequence.front().nll.size();
  ScoreBlocks blocks(scores.front().size());
  for (const auto& sequence : scores) {
    std::vector<std::span<const double>> values;
    values.reserve(sequence.size());
    for (const LoopScores& one : sequence) values.emplace_back(one.*figure);
    blocks.add(values, ScoreBlocks::block_tokens(total));
  }
  return PairedBootstrap(blocks);
}

Difference reversed(const Difference& difference) {
  return {-difference.mean, {-difference.interval.high, -difference.interval.low}};
}

}  // namespace

EvalScore score_of(const CacheConfig& config, std::uint32_t budget_tokens, std::size_t c,
                   const ScoredSequences& sequences, bool against_full, std::size_t block_tokens) {
  refuse_not_finite(sequences, c);
  EvalScore score{.config = config, .budget_tokens = budget_tokens};
  add_means(score, c, sequences.scores);
  add_percentiles(score, c, sequences.scores);
  add_texts(score, c, sequences);
  if (!against_full) forget_full(score);
  score.blocks = blocks_of(c, sequences.scores, block_tokens);
  return score;
}

std::string EvalScore::label(bool whole) const {
  const std::string policy = whole ? config.policy.text() : config.policy.brief();
  return config.evicts() && !config.budget.is_even()
             ? fmt::format("{} at {}", policy, config.budget.text())
             : policy;
}

std::vector<EvalPair> pairs_of(std::span<const EvalScore> scores, const ScoredSequences& sequences,
                               bool against_full) {
  const PairedBootstrap nll = bootstrap_of(sequences, &LoopScores::nll);
  const PairedBootstrap kl = bootstrap_of(sequences, &LoopScores::kl);
  std::vector<EvalPair> pairs;
  for (std::size_t b = 0; b < scores.size(); ++b)
    for (std::size_t a = b + 1; a < scores.size(); ++a) {
      const bool same_budget = scores[a].config.evicts() && scores[b].config.evicts() &&
                               scores[a].budget_tokens == scores[b].budget_tokens;
      if (b > 0 && !same_budget) continue;
      pairs.push_back({.a = a,
                       .b = b,
                       .kl = against_full ? kl.difference(a, b) : Difference{kNaN, {kNaN, kNaN}},
                       .nll = nll.difference(a, b)});
    }
  return pairs;
}

std::vector<std::string> Evaluation::budgets() const {
  std::vector<std::string> budgets;
  std::map<std::uint32_t, std::string> by_tokens;
  for (const EvalScore& score : scores)
    if (score.config.evicts())
      by_tokens.try_emplace(score.budget_tokens, score.config.budget.text());
  for (const auto& [tokens, budget] : by_tokens) budgets.push_back(budget);
  return budgets;
}

std::vector<Evaluation::Contender> Evaluation::contenders(const std::string& budget) const {
  const auto figure = [&](std::size_t s) {
    return std::isnan(scores[s].kl) ? scores[s].nll : scores[s].kl;
  };
  const auto named = std::ranges::find_if(scores, [&](const EvalScore& score) {
    return score.config.evicts() && score.config.budget.text() == budget;
  });
  std::vector<Contender> found;
  if (named == scores.end()) return found;
  for (std::size_t s = 0; s < scores.size(); ++s)
    if (scores[s].config.evicts() && scores[s].budget_tokens == named->budget_tokens)
      found.push_back({s, {0, {0, 0}}});
  std::ranges::stable_sort(found, [&](const Contender& x, const Contender& y) {
    return figure(x.score) < figure(y.score);
  });
  for (Contender& contender : found) {
    const std::size_t best = found.front().score, own = contender.score;
    if (own == best) continue;
    const auto pair = std::ranges::find_if(pairs, [&](const EvalPair& p) {
      return p.a == std::max(own, best) && p.b == std::min(own, best);
    });
    const Difference& difference = std::isnan(scores[own].kl) ? pair->nll : pair->kl;
    contender.behind = own > best ? difference : reversed(difference);
  }
  return found;
}

}  // namespace kvlab
