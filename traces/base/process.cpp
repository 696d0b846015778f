#include "traces/base/process.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <thread>

#include "traces/base/cancel.hpp"

namespace kvlab {
namespace {
constexpr rlim_t kMaxBytes = rlim_t{64} << 20;
}

namespace {

constexpr std::string_view kScratch = "kvlab-scratch-", kTemplate = "XXXXXX";

/// The folder in which scratch folders are created: TMPDIR, or /tmp if TMPDIR is unset or empty.
std::filesystem::path folder_of_scratch() {
  const char* const requested = ::getenv("TMPDIR");
  if (!requested || !*requested) return "/tmp";
  std::error_code error;
  std::filesystem::path parent = requested;
  if (!std::filesystem::is_directory(parent, error) || error)
    throw std::runtime_error(
        "TMPDIR: should be a directory that can be written to; unset it to use /tmp");
  return parent;
}

/// Whether `path` is a scratch folder of this user, and not a link to one.
bool is_own_scratch(const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  struct stat found {};
  return name.size() == kScratch.size() + kTemplate.size() && name.starts_with(kScratch) &&
         ::lstat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode) &&
         found.st_uid == ::geteuid();
}

void remove_abandoned(const std::filesystem::path& parent) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(parent, ignored)) {
    if (!is_own_scratch(entry.path())) continue;
    const FileLock lock(entry.path(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    if (lock.is_held()) std::filesystem::remove_all(entry.path(), ignored);
  }
}

}  // namespace

TemporaryFolder::TemporaryFolder() {
  const std::filesystem::path parent = folder_of_scratch();
  remove_abandoned(parent);
  do {  // another process may remove the folder before it is locked; then repeat
    std::string name = (parent / kScratch).string().append(kTemplate);
    if (!mkdtemp(name.data()))
      throw std::runtime_error(
          fmt::format("{}: cannot be made: {}", name, std::generic_category().message(errno)));
    path_ = name;
    lock_.emplace(path_, O_RDONLY | O_DIRECTORY);
  } while (lock_->held_by_another() || !std::filesystem::exists(path_));
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

namespace {

/// Starts the program in a new process group; its output goes to `log`.
pid_t start(std::vector<std::string>& words, const std::filesystem::path& log) {
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t streams;
  posix_spawn_file_actions_init(&streams);
  posix_spawn_file_actions_addopen(&streams, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&streams, STDOUT_FILENO, log.c_str(),
                                   O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&streams, STDOUT_FILENO, STDERR_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
  // This process ignores these signals. In the program they get their default action, which ends
  // it.
  sigset_t ignored_here;
  sigemptyset(&ignored_here);
  for (const int signal : {SIGXFSZ, SIGPIPE}) sigaddset(&ignored_here, signal);
  posix_spawnattr_setsigdefault(&attributes, &ignored_here);
  pid_t process = 0;
  const int error =
      posix_spawnp(&process, arguments[0], &streams, &attributes, arguments.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&streams);
  if (error) throw std::system_error(error, std::generic_category());
  return process;
}

/// Waits at most 5 ms. Returns whether the process has ended; `status` is then its exit status.
bool has_ended(pid_t process, int& status) {
  const pid_t found = ::waitpid(process, &status, WNOHANG);
  if (found < 0 && errno != EINTR) throw std::system_error(errno, std::generic_category());
  if (found <= 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return found > 0;
}

/// Ends the process group. Sends SIGTERM first, so that a compiler can remove its temporary files.
void end_group(pid_t process) {
  constexpr int kPatience = 200;  // number of polls
  int status = 0;
  ::kill(-process, SIGTERM);
  for (int look = 0; look < kPatience; ++look)
    if (has_ended(process, status)) return;
  ::kill(-process, SIGKILL);
  while (!has_ended(process, status)) continue;
}

}  // namespace

std::filesystem::path program_file() {
  Dl_info own{};
  // dladdr() returns a full path for a module, but argv[0] for a program.
  if (::dladdr(reinterpret_cast<const void*>(&program_file), &own) != 0 && own.dli_fname[0] == '/')
    return own.dli_fname;
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error);
}

std::optional<std::filesystem::path> installed_file(const std::filesystem::path& file) {
  const auto folder = program_file().parent_path();
  if (folder.empty()) return std::nullopt;
  for (const auto& shared : {folder.parent_path() / "share/kvlab", folder / "share"}) {
    std::error_code error;
    if (std::filesystem::exists(shared / file, error)) return shared / file;
  }
  return std::nullopt;
}

int run_program(std::vector<std::string> words, const std::filesystem::path& log) {
  const pid_t process = start(words, log);
  // Limits the file size, because the program's output could fill the disk.
  const rlimit limit{kMaxBytes, kMaxBytes};
  ::prlimit(process, RLIMIT_FSIZE, &limit, nullptr);
  int status = 0;
  try {
    while (!has_ended(process, status)) throw_if_cancelled();
  } catch (const Cancelled&) {
    end_group(process);
    throw;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace kvlab
