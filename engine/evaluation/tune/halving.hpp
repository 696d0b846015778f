// A halving in the end-to-end evaluation: many configurations over little text, few over all of it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "sim/run/comparison.hpp"

namespace kvlab {

/// Why a configuration takes no part in the next round.
enum class HalvingFate {
  stays,
  eliminated,  ///< the leader is ahead, in pairs; by 5% of its KL until the last round
  dropped      ///< not shown to be behind; the work would have been too much
};

std::string_view name_of(HalvingFate fate);

/// Why successive halving is over.
enum class HalvingEnd {
  ahead,  ///< one is left
  alike,  ///< those that are left do not differ significantly, nor would be if the rest of the text
          ///< were like that so far
  text  ///< all text has been run, and several are left
};

std::string_view name_of(HalvingEnd end);

struct HalvingEntry {
  std::size_t configuration;
  double kl;          ///< mean nats over all text so far
  Difference behind;  ///< its KL less the leader's
  HalvingFate fate;
};

struct HalvingRound {
  std::vector<std::size_t> texts;     ///< those that were added
  std::vector<HalvingEntry> entries;  ///< the leader first
};

struct Halving {
  std::vector<HalvingRound> rounds;
  /// The winner, and behind it those that do not differ significantly from it.
  std::vector<std::size_t> first;
  HalvingEnd end = HalvingEnd::text;
  std::uint64_t work =
      0;  ///< configuration-tokens of the end-to-end evaluation, the full cache's too
  std::uint64_t exhaustive = 0;   ///< what all of the sweep over all texts would have been
  bool limited = false;           ///< configurations were spared for the work's sake
  std::vector<std::size_t> last;  ///< configurations of the last round
  PairedScores kl{0};             ///< theirs, in that order, over all text that was run
};

struct HalvingInput {
  std::size_t configurations;          ///< the sweep, 0 being the first of the offline replay
  std::vector<std::uint64_t> lengths;  ///< of the texts, tokens
  double share = 0.25;  ///< of the exhaustive work; two configurations always run, over all texts
};

/// Runs the configurations (indices) and the full cache over a text: KL by token
/// [configuration][token].
using HalvingRunner = std::function<std::vector<std::vector<double>>(
    std::size_t text, std::span<const std::size_t> configurations)>;

/// Texts by round: a quarter of them, as many again, the rest.
std::vector<std::vector<std::size_t>> halving_texts(std::size_t texts);

/// Configuration-tokens that are still to come from a text on, which runs `configurations`, if
/// every later round has half of the one before it.
double work_from(const HalvingInput& field, std::size_t text, std::size_t configurations);
/// How many of the field the work allows in the first round.
std::size_t first_round_size(const HalvingInput& field);

/// Each round runs those that are left over more text. Those that the leader is ahead of leave; so
/// do the last in order where the next rounds, halved each, would be more work than there may be.
/// Ends as HalvingEnd says.
Halving successive_halving(const HalvingInput& field, const HalvingRunner& run);

}  // namespace kvlab
