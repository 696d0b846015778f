// Policies from headers, compiled while kvlab runs: `--policy-source my_policy.hpp`.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "policies/entry.hpp"

namespace kvlab {

/// Compiles the policy of a header like those of policies/ with the host's compiler ($CXX, else the
/// one that built kvlab, else c++), by the flags of kvlab, for this machine's instruction set; or
/// takes what an earlier run made of the same (object_cache.hpp). The code stays loaded until the
/// process ends. Throws std::invalid_argument: a header that does not compile (with the compiler's
/// own words, at the header's own lines), that is no policy (with what check_policy says), whose
/// name is taken or not a word; std::runtime_error: a file that cannot be read, no compiler.
std::shared_ptr<const PolicyEntry> compile_policy_source(const std::filesystem::path& path);

/// Whether a policy of kvlab, or a reference, has this name.
bool is_taken(std::string_view name);

/// Several. Throws as well where two have one name.
CompiledPolicies compile_policy_sources(std::span<const std::string> paths);

/// The policy `name` of `compiled`. Throws std::invalid_argument unless it is there, from a text of
/// that hash. `path` is where the text was; `where` begins the message.
std::shared_ptr<const PolicyEntry> require_source(const CompiledPolicies& compiled,
                                                  const std::string& name, const std::string& path,
                                                  const std::string& xxh3,
                                                  const std::string& where);

}  // namespace kvlab
