// Other programs, and folders for what they read and write.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "traces/base/files.hpp"

namespace kvlab {

/// A folder in TMPDIR that only this user can read, under a lock, and that goes with this object.
/// What killed processes left, which has no lock, goes before the next one is made. (Some file
/// systems have no locks: there it stays.)
class TemporaryFolder {
 public:
  /// Throws std::runtime_error if none can be made.
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::filesystem::path& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
  std::optional<FileLock> lock_;
};

/// That holds this code: the program, or a module with the command in it. Empty if it cannot be
/// told.
std::filesystem::path program_file();

/// A file that was installed with the program (PREFIX/share/kvlab/FILE) or with the Python package
/// (kvlab/share/FILE). Nothing if no such file exists, as in a build folder.
std::optional<std::filesystem::path> installed_file(const std::filesystem::path& file);

/// Runs words[0], found on PATH, without a shell; all that it says is written to `log`. No file
/// that it writes may be larger than 64 MiB. Returns its exit code, -1 if a signal ended it. Throws
/// std::system_error: it cannot be run; Cancelled.
int run_program(std::vector<std::string> words, const std::filesystem::path& log);

}  // namespace kvlab
