// Recommendations in words, as tables and as data: for terminals, policy files and pages.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/report/figure.hpp"
#include "sim/run/ranking.hpp"

namespace kvlab {
class JsonFields;

/// In a few sentences: what to choose at the budget, why, and on what that rests.
std::string recommendation_text(const Recommendation& made);

/// A table of at most 80 columns, a row for each budget, and lines about it: what is not
/// significantly different, what was chosen for its memory, what is over budget, on what texts.
/// Ends with a line break.
std::string recommendations_text(std::span<const Recommendation> made);
/// The lines below that table, not wrapped.
std::vector<std::string> recommendation_notes(std::span<const Recommendation> made);

/// A line as a paragraph of at most 80 columns, with its line break.
std::string in_columns(const std::string& text);

/// What to be careful about, one line each: few tokens, no interval, memory that is not known,
/// protected tokens that fill the budget.
std::vector<std::string> recommendation_warnings(const Recommendation& made);
/// That so few tokens were scored that intervals are wide; "" where they were enough.
std::string few_tokens_warning(std::uint64_t tokens);
/// Of all budgets, each once.
std::vector<std::string> recommendation_warnings(std::span<const Recommendation> made);

/// Everything that a recommendation says (docs/reference/recommendations.md).
nlohmann::ordered_json recommendation_json(const Recommendation& made);
nlohmann::ordered_json recommendations_json(std::span<const Recommendation> made);
/// What those wrote under `key`. Throw std::runtime_error that names the file, the key and what
/// should be there.
std::vector<Recommendation> recommendations_from(const JsonFields& fields, std::string_view key);
Recommendation recommendation_in(const JsonFields& fields, std::string_view key);
/// Each standing: the metric, the difference from the lowest mean, memory.
nlohmann::ordered_json standings_json(const Ranking& ranking, const MetricTable& metric_table);
nlohmann::ordered_json difference_json(const Difference& difference);

/// "0.0046 (0.0012 to 0.0080)", two digits of the interval; without an interval the mean alone.
std::string difference_text(const Difference& difference, std::string_view to = " to ");

/// The series of `policy` (window, oracle_attention) that compares with `series`: the same prefill,
/// and the same positions if there is a choice. Nothing if the run has none.
std::optional<std::size_t> counterpart(const MetricTable& metric_table, std::size_t series,
                                       std::string_view policy);

/// A sentence where the choice has less error than oracle_attention at a budget; empty where it has
/// not.
std::string oracle_sentence(const MetricTable& metric_table, const MetricInfo& metric);

/// The name of the page colour of a candidate; empty: none.
using ColourOf = std::function<std::string(const std::string& name)>;
/// The first thing on a page: a row for each budget, the lines about it, and the next command,
/// which is text. `caption` may be empty.
std::string recommendations_html(std::span<const Recommendation> made, std::string_view next,
                                 const ColourOf& colour_of, std::string_view caption = {});

/// A policy's label behind a dot of its colour.
std::string series_html(const MetricTable& metric_table, const std::vector<SeriesStyle>& styles,
                        std::size_t series);

}  // namespace kvlab
