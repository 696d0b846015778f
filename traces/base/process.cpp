#include "traces/base/process.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "traces/base/cancel.hpp"

namespace kvlab {
namespace {
constexpr rlim_t kMostBytes = rlim_t{64} << 20;
}

TemporaryFolder::TemporaryFolder() {
  std::error_code error;
  const std::filesystem::path parent = std::filesystem::temp_directory_path(error);
  if (error)
    throw std::runtime_error(
        "TMPDIR: it should name a folder that can be written to, or nothing for /tmp");
  std::string name = (parent / "kvlab-XXXXXX").string();
  if (!mkdtemp(name.data()))
    throw std::runtime_error(
        fmt::format("{}: cannot be made: {}", name, std::generic_category().message(errno)));
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

int run_program(std::vector<std::string> words, const std::filesystem::path& log) {
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
  pid_t process = 0;
  const int error =
      posix_spawnp(&process, arguments[0], &streams, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&streams);
  if (error) throw std::system_error(error, std::generic_category());
  // A file that grows beyond this ends it: what it says could fill a disk.
  const rlimit limit{kMostBytes, kMostBytes};
  ::prlimit(process, RLIMIT_FSIZE, &limit, nullptr);
  int status = 0;
  while (waitpid(process, &status, 0) < 0)
    if (errno != EINTR) throw std::system_error(errno, std::generic_category());
  throw_if_cancelled();  // which may have ended the program too
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace kvlab
