// The machine's own C++ compiler, as kvlab runs it on a policy's header.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace kvlab {

/// $CXX (with its options, if any), else the compiler that built kvlab, else c++; and how it has to
/// compile a policy: as kvlab itself was, for the instruction set in use here.
class HostCompiler {
 public:
  HostCompiler();

  /// All that decides what comes out: the command, its flags, and what it says of its version.
  /// Throws std::runtime_error: it cannot be run.
  std::string identity() const;
  /// Compiles `source` with the headers of `folder` to the shared object `object`. What it says is
  /// left in `folder`/log, and the files that it read, but for the system's, in `folder`/reads.
  /// Returns whether it succeeded. Throws std::runtime_error: it cannot be run.
  bool compile(const std::filesystem::path& folder, const std::filesystem::path& source,
               const std::filesystem::path& object) const;

 private:
  std::vector<std::string> command_, flags_;
};

}  // namespace kvlab
