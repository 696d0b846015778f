// Where a run is made: RUN.part, beside RUN. It holds the finished units of work until the run is
// whole, so that a command that was killed can go on; RUN itself appears whole or not at all.
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

// A finished head task as bytes: what lies on disk until a run is whole, and what processes send
// each other.

/// Which head task of which replay.
struct HeadTaskId {
  std::uint64_t job = 0;  ///< XXH3-64 of what is computed: RunFolder's
  std::uint64_t trace = 0, task = 0;

  bool operator==(const HeadTaskId&) const = default;
};

/// The outcomes by configuration, exactly; ends in an XXH3-64 of all that is before it.
std::string pack_head_task(const HeadTaskId& id, std::span<const HeadOutcome> outcomes);

/// Reads what pack_head_task wrote. Throws std::runtime_error that begins with `file`: cut,
/// changed, or another head task than `id`.
std::vector<HeadOutcome> unpack_head_task(const HeadTaskId& id, std::string_view bytes,
                                          std::string_view file);

class RunFolder {
 public:
  /// Makes RUN.part, or takes up the one that a killed command of the same job left. `fresh` throws
  /// away whatever it left there. `command`: whose run it is, "replay" or "task". Throws
  /// std::runtime_error: RUN exists, RUN.part is another job's (named by what differs) or none's at
  /// all, another process is at it.
  RunFolder(std::filesystem::path run, const nlohmann::json& job, bool fresh,
            std::string command = "replay");
  /// Uncommitted: keeps RUN.part if it holds a finished unit.
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::filesystem::path& staging() const { return staging_; }
  std::filesystem::path unit_path(std::size_t trace, std::size_t unit) const;
  /// A finished unit's bytes, or nothing.
  std::optional<std::string> read_unit(std::size_t trace, std::size_t unit) const;
  /// What pack_head_task made; from any thread. Throws std::runtime_error in the name of RUN.
  void write_unit(std::size_t trace, std::size_t unit, const std::string& bytes) const;
  /// Has the run's files written into a folder, gives it RUN's name, removes RUN.part. Throws
  /// std::runtime_error in the name of RUN.
  void commit(const std::function<void(const std::filesystem::path&)>& save);
  void commit(Run& run);
  /// `error` with RUN for RUN.part, and where what is finished is kept, if anything is.
  std::runtime_error in_name_of_run(const std::exception& error) const;

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
