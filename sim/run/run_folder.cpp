#include "sim/run/run_folder.hpp"

#include <fcntl.h>
#include <fmt/format.h>

#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/base/old_keys.hpp"

namespace kvlab {
namespace {

/// The start of each file. Raise its number if the fields of an outcome or the definition of a
/// metric change, so that an unfinished run does not mix two definitions.
constexpr std::string_view kMagic = "kvunit 7";
constexpr std::size_t kHashDigits = 16;

/// Calls each() for every field of an outcome, which is a number or a list of plain values. The
/// fields are written and read in this order. Their byte order is little-endian, as on all
/// supported machines.
template <class Outcome, class Each>
void for_fields(Outcome& outcome, Each each) {
  each(outcome.evictions);
  each(outcome.live_max);
  each(outcome.live_end);
  each(outcome.lru_fetches);
  each(outcome.stats.sums);
  each(outcome.stats.quantiles);
  each(outcome.stats.errors);
  each(outcome.stats.residual);
  each(outcome.stats.changes);
}

void append(std::string& bytes, const std::uint64_t& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}
template <class T>
void append(std::string& bytes, const std::vector<T>& values) {
  append(bytes, std::uint64_t{values.size()});
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

/// Reads fields in the order in which they were written. Throws std::runtime_error if the bytes end
/// too early.
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : rest_(bytes) {}

  void operator()(std::uint64_t& value) { take(&value, sizeof(value)); }
  template <class T>
  void operator()(std::vector<T>& values) {
    values.resize(count(sizeof(T)));
    take(values.data(), values.size() * sizeof(T));
  }
  /// Reads the length of a list whose entries have at least `min_bytes` bytes each. Throws if the
  /// remaining bytes cannot hold the list.
  std::size_t count(std::size_t min_bytes) {
    std::uint64_t value = 0;
    (*this)(value);
    if (value > rest_.size() / min_bytes) throw std::runtime_error("a length points past its end");
    return static_cast<std::size_t>(value);
  }
  bool empty() const { return rest_.empty(); }

 private:
  void take(void* to, std::size_t size) {
    if (size > rest_.size()) throw std::runtime_error("it ends too early");
    if (size) std::memcpy(to, rest_.data(), size);
    rest_.remove_prefix(size);
  }
  std::string_view rest_;
};

std::vector<HeadOutcome> unpack(const HeadTaskId& id, std::string_view bytes) {
  if (!bytes.starts_with(kMagic) || bytes.size() < kMagic.size() + kHashDigits)
    throw std::runtime_error("file is truncated or was written by another kvlab version");
  const std::string_view body = bytes.substr(0, bytes.size() - kHashDigits);
  if (bytes.substr(body.size()) != xxh3_hex(body))
    throw std::runtime_error("its checksum does not match");
  Unpacker unpacker(body.substr(kMagic.size()));
  HeadTaskId found;
  for (auto* part : {&found.job, &found.trace, &found.task}) unpacker(*part);
  if (found != id)
    throw std::runtime_error("it holds another head task, or belongs to another replay");
  std::vector<HeadOutcome> outcomes(unpacker.count(sizeof(std::uint64_t)));
  for (HeadOutcome& outcome : outcomes) for_fields(outcome, [&](auto& field) { unpacker(field); });
  if (!unpacker.empty()) throw std::runtime_error("there is data after its end");
  return outcomes;
}

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kLockFile = "lock", kJobFile = "job.json", kRunSubfolder = "run",
                           kUnitSuffix = ".unit";
constexpr std::size_t kMaxUnitBytes = std::size_t{1} << 40;
constexpr std::size_t kMaxJobBytes = std::size_t{256} << 20;

/// Whether `part`, the name of a file in RUN.part, is one that kvlab commands write.
bool is_ours(const std::string& part) {
  const std::string name = finished_name(part);
  return name == kLockFile || name == kJobFile || name == kRunSubfolder ||
         name.ends_with(kUnitSuffix);
}

std::vector<fs::path> entries(const fs::path& folder) {
  std::vector<fs::path> paths;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder))
    paths.push_back(entry.path());
  return paths;
}

/// The keys whose values differ, separated by commas, for an error message.
std::string differences(const json& a, const json& b) {
  std::string names;
  for (const auto& [key, value] : a.items())
    if (!b.contains(key) || b[key] != value) names += (names.empty() ? "" : ", ") + key;
  return names;
}

}  // namespace

std::string pack_head_task(const HeadTaskId& id, std::span<const HeadOutcome> outcomes) {
  std::string bytes(kMagic);
  for (const std::uint64_t part : {id.job, id.trace, id.task, std::uint64_t{outcomes.size()}})
    append(bytes, part);
  for (const HeadOutcome& outcome : outcomes)
    for_fields(outcome, [&](const auto& field) { append(bytes, field); });
  return bytes + xxh3_hex(bytes);
}

std::vector<HeadOutcome> unpack_head_task(const HeadTaskId& id, std::string_view bytes,
                                          std::string_view file) {
  try {
    return unpack(id, bytes);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(fmt::format("{}: {}", file, error.what()));
  }
}

RunFolder::RunFolder(fs::path run, const json& job, bool fresh, std::string command)
    : run_(std::move(run)), command_(std::move(command)) {
  if (!run_.has_filename()) run_ = run_.parent_path();  // converts "runs/a/" to "runs/a"
  if (fs::exists(fs::symlink_status(run_)))
    throw std::runtime_error(
        fmt::format("{}: exists already; give a new directory, or remove this one", run_.string()));
  staging_ = run_.string() + ".part";
  make_or_take();
  lock_.emplace(staging_ / kLockFile, O_RDWR | O_CREAT);
  lock_->require(
      fmt::format("{}: another kvlab {} is running in {}; wait for it, or give another directory",
                  run_.string(), command_, staging_.string()));
  if (fresh) clear();
  if (fs::exists(staging_ / kJobFile))
    resume(job);
  else
    start(job);
}

void RunFolder::make_or_take() const {
  std::error_code error;
  if (fs::create_directory(staging_, error)) return;
  if (error)
    throw std::runtime_error(
        fmt::format("{}: cannot be made: {}", staging_.string(), error.message()));
  if (!fs::is_directory(fs::symlink_status(staging_)))
    throw std::runtime_error(fmt::format(
        "{}: is not a directory; move it away, because a {} needs a directory of that name",
        staging_.string(), command_));
  for (const fs::path& entry : entries(staging_))
    if (!is_ours(entry.filename().string()))
      throw std::runtime_error(
          fmt::format("{}: was not made by `kvlab {}`, which stores its unfinished results in that "
                      "directory; move it away",
                      entry.string(), command_));
}

RunFolder::~RunFolder() {
  if (holds_units()) return;
  std::error_code ignored;
  fs::remove_all(staging_, ignored);
}

void RunFolder::start(const json& job) {
  clear();  // without job.json, results cannot be assigned to a run
  try {
    write_file_atomically(staging_ / kJobFile, job.dump(1) + "\n");
  } catch (const std::runtime_error& error) {
    const std::runtime_error named = add_run_name(error);
    fs::remove_all(staging_);
    throw named;
  }
}

void RunFolder::resume(const json& job) const {
  const fs::path path = staging_ / kJobFile;
  const json before = parse_result_json(read_text_file(path, kMaxJobBytes), path.string());
  if (before == job) return;
  throw std::runtime_error(
      fmt::format("{}: holds the unfinished results of another {} command (differs in: {}); repeat "
                  "that command to continue it, or add --fresh to delete them",
                  staging_.string(), command_, differences(job, before)));
}

void RunFolder::clear() const {
  for (const fs::path& entry : entries(staging_))
    if (entry.filename() != kLockFile) fs::remove_all(entry);
}

bool RunFolder::holds_units() const {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(staging_, ignored))
    if (entry.path().extension() == kUnitSuffix && entry.is_regular_file(ignored)) return true;
  return false;
}

fs::path RunFolder::unit_path(std::size_t trace, std::size_t unit) const {
  return staging_ / fmt::format("trace{}-unit{}{}", trace, unit, kUnitSuffix);
}

std::optional<std::string> RunFolder::read_unit(std::size_t trace, std::size_t unit) const {
  const fs::path path = unit_path(trace, unit);
  if (!fs::exists(fs::symlink_status(path))) return std::nullopt;
  return read_text_file(path, kMaxUnitBytes);
}

void RunFolder::write_unit(std::size_t trace, std::size_t unit, const std::string& bytes) const {
  try {
    write_file_atomically(unit_path(trace, unit), bytes);
  } catch (const std::runtime_error& error) {
    throw add_run_name(error);
  }
}

void RunFolder::commit(Run& run) {
  commit([&](const fs::path& made) { save_run(run, made); });
}

void RunFolder::commit(const std::function<void(const fs::path&)>& save) {
  const fs::path made = staging_ / kRunSubfolder;
  try {
    fs::remove_all(made);
    fs::create_directory(made);
    save(made);
    fs::rename(made, run_);
    sync_folder_of(run_);
  } catch (const std::runtime_error& error) {
    throw add_run_name(error);
  }
  std::error_code ignored;
  fs::remove_all(staging_, ignored);
}

/// Replaces the name of the staging folder in the message by that of the run, because users know
/// only the name of the run.
std::runtime_error RunFolder::add_run_name(const std::exception& error) const {
  std::string text = error.what();
  for (const fs::path& inner : {staging_ / kRunSubfolder, staging_})
    if (const std::size_t at = text.find(inner.string()); at != std::string::npos)
      text.replace(at, inner.string().size(), run_.string());
  if (holds_units())
    text += fmt::format("; the finished part is kept in {}, and the same command continues it",
                        staging_.string());
  return std::runtime_error(text);
}

}  // namespace kvlab
