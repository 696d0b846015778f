// A verdict in words and as data: for consoles, policy files and pages.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "sim/report/figure.hpp"
#include "sim/run/ranking.hpp"

namespace kvlab {
/// In words: who, by what, holding how much; who holds more; on what, and what was not measured.
std::string verdict_text(const Verdict& verdict, std::span<const Contender> contenders,
                         const VerdictScope& scope);

/// What to be wary of, one line each: few tokens, no error, memory that is not known, guards that
/// decide everything.
std::vector<std::string> verdict_warnings(const Verdict& verdict,
                                          std::span<const Contender> contenders,
                                          const VerdictScope& scope);

/// Both, `winner`, `ties`, `holds_more` and `frontier`, which is error against bytes.
nlohmann::ordered_json verdict_json(const Verdict& verdict, std::span<const Contender> contenders,
                                    const VerdictScope& scope);
/// Each standing: figure, how far behind, whether it ties with the first, what it holds.
nlohmann::ordered_json standings_json(const Ranking& ranking, const Figures& figures);
nlohmann::ordered_json difference_json(const Difference& difference);

// The report's words: what was asked, and what came out, with ties said as ties.

/// The series of `policy` (window, oracle_mass) that compares with `series`: the same prefill, and
/// the same positions if there is a choice. Nothing if the run has none.
std::optional<std::size_t> counterpart(const Figures& figures, std::size_t series,
                                       std::string_view policy);

/// A few sentences, as HTML: the verdict at `budget`, and how the winner stands to window and the
/// oracle. `tokens`: scored.
std::string answer_html(const Figures& figures, const BudgetColumn& budget,
                        const MetricInfo& metric, std::uint64_t tokens);

/// A table, as HTML: at each budget the best, those that tie with it (folded where they are many),
/// window and the oracle.
std::string best_by_budget_html(const Figures& figures, const std::vector<SeriesStyle>& styles,
                                const MetricInfo& metric, const std::string& caption = {});

/// A policy's label behind a dot of its colour.
std::string series_html(const Figures& figures, const std::vector<SeriesStyle>& styles,
                        std::size_t series);

}  // namespace kvlab
