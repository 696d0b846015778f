// Options for drafts, and what a command reports about them.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "engine/draft/drafting_decoder.hpp"
#include "tools/option_table.hpp"
#include "tools/options.hpp"

namespace kvlab {

struct DraftRequest {
  std::string policy, budget;  ///< of the drafter's cache; no policy: no drafts
  std::uint32_t gamma = 4;     ///< draft tokens per verification
  std::string tree;            ///< the text of --tree
};
/// `--draft-policy`, `--draft-budget`, `--gamma`, `--tree`.
void add_draft_options(OptionTable& table, DraftRequest& request);
/// Moves the drafter's policy and budget to `caches`, whose other options already describe the
/// drafter's cache. Throws std::invalid_argument for options that do not go together.
void take_drafter(const DraftRequest& request, const GivenOptions& given, CacheOptions& caches);
/// The requested trees. Reads the file of --tree. Throws std::invalid_argument or
/// std::runtime_error if the file lacks the acceptance and the times from which a tree is planned.
DraftOptions draft_options(const DraftRequest& request);

/// What was drafted, for --json.
nlohmann::ordered_json drafts_json(const DraftStats& stats);
/// For example "2.91 tokens per verification; 0.64 of the draft tokens were accepted".
std::string acceptance_text(const DraftStats& stats);
/// A sentence that says whether the drafts make decoding faster, with the measured times. "" if too
/// little was measured.
std::string speedup_text(const DraftStats& stats);

}  // namespace kvlab
