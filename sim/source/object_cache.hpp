// Compiled policies, kept between runs.
#pragma once

#include <filesystem>
#include <optional>
#include <string_view>

namespace kvlab {

/// A folder of shared objects, each under a key that says all it was made of. Where the folder is
/// of no use, nothing is found and nothing is kept, and nobody is told: whoever asks compiles.
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
