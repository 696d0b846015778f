// Successive halving in the end-to-end evaluation: runs many configurations over little text, and
// few configurations over all of it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "sim/run/comparison.hpp"

namespace kvlab {

/// Whether a configuration takes part in the next round.
enum class HalvingStatus {
  stays,
  eliminated,  ///< the leader is significantly better; before the last round: by significantly
               ///< more than 5% of the leader's KL
  dropped      ///< not shown to be worse, but left out to stay within the work limit
};

std::string_view name_of(HalvingStatus status);

/// Why successive halving ended.
enum class HalvingEnd {
  ahead,  ///< one configuration is left
  alike,  ///< the remaining configurations do not differ significantly, and probably would not
          ///< over all text either (see stays_similar() in halving.cpp)
  text    ///< all text was run, and several configurations are left
};

std::string_view name_of(HalvingEnd end);

struct HalvingEntry {
  std::size_t configuration;
  double kl;               ///< mean over all text so far, in nats
  Difference from_lowest;  ///< its KL minus the leader's
  HalvingStatus status;
};

struct HalvingRound {
  std::vector<std::size_t> texts;     ///< indices of the texts added in this round
  std::vector<HalvingEntry> entries;  ///< the leader first
};

struct Halving {
  std::vector<HalvingRound> rounds;
  /// The winner, followed by the configurations that do not differ significantly from it.
  std::vector<std::size_t> first;
  HalvingEnd end = HalvingEnd::text;
  /// Work of the end-to-end evaluation in configuration-tokens (a token that one configuration
  /// runs), including the full cache.
  std::uint64_t work = 0;
  std::uint64_t exhaustive = 0;  ///< configuration-tokens of the whole sweep over all texts
  bool limited = false;  ///< whether configurations were left out to stay within the work limit
  std::vector<std::size_t> last;  ///< configurations of the last round
  PairedScores kl{0};             ///< scores of `last`, in its order, over all text that was run
};

struct HalvingInput {
  std::size_t configurations;  ///< number of configurations in the sweep, in the order of the
                               ///< offline replay
  std::vector<std::uint64_t> lengths;  ///< lengths of the texts in tokens
  double share = 0.25;  ///< limit of the work, as a share of the exhaustive work; two
                        ///< configurations always run over all texts
};

/// Runs configurations (indices) and the full cache over a text. Returns the KL of each token,
/// [configuration][token].
using HalvingRunner = std::function<std::vector<std::vector<double>>(
    std::size_t text, std::span<const std::size_t> configurations)>;

/// The texts of each round. The first and the second round each have a quarter of the texts (at
/// least one), and the third has the rest.
std::vector<std::vector<std::size_t>> halving_texts(std::size_t texts);

/// The work in configuration-tokens for `text` and all later texts. Assumes that `configurations`
/// configurations run in the round of `text`, and in each later round half as many as in the round
/// before.
double work_from(const HalvingInput& field, std::size_t text, std::size_t configurations);
/// How many configurations the work limit allows in the first round.
std::size_t first_round_size(const HalvingInput& field);

/// Runs successive halving. Each round runs the remaining configurations over more text and
/// eliminates those that are significantly worse than the leader. A round also drops the
/// configurations with the highest KL if the work limit requires it. For this, it assumes that each
/// later round has half as many configurations as the round before. Ends for one of the reasons in
/// HalvingEnd.
Halving successive_halving(const HalvingInput& field, const HalvingRunner& run);

}  // namespace kvlab
