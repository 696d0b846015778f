// Recommendations as sentences, tables and data: for terminals, policy files and pages.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/run/ranking.hpp"

namespace kvlab {
class JsonFields;

/// A few sentences that say what to choose at the budget, why, and on what data.
std::string recommendation_text(const Recommendation& made);

/// A table of at most 80 columns, with one row per budget, and notes. The notes list the policies
/// that are not significantly different from the choice, choices that were made because of less
/// memory, policies over budget, and the scored texts. Ends with a line break.
std::string recommendations_text(std::span<const Recommendation> made);
/// The notes of recommendations_text(), not wrapped to lines.
std::vector<std::string> recommendation_notes(std::span<const Recommendation> made);

/// Wraps `text` to a paragraph of at most 80 columns, with a line break at the end.
std::string wrap_columns(const std::string& text);

/// Warnings, one line each, if few tokens were scored, no interval is known, memory is unknown, or
/// protected tokens fill the budget.
std::vector<std::string> recommendation_warnings(const Recommendation& made);
/// A warning that intervals are wide because few tokens were scored; "" if enough were.
std::string few_tokens_warning(std::uint64_t tokens);
/// The warnings about all recommendations. Equal warnings appear once.
std::vector<std::string> recommendation_warnings(std::span<const Recommendation> made);

/// A recommendation as JSON, with all its data (docs/reference/recommendations.md).
nlohmann::ordered_json recommendation_json(const Recommendation& made);
nlohmann::ordered_json recommendations_json(std::span<const Recommendation> made);
/// recommendations_from() and recommendation_in() read the value of `key`, which
/// recommendations_json() or recommendation_json() wrote. Both throw std::runtime_error that names
/// the file, the key and what is expected.
std::vector<Recommendation> recommendations_from(const JsonFields& fields, std::string_view key);
Recommendation recommendation_in(const JsonFields& fields, std::string_view key);
/// The ranking as JSON: for each policy its metric, its difference from the lowest mean, and its
/// memory.
nlohmann::ordered_json ranking_json(const Ranking& ranking, const MetricTable& metric_table);
nlohmann::ordered_json difference_json(const Difference& difference);

/// "0.0046 (0.0012 to 0.0080)", rounded to two significant digits of half the interval's width;
/// without an interval only the mean.
std::string difference_text(const Difference& difference, std::string_view to = " to ");

/// The series of `policy` (for example window or oracle_attention) that is comparable with
/// `series`. It has the same prefill mode. If there are several, it is the one with the same
/// positions. Returns nullopt if the run has none.
std::optional<std::size_t> counterpart(const MetricTable& metric_table, std::size_t series,
                                       std::string_view policy);

/// If the choice has a lower error than oracle_attention at some budget: a sentence that explains
/// how this is possible. Otherwise empty.
std::string oracle_sentence(const MetricTable& metric_table, const MetricInfo& metric);

/// The name of the page colour of a candidate; empty: none.
using ColourOf = std::function<std::string(const std::string& name)>;
/// The recommendations of the model or run `name`, in the JSON form that pages read: each
/// recommendation with the colour of its choice, then the notes and warnings of all. The notes do
/// not list the policies that are not significantly different, because the page's table has a
/// column for them.
nlohmann::ordered_json page_json(std::span<const Recommendation> made, const ColourOf& colour_of,
                                 std::string_view name = {});

}  // namespace kvlab
