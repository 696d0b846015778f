// A verdict in words and as data: for consoles, policy files and pages.
#pragma once

#include <nlohmann/json_fwd.hpp>

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

}  // namespace kvlab
