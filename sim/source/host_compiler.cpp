#include "sim/source/host_compiler.hpp"

#include <fmt/format.h>
#include <stdlib.h>
#include <unistd.h>

#include <stdexcept>
#include <system_error>

#include "policies/ops/instruction_set.hpp"
#include "traces/base/files.hpp"
#include "traces/base/process.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostOfVersion = std::size_t{1} << 20;

/// Whether words[0] succeeds.
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

// Without contraction, the results are those of a policy that is built in, whatever the set. The
// mathematical library is left out: its last bits differ from machine to machine.
HostCompiler::HostCompiler()
    : command_(compiler_command()),
      flags_({"-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden",
              "-fmax-errors=20", "-nodefaultlibs", "-Wl,-z,defs"}) {
  for (std::string& option : words_of(options_of(instruction_set())))
    flags_.push_back(std::move(option));
}

std::string HostCompiler::identity() const {
  const TemporaryFolder folder;
  std::vector<std::string> words = command_;
  words.push_back("--version");
  succeeds(words, folder / "version");
  return fmt::format("{}\n{}\n{}", fmt::join(command_, "\n"), fmt::join(flags_, "\n"),
                     read_text_file(folder / "version", kMostOfVersion));
}

bool HostCompiler::compile(const fs::path& folder, const fs::path& source,
                           const fs::path& object) const {
  std::vector<std::string> words = command_;
  words.insert(words.end(), flags_.begin(), flags_.end());
  words.insert(words.end(), {"-I" + folder.string(), "-MMD", "-MF", (folder / "reads").string(),
                             "-o", object.string(), source.string(), "-lstdc++", "-lc", "-lgcc"});
  return succeeds(words, folder / "log");
}

}  // namespace kvlab
