#include "sim/source/policy_source.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <exception>
#include <filesystem>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "policies/catalogue.hpp"
#include "policies/embedded.hpp"
#include "policies/old_names.hpp"
#include "policies/ops/instruction_set.hpp"
#include "policies/policy_struct.hpp"
#include "policies/private_folder.hpp"
#include "sim/replay.hpp"
#include "traces/base/files.hpp"
#include "traces/base/process.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

// Compiles the header of a policy with the C++ compiler of this machine.

namespace fs = std::filesystem;

constexpr std::size_t kMaxOfVersion = std::size_t{1} << 20;

/// Runs the compiler: words[0] is the program, the other words are its arguments. Returns whether
/// it succeeds.
bool succeeds(const std::vector<std::string>& words, const fs::path& log) {
  try {
    return run_program(words, log) == 0;
  } catch (const std::system_error& error) {
    throw std::runtime_error(
        fmt::format("--policy-source: cannot run the compiler '{}': {}; install a C++20 compiler, "
                    "or name one in the environment's CXX",
                    words[0], error.code().message()));
  }
}

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  for (std::string& word : split_list(std::string(text), ' '))
    if (!word.empty()) words.push_back(std::move(word));
  return words;
}

std::vector<std::string> compiler_command() {
  if (const char* requested = getenv("CXX"); requested && *requested)
    if (auto words = words_of(requested); !words.empty()) return words;
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

/// The compiler and its flags. The compiler is $CXX (with its options, if any), otherwise the one
/// that built kvlab, otherwise c++. The flags are those of kvlab, for the instruction set of this
/// machine.
class HostCompiler {
 public:
  // -ffp-contract=off makes the results equal to those of a built-in policy with every instruction
  // set. The mathematical library is not linked, because the last bits of its results differ
  // between machines.
  HostCompiler()
      : command_(compiler_command()),
        flags_({"-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden",
                "-fmax-errors=20", "-nodefaultlibs", "-Wl,-z,defs"}) {
    for (std::string& option : words_of(options_of(instruction_set())))
      flags_.push_back(std::move(option));
  }

  /// A text with everything that determines the output of the compiler: the command, its flags and
  /// its version. Throws std::runtime_error if the compiler cannot be run.
  std::string identity() const {
    const TemporaryFolder folder;
    std::vector<std::string> words = command_;
    words.push_back("--version");
    succeeds(words, folder / "version");
    return fmt::format("{}\n{}\n{}", fmt::join(command_, "\n"), fmt::join(flags_, "\n"),
                       read_text_file(folder / "version", kMaxOfVersion));
  }
  /// Compiles `source` with the headers of `folder` to the shared object `object`. Writes the
  /// compiler's output to `folder`/log and the list of files that it read, without system headers,
  /// to `folder`/reads. Returns whether the compilation succeeded. Throws std::runtime_error if the
  /// compiler cannot be run.
  bool compile(const fs::path& folder, const fs::path& source, const fs::path& object) const {
    std::vector<std::string> words = command_;
    words.insert(words.end(), flags_.begin(), flags_.end());
    words.insert(words.end(), {"-I" + folder.string(), "-MMD", "-MF", (folder / "reads").string(),
                               "-o", object.string(), source.string(), "-lstdc++", "-lc", "-lgcc"});
    return succeeds(words, folder / "log");
  }

 private:
  std::vector<std::string> command_, flags_;
};

namespace fs = std::filesystem;

constexpr std::size_t kMaxSourceBytes = std::size_t{1} << 20, kMaxLogBytes = std::size_t{64} << 20;
constexpr const char* kExported = "kvlab_policy_ops";

/// The text of the source file to compile. It includes the header and defines the function that the
/// object exports, which returns the policy's table.
std::string unit_text(const PolicySource& source, unsigned line) {
  constexpr std::string_view kUnit = R"(#include "policies/ops/make_ops.hpp"
#include "source.hpp"
#line {0} {1}
static_assert(kvlab::check_policy<{2}>());
template <class P>
const kvlab::PolicyOps* ops_of() {{
  if constexpr (kvlab::Policy<P>) {{
    static constexpr kvlab::PolicyOps ops = kvlab::make_ops<P>();
    return &ops;
  }}
  return nullptr;
}}
extern "C" __attribute__((visibility("default"))) const kvlab::PolicyOps* {3}() {{
  return ops_of<{2}>();
}}
)";
  return fmt::format(kUnit, line, c_literal(source.path), source.type, kExported);
}

void write_inputs(const fs::path& folder, const PolicySource& source, unsigned line) {
  for (const EmbeddedText& header : policy_headers()) {
    fs::create_directories((folder / header.path).parent_path());
    write_file_atomically(folder / header.path, header.text);
  }
  // #line makes the compiler report the path and the lines of the file that the user named.
  write_file_atomically(folder / "source.hpp",
                        fmt::format("#line 1 {}\n{}\n", c_literal(source.path), source.text));
  write_file_atomically(folder / "entry.cpp", unit_text(source, line));
}

/// The cache key. It covers everything on which the object depends: the policy's text, kvlab's
/// headers, and the compiler.
std::string key_of(const PolicySource& source, const HostCompiler& compiler) {
  std::string all = compiler.identity();
  const auto add = [&](std::string_view part) { all += fmt::format("\n{}:{}", part.size(), part); };
  add(unit_text({.type = source.type}, 1));
  add(source.text);
  for (const EmbeddedText& header : policy_headers()) {
    add(header.path);
    add(header.text);
  }
  return xxh3_hex(all);
}

/// Whether the compiler read only files in `folder`, according to its dependency file. If it read
/// other files, the object must not be cached, because a later change in these files would not be
/// noticed.
bool reads_nothing_else(const fs::path& folder) {
  const std::string rule = read_text_file(folder / "reads", kMaxLogBytes);
  const std::string prefix = folder.string() + "/";
  for (const std::string& line : split_list(rule.substr(rule.find(':') + 1), '\n'))
    for (const std::string& word : split_list(line, ' '))
      if (!word.empty() && word != "\\" && !word.starts_with(prefix)) return false;
  return true;
}

/// The first megabyte of the compiler's output.
std::string log_of(const fs::path& folder) {
  constexpr std::size_t kMax = std::size_t{1} << 20;
  const MappedFile log(folder / "log");
  const auto bytes = log.bytes().first(std::min(log.bytes().size(), kMax));
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Loads a shared object and returns the table that it exports. The object is never unloaded,
/// because policy states that need its code may still exist.
const PolicyOps& load_ops(const fs::path& library) {
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  void* const symbol = handle ? dlsym(handle, kExported) : nullptr;
  if (!symbol) throw std::runtime_error(fmt::format("--policy-source: cannot load: {}", dlerror()));
  return *reinterpret_cast<const PolicyOps* (*)()>(symbol)();
}

/// Compiles the source, stores the object under `key`, and loads it.
const PolicyOps& compiled_ops(const PolicySource& source, unsigned line,
                              const HostCompiler& compiler, const ObjectCache& cache,
                              const std::string& key) {
  const TemporaryFolder folder;
  const fs::path library = folder.path() / "policy.so";
  write_inputs(folder.path(), source, line);
  if (!compiler.compile(folder.path(), folder.path() / "entry.cpp", library))
    throw DoesNotCompile(
        fmt::format("{}: does not compile{}", source.path,
                    complaint(log_of(folder.path()), folder.path(), source, line)));
  if (reads_nothing_else(folder.path())) cache.keep(key, library);
  return load_ops(library);
}

bool is_word(std::string_view name) {
  const auto letter = [](char c) {
    return c == '_' || (std::isalnum(static_cast<unsigned char>(c)) && c >= 0);
  };
  return !name.empty() && std::ranges::all_of(name, letter) &&
         !std::isdigit(static_cast<unsigned char>(name[0]));
}

void check_name(const PolicyOps& ops, const std::string& path) {
  const std::string name = ops.info.name;
  if (!is_word(name))
    throw std::invalid_argument(
        fmt::format("{}: kInfo.name '{}' should be letters, digits and underscores, and should not "
                    "begin with a digit",
                    path, name));
  if (is_taken(name))
    throw std::invalid_argument(fmt::format(
        "{}: kInfo.name '{}' is already used by a policy of kvlab; give another", path, name));
}

}  // namespace

bool is_taken(std::string_view name) {
  return is_oracle(name) || std::ranges::any_of(policy_catalogue(), [&](const PolicyEntry& other) {
           return other.info.name == name;
         });
}

std::shared_ptr<const PolicyEntry> compile_policy_source(const fs::path& path) {
  const std::string text = read_text_file(path, kMaxSourceBytes);
  PolicySource source{.path = path.string(), .text = current_header(text), .xxh3 = xxh3_hex(text)};
  source.has_old_names = source.text != text;
  const PolicyStruct found = find_policy_struct(source.text, source.path);
  source.type = found.name;

  const HostCompiler compiler;
  const ObjectCache cache(private_folder("policies"));
  const std::string key = key_of(source, compiler);
  const auto kept = cache.find(key);
  const PolicyOps& ops =
      kept ? load_ops(*kept) : compiled_ops(source, found.line, compiler, cache, key);
  check_name(ops, source.path);
  return std::make_shared<PolicyEntry>(
      PolicyEntry{ops, std::make_shared<const PolicySource>(std::move(source))});
}

CompiledPolicies compile_policy_sources(std::span<const std::string> paths) {
  CompiledPolicies all;
  for (const std::string& path : paths) {
    auto entry = compile_policy_source(path);
    if (const auto other = all.find(entry->info.name))
      throw std::invalid_argument(
          fmt::format("--policy-source {}: defines policy {}, and so does {}; give one of them "
                      "another kInfo.name",
                      path, other->info.name, other->source->path));
    all.entries.push_back(std::move(entry));
  }
  return all;
}

std::shared_ptr<const PolicyEntry> require_source(const CompiledPolicies& compiled,
                                                  const std::string& name, const std::string& path,
                                                  const std::string& xxh3,
                                                  const std::string& where) {
  // For a policy that is a Python function, `path` is the file that defines the function, or a text
  // such as "<stdin>".
  if (path.ends_with(".py") || path.starts_with('<'))
    throw std::invalid_argument(fmt::format(
        "{}: policy {} is a Python function of {}, and these run in replays only; write it as a "
        "header (docs/guides/write-a-policy.md) and replay it with --policy-source",
        where, name, path));
  if (compiled.entries.empty())
    throw std::invalid_argument(
        fmt::format("{}: policy {} was compiled from {}; give this file: --policy-source {}", where,
                    name, path, path));
  auto entry = compiled.find(name.substr(0, name.find('*')));
  const PolicyEntry& last = *compiled.entries.back();
  if (!entry)
    throw std::invalid_argument(
        fmt::format("{}: needs the policy {} of {}; --policy-source {} defines {}", where, name,
                    path, last.source->path, last.info.name));
  if (entry->source->xxh3 != xxh3)
    throw std::invalid_argument(
        fmt::format("{}: policy {} was compiled from another text (xxh3 {}, not {}) than "
                    "--policy-source {}; give the old file, or replay and deploy again",
                    where, name, xxh3, entry->source->xxh3, entry->source->path));
  return entry;
}

namespace {

/// Whether a line of the compiler's log is about kvlab's headers.
bool is_ours(std::string_view line) {
  constexpr std::string_view kIncluded = "In file included from ";
  if (line.starts_with(kIncluded)) line.remove_prefix(kIncluded.size());
  return line.starts_with("policies/");
}

/// If a line of the log reports that a static_assert of check_policy() failed, returns the text of
/// that static_assert; otherwise empty.
std::string_view check_in(std::string_view line) {
  if (!line.starts_with("policies/") || line.find("error: static") == std::string_view::npos)
    return {};
  const std::size_t at = line.rfind("policy: ");
  if (at == std::string_view::npos) return {};
  line.remove_prefix(at);
  return line.substr(0, line.find('"'));
}

/// The line of the hook to which the text of a check refers ("policy: rank() must …"). If it refers
/// to no hook, or the hook is not found, returns `line`, the line of the struct.
unsigned line_of_hook(const PolicySource& source, std::string_view check, unsigned line) {
  constexpr std::string_view kBegin = "policy: ";
  const std::size_t end = check.find("() must ");
  if (!check.starts_with(kBegin) || end == std::string_view::npos) return line;
  const std::string call = fmt::format(" {}(", check.substr(kBegin.size(), end - kBegin.size()));
  const std::vector<std::string> lines = split_list(source.text, '\n');
  for (std::size_t l = line; l <= lines.size(); ++l) {
    const std::string& text = lines[l - 1];
    const std::size_t at = text.find(call);
    if (at != std::string::npos && text.find("//") > at) return static_cast<unsigned>(l);
  }
  return line;
}

/// The names of the functions that the linker did not find, each once: "exp, std::log".
std::string missing_in(std::string_view log) {
  constexpr std::string_view kMissing = "undefined reference to `";
  std::set<std::string_view> names;
  for (std::size_t at = 0; (at = log.find(kMissing, at)) != std::string_view::npos;) {
    at += kMissing.size();
    names.insert(log.substr(at, log.find('\'', at) - at));
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

std::string complaint(std::string log, const std::filesystem::path& folder,
                      const PolicySource& source, unsigned line) {
  const std::string prefix = folder.string() + "/";
  std::string plain;
  for (std::size_t at = 0, found = 0; at < log.size(); at = found + prefix.size()) {
    found = std::min(log.find(prefix, at), log.size());
    plain.append(log, at, found - at);
  }
  if (const std::string missing = missing_in(plain); !missing.empty())
    return fmt::format(
        "\n{}:{}: error: calls {}; a policy may not call the mathematical library; it may use "
        "integers and + - * / on doubles, which give the same bits on every machine and device",
        source.path, line, missing);
  std::string own, checks;
  // Whether a line about kvlab's headers has appeared. From that line on, no line is about the
  // policy's text.
  bool ours = false;
  for (const std::string& text : split_list(plain, '\n')) {
    ours = ours || is_ours(text);
    if (const std::string_view check = check_in(text); !check.empty())
      checks +=
          fmt::format("\n{}:{}: error: {}", source.path, line_of_hook(source, check, line), check);
    else if (!ours && !text.empty() && text.find("from entry.cpp") == std::string::npos &&
             // Clang warns about options that only GCC has.
             !text.ends_with("[-Wunused-command-line-argument]"))
      own += "\n" + text;
  }
  if (!own.empty()) return own;
  return checks.empty() ? "\n" + plain : checks;
}

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMaxBytes = std::size_t{64} << 20;
// In a cached file, this mark follows the bytes of the object, and their checksum follows the mark.
constexpr std::string_view kMark = "kvlab-object ";

std::string trailer_of(std::string_view object) { return std::string(kMark) + xxh3_hex(object); }

}  // namespace

ObjectCache::ObjectCache(fs::path folder) : folder_(std::move(folder)) {
  if (!make_private(folder_)) folder_.clear();
}

fs::path ObjectCache::path_of(std::string_view key) const {
  return folder_ / (std::string(key) + ".so");
}

std::optional<fs::path> ObjectCache::find(std::string_view key) const {
  std::error_code error;
  if (folder_.empty() || !fs::is_regular_file(path_of(key), error)) return std::nullopt;
  try {
    const std::string kept = read_text_file(path_of(key), kMaxBytes);
    const std::size_t trailer = kMark.size() + 16;
    if (kept.size() < trailer) return std::nullopt;
    const std::string_view object = std::string_view(kept).substr(0, kept.size() - trailer);
    if (!kept.ends_with(trailer_of(object))) return std::nullopt;
    return path_of(key);
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

void ObjectCache::keep(std::string_view key, const fs::path& object) const {
  if (folder_.empty()) return;
  const fs::path fresh =
      folder_ / fmt::format("{}.{}", key, getpid());  // the process id makes the name unique
  try {
    const std::string bytes = read_text_file(object, kMaxBytes);
    write_file_atomically(fresh, bytes + trailer_of(bytes));
    fs::rename(fresh, path_of(key));
  } catch (const std::exception&) {  // for example, the disk is full; the next run compiles again
    std::error_code ignored;
    fs::remove(fresh, ignored);
  }
}

}  // namespace kvlab
