// A file that one process at a time makes.
#pragma once

#include <filesystem>
#include <optional>

#include "traces/base/files.hpp"

namespace kvlab {

/// A claim to write PATH, held from a command's beginning to its end: of two that claim one PATH at
/// once, the second is refused. It is an empty PATH.XXXXXXXX.part under a lock, which goes with the
/// claim; one that a killed process left has no lock, is none, and is taken away.
class OutputClaim {
 public:
  /// Throws std::runtime_error naming PATH where it is claimed already, or no file can be made
  /// there.
  explicit OutputClaim(const std::filesystem::path& path);

 private:
  std::optional<OutputPlace> place_;  // until the part is there
  AtomicFile part_;                   // never committed
};

}  // namespace kvlab
