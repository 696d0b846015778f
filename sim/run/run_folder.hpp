// RUN.part, the folder in which a run is built, next to the folder RUN of the complete run. Until
// the run is complete, RUN.part holds the results of finished units of work, so that a command that
// was killed can be continued. RUN appears only when the run is complete.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/run/run.hpp"
#include "sim/run/tabulate.hpp"
#include "traces/base/files.hpp"

namespace kvlab {

// The results of a finished head task as bytes. They are stored in this form until the run is
// complete, and sent in this form between processes.

/// Identifies one head task of one replay.
struct HeadTaskId {
  std::uint64_t job = 0;  ///< XXH3-64 of the job, see RunFolder
  std::uint64_t trace = 0, task = 0;

  bool operator==(const HeadTaskId&) const = default;
};

/// Packs the outcomes of all configurations without loss. The last bytes are an XXH3-64 of all
/// other bytes.
std::string pack_head_task(const HeadTaskId& id, std::span<const HeadOutcome> outcomes);

/// Reads the output of pack_head_task(). Throws std::runtime_error with a text that begins with
/// `file` if the bytes are truncated, changed, or belong to another head task than `id`.
std::vector<HeadOutcome> unpack_head_task(const HeadTaskId& id, std::string_view bytes,
                                          std::string_view file);

class RunFolder {
 public:
  /// Creates RUN.part, or continues with the RUN.part that a killed command with the same job left
  /// behind. With `fresh`, its contents are deleted first. `command`: the command that makes the
  /// run, "replay" or "task". Throws std::runtime_error if RUN exists, if RUN.part belongs to
  /// another job (the message names the difference) or to none, or if another process uses it.
  RunFolder(std::filesystem::path run, const nlohmann::json& job, bool fresh,
            std::string command = "replay");
  /// If commit() was not called, removes RUN.part unless it holds a finished unit of work.
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::filesystem::path& staging() const { return staging_; }
  std::filesystem::path unit_path(std::size_t trace, std::size_t unit) const;
  /// The bytes of a finished unit, or nullopt.
  std::optional<std::string> read_unit(std::size_t trace, std::size_t unit) const;
  /// Stores the output of pack_head_task(). Callable from any thread. Throws std::runtime_error
  /// that names RUN.
  void write_unit(std::size_t trace, std::size_t unit, const std::string& bytes) const;
  /// Calls `save` with a folder, into which it must write the run's files. Then renames this folder
  /// to RUN, and removes RUN.part. Throws std::runtime_error that names RUN.
  void commit(const std::function<void(const std::filesystem::path&)>& save);
  void commit(Run& run);
  /// Returns `error` with the name RUN in place of RUN.part. If there is finished work, its
  /// location is appended.
  std::runtime_error add_run_name(const std::exception& error) const;

 private:
  void make_or_take() const;
  void start(const nlohmann::json& job);
  void resume(const nlohmann::json& job) const;
  void clear() const;
  bool holds_units() const;

  std::filesystem::path run_, staging_;
  std::string command_;
  std::optional<FileLock> lock_;
};

}  // namespace kvlab
