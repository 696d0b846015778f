// Policies from headers, compiled while kvlab runs: `--policy-source my_policy.hpp`.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
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

// What a compiler said of a policy's header, for its author.

/// A header does not compile. The one error of several lines: what its author has to mend.
struct DoesNotCompile : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// What the text calls that no policy has; else its own faults; if there are none, what
/// check_policy says of it, at `line`, where the struct begins. `folder`: where the text was
/// compiled; it is taken out.
std::string complaint(std::string log, const std::filesystem::path& folder,
                      const PolicySource& source, unsigned line);

// Compiled policies, kept between runs.

/// A folder of shared objects, each under a key that says all it was made of. Where the folder is
/// of no use, nothing is found and nothing is kept, and nobody is told: the caller compiles.
///
/// What is found here is run. So the folder is made for this user alone, and is not used if it, or
/// the one above, belongs to somebody else or may be written by others; and an object is not used
/// unless the sum of its bytes is the one that stands behind them.
class ObjectCache {
 public:
  /// `folder` as it is, or made with the one above.
  explicit ObjectCache(std::filesystem::path folder);

  /// The object that was kept under `key`, whole; or nothing.
  std::optional<std::filesystem::path> find(std::string_view key) const;
  /// Keeps a copy of `object`: whole or not at all, whoever else does the same.
  void keep(std::string_view key, const std::filesystem::path& object) const;

 private:
  std::filesystem::path path_of(std::string_view key) const;

  std::filesystem::path folder_;  // empty: of no use
};

}  // namespace kvlab
