// Running other programs, and temporary folders for their input and output.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "traces/base/files.hpp"

namespace kvlab {

/// A locked folder in TMPDIR that only this user can read. The destructor removes it. The
/// constructor also removes folders that killed processes left behind, which it recognizes because
/// they are not locked. On a file system without locks they stay.
class TemporaryFolder {
 public:
  /// Throws std::runtime_error if no folder can be created.
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

/// The file that contains this code: the program kvlab, or the Python extension module. Empty if
/// unknown.
std::filesystem::path program_file();

/// A file that was installed with the program (PREFIX/share/kvlab/FILE) or with the Python package
/// (kvlab/share/FILE). Returns nullopt if there is none, as in a build folder.
std::optional<std::filesystem::path> installed_file(const std::filesystem::path& file);

/// Runs words[0], found on PATH, without a shell, and writes its output to `log`. Files that the
/// program writes are limited to 64 MiB. Returns its exit code, or -1 if a signal ended it. Throws
/// std::system_error if it cannot be run, and Cancelled if this thread's work is cancelled.
int run_program(std::vector<std::string> words, const std::filesystem::path& log);

}  // namespace kvlab
