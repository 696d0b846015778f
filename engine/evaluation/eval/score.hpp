// The results of an evaluation: each configuration's metrics, and differences between
// configurations.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/evaluation/end_to_end.hpp"
#include "engine/evaluation/statistics.hpp"
#include "sim/run/comparison.hpp"
#include "sim/run/results.hpp"

namespace kvlab {
/// A block of scored tokens: in each sequence, those from index `first` on.
struct EvalBlock {
  std::uint64_t first;
  double nll;                     ///< mean -ln p of a token, in nats
  double milliseconds_per_token;  ///< NaN on the CPU, which computes layer by layer
};

/// The scores of one text.
struct EvalTextScore {
  double nll, kl;        ///< means in nats; NaN if no token counts
  std::uint64_t tokens;  ///< number of scored tokens
  double acceptance;     ///< mean; NaN if nothing was drafted
};

/// A mean and its standard error; the error is NaN if it is unknown.
struct MeanWithError {
  double mean, error;
};

/// How often the tokens that a configuration drafts are accepted.
struct DraftScore {
  MeanWithError acceptance;             ///< share of drafted tokens, at all depths together
  std::vector<MeanWithError> by_depth;  ///< [depth - 1]: the same for the depth-th drafted token
  /// Expected number of tokens that a verification yields: the accepted tokens, plus one token that
  /// the verification itself samples. Between 1 and the number of drafted tokens + 1.
  MeanWithError tokens_per_verification;
};

/// One configuration's metrics: means over texts of the means over their scored tokens. Percentiles
/// are over all scored tokens together.
struct EvalScore {
  CacheConfig config;
  std::uint32_t budget_tokens;
  double nll, nll_error;                ///< mean -ln p of a token in nats; standard error
  double perplexity, perplexity_error;  ///< exp(nll); standard error by the delta method
  double kl, kl_error;            ///< mean KL to the full cache in nats; NaN without the full cache
  double kl_p50, kl_p90, kl_p99;  ///< percentiles of KL over the tokens
  double same_first, same_first_error;  ///< share of tokens; NaN without the full cache
  std::uint64_t tokens;                 ///< number of scored tokens
  std::uint64_t kv_bytes_peak;          ///< measured peak of one sequence, prompts included
  Memory memory;                        ///< mean over the sequences, and the peak of one
  std::vector<EvalTextScore> texts;
  double nll_deviation, kl_deviation;  ///< standard deviation of the texts' means; NaN for one text
  std::vector<EvalBlock> blocks;       ///< empty unless requested
  std::optional<DraftScore> draft;     ///< set if configurations draft

  /// The policy as text, with the budget if heads have different budgets. `whole`: also shows
  /// settings with their default values.
  std::string label(bool whole = false) const;
};

struct Evaluation {
  std::vector<EvalScore> scores;
  bool compares_to_full = true;
  std::uint32_t draft = 0;  ///< SequenceOptions::draft
  /// Text that occurs in several sequences counts once. `acceptance` is empty unless configurations
  /// draft.
  PairedScores kl{0}, nll{0}, same_first{0}, acceptance{0};
  std::vector<std::string> notes = {};  ///< notes about the sequences, for eval_warnings()

  /// The scores by which configurations are ranked: acceptance if they draft, otherwise KL, or nll
  /// without the full cache.
  const PairedScores& deciding() const { return draft ? acceptance : compares_to_full ? kl : nll; }
  /// The name of deciding() in messages.
  const char* deciding_name() const {
    return draft ? "acceptance" : compares_to_full ? "KL" : "−ln p";
  }
  /// The budgets of configurations that evict, ordered by tokens. If several budgets have the same
  /// number of tokens, contains only the first of them.
  std::vector<std::string> budgets() const;
  /// A comparison of the configurations that evict at a budget.
  struct Judgement {
    std::vector<std::size_t> scores;  ///< [candidate]
    Recommendation recommendation;
  };
  Judgement judge_budget(const std::string& budget) const;
  /// A comparison of all configurations that evict, at any budget, by error and bytes.
  Judgement judge_all() const;
  /// The recommendation at each budget, ordered by tokens.
  std::vector<Recommendation> recommendations() const;

 private:
  Judgement judge(std::vector<std::size_t> which, const std::string& budget) const;
};

/// Scores [sequence][configuration], and the text of each sequence.
struct ScoredSequences {
  std::vector<std::vector<TokenScores>> scores;
  std::vector<std::size_t> text;
  std::vector<bool> repeats;  ///< [sequence]: whether a longer text contains it, so that only the
                              ///< longer text counts; empty: none
  std::vector<std::vector<Memory>> memory;  ///< [configuration][sequence]

  bool counts(std::size_t sequence) const { return repeats.empty() || !repeats[sequence]; }
};

/// Collects the values of a metric for each configuration and token, from the sequences that count.
/// `values_of`: the member of TokenScores that has them, or a function of TokenScores.
template <class Values>
PairedScores paired_scores(const ScoredSequences& sequences, Values values_of) {
  PairedScores paired(sequences.scores.front().size());
  for (std::size_t s = 0; s < sequences.scores.size(); ++s) {
    if (!sequences.counts(s)) continue;
    std::vector<std::vector<double>> values;
    for (const TokenScores& one : sequences.scores[s]) {
      const auto& own = std::invoke(values_of, one);
      values.emplace_back(own.begin(), own.end());
    }
    const std::vector<std::span<const double>> spans(values.begin(), values.end());
    paired.add_tokens(std::to_string(sequences.text[s]), spans);
  }
  return paired;
}

/// One line that names texts that have the same weight as the longest text but are much shorter;
/// empty if there are none.
std::vector<std::string> short_text_warnings(const ScoredSequences& sequences,
                                             std::span<const std::string> names);

/// The metrics of the `c`-th configuration. `evaluation` must already contain the paired scores.
/// `block_tokens`: also report scores for blocks of this many tokens; 0: do not. Throws
/// std::runtime_error if a log-likelihood is not finite.
EvalScore score_of(const CacheConfig& config, std::uint32_t budget_tokens, std::size_t c,
                   const ScoredSequences& sequences, const Evaluation& evaluation,
                   std::size_t block_tokens);

// An evaluation as a tidy table and as a JSON object, and a reader of tidy tables of scores.

inline constexpr const char* kEvalCsv = "eval.csv";
inline constexpr const char* kEvalBlocksCsv = "blocks.csv";
inline constexpr const char* kEvalJson = "eval.json";
inline constexpr int kEvalFormat = 1;

/// CSV with one metric in a row:
/// text,policy,params,budget,budget_tokens,prefill,positions,seed,metric,value,stderr,count. `text`
/// is `all` for metrics over all texts. `texts`: their names.
std::string eval_csv(const Evaluation& evaluation, const std::vector<std::string>& texts);

/// CSV of KL, −ln p and, with drafts, acceptance of each text by block, in the format of
/// blocks_csv(). Differences between configurations are computed in pairs over these blocks.
std::string eval_blocks_csv(const Evaluation& evaluation, const std::vector<std::string>& texts);

/// A JSON object with `format`, `texts`, `tokens`, `configurations`, `pairs`, `recommendations` by
/// budget, `frontier` and `warnings`.
nlohmann::ordered_json eval_json(const Evaluation& evaluation,
                                 const std::vector<std::string>& texts);

/// Lines for standard error: about texts, and recommendation_warnings() of every budget.
std::vector<std::string> eval_warnings(const Evaluation& evaluation);

/// The columns from policy to seed that name a configuration in a row of a tidy table.
std::string config_columns(const CacheConfig& config, std::uint32_t budget_tokens);
inline constexpr std::string_view kConfigColumns =
    "policy,params,budget,budget_tokens,prefill,positions,seed";

/// Reads a record of a tidy table with the columns kConfigColumns (perhaps without budget_tokens),
/// metric, value, and perhaps stderr and count. The row's `trace` is the value in column `name`.
ResultRow score_row(const CsvRecord& record, std::string_view name);
/// Reads the rows of such a table. Their `trace` is the column `text`. Throws std::runtime_error
/// that names `file`, the line and the column.
std::vector<ResultRow> parse_score_rows(std::string_view text, std::string_view file);

}  // namespace kvlab
