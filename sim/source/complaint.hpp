// What a compiler said of a policy's header, for its author.
#pragma once

#include <filesystem>
#include <stdexcept>
#include <string>

#include "policies/entry.hpp"

namespace kvlab {

/// A header does not compile. The one error of several lines: what its author has to mend.
struct DoesNotCompile : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// What the text calls that no policy has; else its own faults; if there are none, what
/// check_policy says of it, at `line`, where the struct begins. `folder`: where the text was
/// compiled; it is taken out.
std::string complaint(std::string log, const std::filesystem::path& folder,
                      const PolicySource& source, unsigned line);

}  // namespace kvlab
