// Several runs, evaluations or tasks beside each other.
#pragma once

#include <string>
#include <vector>

#include "engine/evaluation/pages/scores.hpp"

namespace kvlab {

/// One configuration at one budget in each of the runs that have it.
struct ComparedRow {
  std::string group, policy, budget;
  std::vector<std::optional<Average>> scores;  ///< by run
  std::optional<Difference> difference;        ///< the last run that has it minus the first
};

/// "0.010 (-0.002, 0.022), not significant".
std::string compared_text(const std::optional<Difference>& difference);

/// What several runs say together. Nothing is averaged over models.
struct Comparison {
  ScoreSet together;               ///< all of them; a series' parameters say which run it is of
  std::vector<std::string> names;  ///< of the runs, all different
  std::string metric;
  std::vector<ComparedRow> rows;  ///< of what two runs or more have
  std::string warning;            ///< that they are of different texts, or nothing
  std::vector<std::vector<Recommendation>> recommendations = {};  ///< by run, and budget
};

/// `metric`: empty for the one that decides in all of them. Throws std::invalid_argument: fewer
/// than two, of different kinds, no such metric in all.
Comparison compare(std::vector<ScoreSet> sets, const std::string& metric);

std::string compare_page(const Comparison& comparison);

}  // namespace kvlab
