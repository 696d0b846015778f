// An evaluation as a tidy table and as a JSON object, and tidy tables of scores read back.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "engine/loop/eval/score.hpp"
#include "sim/run/csv.hpp"
#include "sim/run/results.hpp"

namespace kvlab {

inline constexpr const char* kEvalCsv = "eval.csv";
inline constexpr const char* kEvalJson = "eval.json";
inline constexpr int kEvalFormat = 1;

/// text,policy,params,budget,budget_tokens,prefill,positions,seed,metric,value,stderr,count: one
/// figure a row; `text` is `all` for what is over all of them. `texts` are their names.
std::string eval_csv(const Evaluation& evaluation, const std::vector<std::string>& texts);

/// `format`, `texts`, `tokens`, `configurations`, `pairs`, `contenders` and `verdicts` by budget,
/// `frontier` and `warnings`.
nlohmann::ordered_json eval_json(const Evaluation& evaluation,
                                 const std::vector<std::string>& texts);

/// What to say on standard error, one line each: verdict_warnings() of every budget.
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
