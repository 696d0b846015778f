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
/// Compiles the policy of a header like those of policies/: with the host's compiler ($CXX,
/// otherwise the one that built kvlab, otherwise c++), with kvlab's flags, for this machine's
/// instruction set. Reuses the object that an earlier run compiled from the same input
/// (ObjectCache). The code stays loaded until the process ends. Throws std::invalid_argument for a
/// header that does not compile (with the compiler's messages and the header's line numbers), that
/// has no policy (with the messages of check_policy()), or whose name is taken or is not a word.
/// Throws std::runtime_error for a file that cannot be read, or if there is no compiler.
std::shared_ptr<const PolicyEntry> compile_policy_source(const std::filesystem::path& path);

/// Whether a policy of kvlab or an oracle has this name.
bool is_taken(std::string_view name);

/// Compiles several headers. Also throws if two policies have the same name.
CompiledPolicies compile_policy_sources(std::span<const std::string> paths);

/// The policy `name` of `compiled`. Throws std::invalid_argument unless it exists and its text has
/// the hash `xxh3`. `path` is where the text was; the message begins with `where`.
std::shared_ptr<const PolicyEntry> require_source(const CompiledPolicies& compiled,
                                                  const std::string& name, const std::string& path,
                                                  const std::string& xxh3,
                                                  const std::string& where);

// The compiler's messages about a policy's header, for its author.

/// A header does not compile. The only error of several lines: it shows what the author has to fix.
struct DoesNotCompile : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// Selects from the compiler's log: calls of what a policy does not have; otherwise the errors in
/// the text; otherwise the messages of check_policy(), at `line`, where the struct begins. Removes
/// `folder`, where the text was compiled, from paths.
std::string complaint(std::string log, const std::filesystem::path& folder,
                      const PolicySource& source, unsigned line);

// Compiled policies, cached between runs.

/// A folder of shared objects, each under a key that covers everything from which it was built. If
/// the folder is unusable, nothing is found or kept, and no error is reported: the caller compiles.
///
/// kvlab runs the code that it finds here. So the folder is created for this user alone, and is not
/// used if it or its parent belongs to another user or is writable by others. An object is not used
/// unless the checksum at its end matches its bytes.
class ObjectCache {
 public:
  /// Uses `folder` as it is, or creates it with its parent.
  explicit ObjectCache(std::filesystem::path folder);

  /// The complete object that was kept under `key`, or nullopt.
  std::optional<std::filesystem::path> find(std::string_view key) const;
  /// Stores a copy of `object` atomically, even if other processes store it at the same time.
  void keep(std::string_view key, const std::filesystem::path& object) const;

 private:
  std::filesystem::path path_of(std::string_view key) const;

  std::filesystem::path folder_;  // empty: unusable
};

}  // namespace kvlab
