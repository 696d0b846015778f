#include "sim/source/policy_source.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <regex>
#include <stdexcept>
#include <system_error>

#include "policies/catalogue.hpp"
#include "policies/embedded.hpp"
#include "sim/replay.hpp"
#include "sim/source/policy_struct.hpp"
#include "traces/base/files.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMaxSourceBytes = std::size_t{1} << 20, kMaxLogBytes = std::size_t{64} << 20;
constexpr const char* kExported = "kvlab_policy_entry";

/// A folder that only this user can read, and that goes with this object.
class PrivateFolder {
 public:
  PrivateFolder() {
    std::string name = (fs::temp_directory_path() / "kvlab-policy-XXXXXX").string();
    if (!mkdtemp(name.data()))
      throw std::runtime_error(fmt::format("{}: cannot make a folder: {}", name,
                                           std::generic_category().message(errno)));
    path_ = name;
  }
  ~PrivateFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;

  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

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

/// $CXX (with its options, if any), else the compiler that built kvlab, else c++.
std::vector<std::string> compiler() {
  if (const char* asked = getenv("CXX"); asked && *asked) {
    std::vector<std::string> words;
    for (std::string& word : split_list(asked, ' '))
      if (!word.empty()) words.push_back(std::move(word));
    if (!words.empty()) return words;
  }
  if (access(KVLAB_CXX_COMPILER, X_OK) == 0) return {KVLAB_CXX_COMPILER};
  return {"c++"};
}

void write_inputs(const fs::path& folder, const PolicySource& source, unsigned line) {
  for (const EmbeddedText& header : policy_headers()) {
    fs::create_directories((folder / header.path).parent_path());
    write_file_atomically(folder / header.path, header.text);
  }
  // The lines count as those of the file that was asked for.
  const std::string path = c_literal(source.path);
  write_file_atomically(folder / "source.hpp", fmt::format("#line 1 {}\n{}\n", path, source.text));
  constexpr std::string_view kEntry = R"(#include "policies/entry.hpp"
#include "source.hpp"
#line {0} {1}
static_assert(kvlab::check_policy<{2}>());
template <class P>
const kvlab::PolicyEntry* entry_of() {{
  if constexpr (kvlab::Policy<P>) {{
    static const kvlab::PolicyEntry entry = kvlab::make_entry<P>();
    return &entry;
  }}
  return nullptr;
}}
extern "C" __attribute__((visibility("default"))) const kvlab::PolicyEntry* {3}() {{
  return entry_of<{2}>();
}}
)";
  write_file_atomically(folder / "entry.cpp",
                        fmt::format(kEntry, line, path, source.type, kExported));
}

/// What the compiler said, as it concerns the author of the policy: the faults of the text itself;
/// if there are none, what check_policy says of it, at the struct's line.
std::string complaint(std::string log, const fs::path& folder, const PolicySource& source,
                      unsigned line) {
  const std::string prefix = folder.string() + "/";
  for (std::size_t at; (at = log.find(prefix)) != std::string::npos;) log.erase(at, prefix.size());
  static const std::regex kOurs(R"((In file included from )?policies/.*)"),
      kCheck(R"(policies/.*error: static.*(policy: [^"]*).*)");
  std::string own, checks;
  bool ours = false;  // what follows a fault of the text is about our headers, not about the text
  for (const std::string& text : split_list(log, '\n')) {
    std::smatch match;
    ours = ours || std::regex_match(text, kOurs);
    if (std::regex_match(text, match, kCheck))
      checks += fmt::format("\n{}:{}: error: {}", source.path, line, match[1].str());
    else if (!ours && !text.empty() && text.find("from entry.cpp") == std::string::npos)
      own += "\n" + text;
  }
  if (!own.empty()) return own;
  return checks.empty() ? "\n" + log : checks;
}

/// The entry of a shared object that exports it. The object is never unloaded: states may outlive
/// whoever made them.
const PolicyEntry& load_entry(const fs::path& library) {
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  void* const symbol = handle ? dlsym(handle, kExported) : nullptr;
  if (!symbol) throw std::runtime_error(fmt::format("--policy-source: cannot load: {}", dlerror()));
  return *reinterpret_cast<const PolicyEntry* (*)()>(symbol)();
}

void check_name(const PolicyEntry& entry, const std::string& path) {
  static const std::regex kWord("[A-Za-z_][A-Za-z0-9_]*");
  const std::string name = entry.info.name;
  if (!std::regex_match(name, kWord))
    throw std::invalid_argument(
        fmt::format("{}: kInfo.name '{}' should be letters, digits and underscores", path, name));
  bool taken = false;
  for (const PolicyEntry& other : policy_catalogue()) taken = taken || other.info.name == name;
  for (const std::string_view other : replay_references()) taken = taken || other == name;
  if (taken)
    throw std::invalid_argument(
        fmt::format("{}: kInfo.name '{}' is taken by a policy of kvlab; give another", path, name));
}

}  // namespace

std::shared_ptr<const PolicyEntry> compile_policy_source(const fs::path& path) {
  PolicySource source{
      .path = path.string(), .text = read_text_file(path, kMaxSourceBytes), .xxh3 = {}, .type = {}};
  const PolicyStruct found = find_policy_struct(source.text, source.path);
  source.type = found.name;
  source.xxh3 = xxh3_hex(std::as_bytes(std::span(source.text)));

  const PrivateFolder folder;
  const fs::path library = folder.path() / "policy.so", log = folder.path() / "log";
  write_inputs(folder.path(), source, found.line);
  std::vector<std::string> words = compiler();
  // As kvlab itself: without contraction, so that results are those of a policy that is built in.
  words.insert(words.end(), {"-std=c++20", "-O2", "-ffp-contract=off", "-fPIC", "-shared",
                             "-fvisibility=hidden", "-I" + folder.path().string(), "-o",
                             library.string(), (folder.path() / "entry.cpp").string()});
  if (!succeeds(std::move(words), log))
    throw std::invalid_argument(fmt::format(
        "{}: does not compile{}", source.path,
        complaint(read_text_file(log, kMaxLogBytes), folder.path(), source, found.line)));

  auto entry = std::make_shared<PolicyEntry>(load_entry(library));
  check_name(*entry, source.path);
  entry->source = std::make_shared<const PolicySource>(std::move(source));
  return entry;
}

void check_source(const std::shared_ptr<const PolicyEntry>& compiled, const std::string& name,
                  const std::string& path, const std::string& xxh3, const std::string& where) {
  if (!compiled)
    throw std::invalid_argument(
        fmt::format("{}: policy {} was compiled from {}: give that text by --policy-source {}",
                    where, name, path, path));
  if (compiled->info.name != name)
    throw std::invalid_argument(
        fmt::format("{}: needs the policy {} of {}; --policy-source {} is {}", where, name, path,
                    compiled->source->path, compiled->info.name));
  if (compiled->source->xxh3 != xxh3)
    throw std::invalid_argument(fmt::format(
        "{}: policy {} was compiled from another text (xxh3 {}, not {}) than --policy-source {}; "
        "give the old text, or replay and deploy again",
        where, name, xxh3, compiled->source->xxh3, compiled->source->path));
}

}  // namespace kvlab
