// What an evaluation finds: one configuration's metrics, and how far apart two of them are.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "engine/evaluation/end_to_end.hpp"
#include "engine/evaluation/statistics.hpp"
#include "sim/run/comparison.hpp"
#include "sim/run/results.hpp"

namespace kvlab {
/// The scored tokens of each sequence from `first` on, so many as a block has.
struct EvalBlock {
  std::uint64_t first;
  double nll;                     ///< mean nats per token
  double milliseconds_per_token;  ///< NaN on the CPU, which works layer by layer
};

/// The scored tokens of one text that count.
struct EvalTextScore {
  double nll, kl;        ///< mean nats; NaN where none count
  std::uint64_t tokens;  ///< scored
};

/// One configuration's metrics: means over texts of their means over scored tokens. Percentiles are
/// those of all scored tokens together.
struct EvalScore {
  CacheConfig config;
  std::uint32_t budget_tokens;
  double nll, nll_error;                ///< mean nats per token, standard error
  double perplexity, perplexity_error;  ///< exp(nll), by the delta method
  double kl, kl_error;                  ///< mean nats, to the full cache; NaN without it
  double kl_p50, kl_p90, kl_p99;        ///< percentiles over the tokens
  double same_first, same_first_error;  ///< share of tokens; NaN without the full cache
  std::uint64_t tokens;                 ///< scored
  std::uint64_t kv_bytes_most;          ///< measured, prompts included, of one sequence
  Memory memory;                        ///< mean of the sequences, the most of one
  std::vector<EvalTextScore> texts;
  double nll_deviation, kl_deviation;  ///< standard deviation of the texts' means; NaN of one text
  std::vector<EvalBlock> blocks;       ///< where they were requested

  /// The policy, and the budget where heads differ in it; `whole`: with its defaults.
  std::string label(bool whole = false) const;
};

struct Evaluation {
  std::vector<EvalScore> scores;
  bool against_full = true;
  PairedScores kl{0}, nll{0}, same_first{0};  ///< what texts have in common counts once
  std::vector<std::string> notes = {};        ///< of what the sequences are, for eval_warnings()

  /// Of what decides: KL, or nll without the full cache.
  const PairedScores& deciding() const { return against_full ? kl : nll; }
  double deciding_mean(std::size_t score) const {
    return against_full ? scores[score].kl : scores[score].nll;
  }
  /// Budgets that configurations which evict were requested, by tokens; of those of as many the
  /// first.
  std::vector<std::string> budgets() const;
  /// Those that evict at as many tokens as a budget (as requested), compared.
  struct Judged {
    std::vector<std::size_t> scores;  ///< [candidate]
    Recommendation recommendation;
  };
  Judged judged(const std::string& budget) const;
  /// All that evict, whatever their budget: error against bytes.
  Judged all_judged() const;
  /// At each budget, by tokens.
  std::vector<Recommendation> recommendations() const;

 private:
  Judged judge(std::vector<std::size_t> which, const std::string& budget) const;
};

/// Scores [sequence][configuration], and which text each sequence is of.
struct ScoredSequences {
  std::vector<std::vector<EvalScores>> scores;
  std::vector<std::size_t> text;
  std::vector<bool> repeats;  ///< [sequence]: another text has it, and counts; empty: none
  std::vector<std::vector<Memory>> memory;  ///< [configuration][sequence]

  bool counts(std::size_t sequence) const { return repeats.empty() || !repeats[sequence]; }
};

/// A metric of every configuration by token, of the sequences that count.
template <class Value>
PairedScores paired_scores(const ScoredSequences& sequences,
                           std::vector<Value> EvalScores::*values_of) {
  PairedScores paired(sequences.scores.front().size());
  for (std::size_t s = 0; s < sequences.scores.size(); ++s) {
    if (!sequences.counts(s)) continue;
    std::vector<std::vector<double>> values;
    for (const EvalScores& one : sequences.scores[s])
      values.emplace_back((one.*values_of).begin(), (one.*values_of).end());
    const std::vector<std::span<const double>> spans(values.begin(), values.end());
    paired.add_tokens(std::to_string(sequences.text[s]), spans);
  }
  return paired;
}

/// Says which texts are short beside the longest, and count as much; nothing, or one line.
std::vector<std::string> short_text_warnings(const ScoredSequences& sequences,
                                             std::span<const std::string> names);

/// Metrics of the `c`-th configuration in `evaluation`, whose paired scores are there.
/// `block_tokens`: scores by so many tokens, too; 0: not. Throws std::runtime_error where a
/// log-likelihood is not finite.
EvalScore score_of(const CacheConfig& config, std::uint32_t budget_tokens, std::size_t c,
                   const ScoredSequences& sequences, const Evaluation& evaluation,
                   std::size_t block_tokens);

// An evaluation as a tidy table and as a JSON object, and tidy tables of scores read back.

inline constexpr const char* kEvalCsv = "eval.csv";
inline constexpr const char* kEvalBlocksCsv = "blocks.csv";
inline constexpr const char* kEvalJson = "eval.json";
inline constexpr int kEvalFormat = 1;

/// text,policy,params,budget,budget_tokens,prefill,positions,seed,metric,value,stderr,count: one
/// metric a row; `text` is `all` for what is over all of them. `texts` are their names.
std::string eval_csv(const Evaluation& evaluation, const std::vector<std::string>& texts);

/// KL and −ln p of each text by block, as blocks_csv() has them: what differences are paired by.
std::string eval_blocks_csv(const Evaluation& evaluation, const std::vector<std::string>& texts);

/// `format`, `texts`, `tokens`, `configurations`, `pairs`, `recommendations` by budget,
/// `frontier` and `warnings`.
nlohmann::ordered_json eval_json(const Evaluation& evaluation,
                                 const std::vector<std::string>& texts);

/// What to say on standard error, one line each: of texts, and recommendation_warnings() of every
/// budget.
std::vector<std::string> eval_warnings(const Evaluation& evaluation);

/// Beginning of each row of a tidy table that names a configuration: from policy to seed.
std::string config_columns(const CacheConfig& config, std::uint32_t budget_tokens);
inline constexpr std::string_view kConfigColumns =
    "policy,params,budget,budget_tokens,prefill,positions,seed";

/// A record of a tidy table with kConfigColumns (perhaps without budget_tokens), metric, value, and
/// perhaps stderr and count; the row's `trace` is what the column `name` says.
ResultRow score_row(const CsvRecord& record, std::string_view name);
/// Rows of such a table, whose `trace` is in the column text. Throws std::runtime_error that names
/// `file`, the line and the column.
std::vector<ResultRow> parse_score_rows(std::string_view text, std::string_view file);

}  // namespace kvlab
