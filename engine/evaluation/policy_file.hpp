// policy.json: a chosen policy, with everything that the engine needs to run it.
#pragma once

#include <filesystem>
#include <string>

#include "engine/decoder.hpp"
#include "traces/base/json.hpp"

namespace kvlab {

struct PolicyFile {
  CacheConfig cache;                ///< with a budget in tokens
  std::string model, weights_xxh3;  ///< the model that it was chosen on
  nlohmann::json run;  ///< evidence for people to read: hash of the run, metric, scores, and the
                       ///< policies that do not differ significantly
};

/// Reads a policy file. `compiled`: the policies of --policy-source. Throws std::runtime_error that
/// names the file and the key in these cases: the file is not valid or has a later format; it has
/// an unknown key, an unknown policy or a reserved word; its protected tokens do not fit a budget;
/// its policy is an oracle or `full`; its policy was compiled from a different source.
PolicyFile read_policy_file(const std::filesystem::path& path,
                            const CompiledPolicies& compiled = {});

/// Writes a policy file: first a temporary file, which is then renamed. Throws std::runtime_error
/// if the file cannot be written.
void write_policy_file(const std::filesystem::path& path, const PolicyFile& file);

/// Throws std::runtime_error if the file has budgets by head that do not fit the model's shape.
void check_shape(const PolicyFile& file, const CacheShape& model);

/// A line for standard error if `file` was chosen on other weights; else empty.
std::string model_mismatch(const PolicyFile& file, const std::string& model,
                           const std::string& weights_xxh3);

}  // namespace kvlab
