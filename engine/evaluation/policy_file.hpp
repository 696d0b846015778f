// policy.json: a policy that was chosen, with everything the engine needs to run it.
#pragma once

#include <filesystem>
#include <string>

#include "engine/decoder.hpp"
#include "traces/base/json.hpp"

namespace kvlab {

inline constexpr int kPolicyFormat = 1;

struct PolicyFile {
  CacheConfig cache;                ///< its budget in tokens
  std::string model, weights_xxh3;  ///< the model it was chosen on
  nlohmann::json run;  ///< where it came from, for people: hash, metric, evidence, what does not
                       ///< differ significantly
};

/// `compiled` are the policies of --policy-source. Throws std::runtime_error that names the
/// file and key: not valid, a later format, an unknown key or policy, protected tokens that do not
/// fit a budget, a reserved word, a reference or `full`, a policy that was compiled from another
/// text.
PolicyFile read_policy_file(const std::filesystem::path& path,
                            const CompiledPolicies& compiled = {});

/// Written to a temporary file and renamed. Throws std::runtime_error.
void write_policy_file(const std::filesystem::path& path, const PolicyFile& file);

/// Throws std::runtime_error if budgets by head are not of this shape.
void check_shape(const PolicyFile& file, const CacheShape& model);

/// One line for standard error if `file` was chosen on other weights than these; else empty.
std::string model_mismatch(const PolicyFile& file, const std::string& model,
                           const std::string& weights_xxh3);

}  // namespace kvlab
