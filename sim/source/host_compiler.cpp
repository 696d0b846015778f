#include "sim/source/host_compiler.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "policies/ops/instruction_set.hpp"
#include "traces/base/files.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostOfVersion = std::size_t{1} << 20;

/// Where a process writes all that it has to say.
class LogFile {
 public:
  explicit LogFile(const fs::path& log) {
    posix_spawn_file_actions_init(&actions_);
    posix_spawn_file_actions_addopen(&actions_, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions_, STDOUT_FILENO, log.c_str(), O_WRONLY | O_CREAT,
                                     0600);
    posix_spawn_file_actions_adddup2(&actions_, STDOUT_FILENO, STDERR_FILENO);
  }
  ~LogFile() { posix_spawn_file_actions_destroy(&actions_); }
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;
  const posix_spawn_file_actions_t* get() const { return &actions_; }

 private:
  posix_spawn_file_actions_t actions_;
};

/// Runs words[0], found on PATH, without a shell. Returns whether it succeeded.
bool succeeds(std::vector<std::string> words, const fs::path& log) {
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const LogFile output(log);
  pid_t process = 0;
  if (const int error =
          posix_spawnp(&process, arguments[0], output.get(), nullptr, arguments.data(), environ))
    throw std::runtime_error(
        fmt::format("--policy-source: cannot run the compiler '{}': {}; install a C++20 compiler, "
                    "or name one in the environment's CXX",
                    words[0], std::generic_category().message(error)));
  int status = 0;
  while (waitpid(process, &status, 0) < 0)
    if (errno != EINTR)
      throw std::runtime_error(fmt::format("--policy-source: lost the compiler '{}'", words[0]));
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  for (std::string& word : split_list(std::string(text), ' '))
    if (!word.empty()) words.push_back(std::move(word));
  return words;
}

std::vector<std::string> compiler_command() {
  if (const char* asked = getenv("CXX"); asked && *asked)
    if (auto words = words_of(asked); !words.empty()) return words;
  if (access(KVLAB_CXX_COMPILER, X_OK) == 0) return {KVLAB_CXX_COMPILER};
  return {"c++"};
}

std::string_view options_of(InstructionSet set) {
  switch (set) {
    case InstructionSet::avx512:
      return KVLAB_AVX512_OPTIONS;
    case InstructionSet::avx2:
      return KVLAB_AVX2_OPTIONS;
    case InstructionSet::base:
      break;
  }
  return "";
}

}  // namespace

PrivateFolder::PrivateFolder() {
  std::string name = (fs::temp_directory_path() / "kvlab-policy-XXXXXX").string();
  if (!mkdtemp(name.data()))
    throw std::runtime_error(
        fmt::format("{}: cannot make a folder: {}", name, std::generic_category().message(errno)));
  path_ = name;
}

PrivateFolder::~PrivateFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

// Without contraction: the results are those of a policy that is built in, whatever the set.
HostCompiler::HostCompiler()
    : command_(compiler_command()),
      flags_(
          {"-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden"}) {
  for (std::string& option : words_of(options_of(instruction_set())))
    flags_.push_back(std::move(option));
}

std::string HostCompiler::identity() const {
  const PrivateFolder folder;
  std::vector<std::string> words = command_;
  words.push_back("--version");
  succeeds(std::move(words), folder.path() / "version");
  return fmt::format("{}\n{}\n{}", fmt::join(command_, "\n"), fmt::join(flags_, "\n"),
                     read_text_file(folder.path() / "version", kMostOfVersion));
}

bool HostCompiler::compile(const fs::path& folder, const fs::path& source,
                           const fs::path& object) const {
  std::vector<std::string> words = command_;
  words.insert(words.end(), flags_.begin(), flags_.end());
  words.insert(words.end(), {"-I" + folder.string(), "-MMD", "-MF", (folder / "reads").string(),
                             "-o", object.string(), source.string()});
  return succeeds(std::move(words), folder / "log");
}

}  // namespace kvlab
