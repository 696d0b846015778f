// A race in the closed loop: many contenders over little text, few over all of it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "sim/run/comparison.hpp"

namespace kvlab {

/// Why a contender takes no part in the next round.
enum class RaceFate {
  stays,
  behind,  ///< the leader is ahead, in pairs; by 5% of its KL until the last round
  spared   ///< not shown to be behind; the work would have been too much
};

std::string_view name_of(RaceFate fate);

/// Why a race is over.
enum class RaceEnd {
  ahead,  ///< one is left
  alike,  ///< those that are left cannot be told apart, nor would be if the rest of the text were
          ///< like that so far
  text    ///< all text has been run, and several are left
};

std::string_view name_of(RaceEnd end);

struct RaceEntry {
  std::size_t contender;
  double kl;          ///< mean nats over all text so far
  Difference behind;  ///< its KL less the leader's
  RaceFate fate;
};

struct RaceRound {
  std::vector<std::size_t> texts;  ///< those that were added
  std::vector<RaceEntry> entries;  ///< the leader first
};

struct Race {
  std::vector<RaceRound> rounds;
  /// The winner, and behind it those that cannot be told apart from it.
  std::vector<std::size_t> first;
  RaceEnd end = RaceEnd::text;
  std::uint64_t work = 0;         ///< configuration-tokens of the closed loop, the full cache's too
  std::uint64_t exhaustive = 0;   ///< what all of the grid over all texts would have been
  bool limited = false;           ///< contenders were spared for the work's sake
  std::vector<std::size_t> last;  ///< contenders of the last round
  PairedScores kl{0};             ///< theirs, in that order, over all text that was run
};

struct RaceField {
  std::size_t contenders;              ///< the grid, 0 being the open loop's first
  std::vector<std::uint64_t> lengths;  ///< of the texts, tokens
  double share = 0.25;  ///< of the exhaustive work; two contenders always run, over all texts
};

/// Runs the contenders (indices) and the full cache over a text: KL by token [contender][token].
using RaceRun = std::function<std::vector<std::vector<double>>(
    std::size_t text, std::span<const std::size_t> contenders)>;

/// Texts by round: a quarter of them, as many again, the rest.
std::vector<std::vector<std::size_t>> race_texts(std::size_t texts);

/// Configuration-tokens that are still to come from a text on, which runs `contenders`, if every
/// later round has half of the one before it.
double work_from(const RaceField& field, std::size_t text, std::size_t contenders);
/// How many of the field the work allows in the first round.
std::size_t first_contenders(const RaceField& field);

/// Each round runs those that are left over more text. Those that the leader is ahead of leave; so
/// do the last in order where the next rounds, halved each, would be more work than there may be.
/// Ends as RaceEnd says.
Race run_race(const RaceField& field, const RaceRun& run);

}  // namespace kvlab
