// Compiles policies from headers while kvlab runs: `--policy-source my_policy.hpp`.
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
/// Compiles the policy of a header that has the form of the headers in policies/. Uses the compiler
/// of this machine ($CXX, otherwise the one that built kvlab, otherwise c++) with kvlab's flags,
/// for this machine's instruction set. Reuses the object that an earlier run compiled from the same
/// input (ObjectCache). The code stays loaded until the process ends. Throws std::invalid_argument
/// if the header does not compile (with the compiler's messages and the header's line numbers), has
/// no policy (with the messages of check_policy()), or if the policy's name is already used or is
/// not a word. Throws std::runtime_error if the file cannot be read or there is no compiler.
std::shared_ptr<const PolicyEntry> compile_policy_source(const std::filesystem::path& path);

/// Whether a built-in policy or an oracle has this name.
bool is_taken(std::string_view name);

/// Compiles several headers. Also throws if two policies have the same name.
CompiledPolicies compile_policy_sources(std::span<const std::string> paths);

/// Returns the policy `name` of `compiled`. Throws std::invalid_argument, with a message that
/// begins with `where`, if the policy does not exist or the hash of its text differs from `xxh3`.
/// `path` is the path that the header had when the results were made; it appears only in the
/// message.
std::shared_ptr<const PolicyEntry> require_source(const CompiledPolicies& compiled,
                                                  const std::string& name, const std::string& path,
                                                  const std::string& xxh3,
                                                  const std::string& where);

// Selects those of the compiler's messages that help the author of a policy.

/// The error for a header that does not compile. Unlike other errors, its message has several
/// lines, because it contains the compiler's messages.
struct DoesNotCompile : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// Selects messages from the compiler's log. If the policy calls functions that a policy cannot
/// use, returns an error with their names. Otherwise returns the errors in the policy's text. If
/// there are none, returns the messages of check_policy(), each with the line of the hook or, if no
/// hook is known, with `line`, where the struct begins. If there are none of these either, returns
/// the whole log. Removes the path of `folder`, in which the text was compiled, from the messages.
std::string complaint(std::string log, const std::filesystem::path& folder,
                      const PolicySource& source, unsigned line);

// The cache of compiled policies, which later runs reuse.

/// A folder of shared objects. The key of an object covers everything from which it was built. If
/// the folder is unusable, find() finds nothing and keep() does nothing. This is not reported as an
/// error, because the caller then compiles the policy.
///
/// kvlab runs the code that it finds in this folder. So the folder is created with access for this
/// user only, and is not used if the folder or its parent belongs to another user or is writable by
/// others. An object is not used unless the checksum at its end matches its bytes.
class ObjectCache {
 public:
  /// Uses `folder`. If it does not exist, creates it and its parent.
  explicit ObjectCache(std::filesystem::path folder);

  /// The path of the object that was stored under `key`, or nullopt if there is no complete one.
  std::optional<std::filesystem::path> find(std::string_view key) const;
  /// Stores a copy of `object` atomically, even if other processes store it at the same time.
  void keep(std::string_view key, const std::filesystem::path& object) const;

 private:
  std::filesystem::path path_of(std::string_view key) const;

  std::filesystem::path folder_;  // empty if the folder is unusable
};

}  // namespace kvlab
