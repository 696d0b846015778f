// A cache of compiled device code, in a folder of the user.
#pragma once

#include <optional>
#include <string>

#include "kernels/runtime/device_program.hpp"

namespace kvlab::kernels {

/// There is one file per program, named by the program's key. Files are written completely or not
/// at all. The files, the folder and the folder above it must belong to the user alone. A file that
/// is damaged, or that another user could have written, is ignored.
class CodeCache {
 public:
  /// The folder is $XDG_CACHE_HOME/kvlab/device, or ~/.cache/kvlab/device. The first write creates
  /// it.
  CodeCache();
  /// An empty folder name switches the cache off.
  explicit CodeCache(std::string folder);

  /// Returns the code of `program` from the cache. If it is not there, compiles the program and
  /// stores the code. Throws the exceptions of compile(). An unusable folder is not an error.
  DeviceCode code_of(const DeviceProgram& program) const;

 private:
  std::string path_of(const std::string& key) const;
  std::optional<DeviceCode> find(const std::string& key) const;
  void keep(const std::string& key, const DeviceCode& code) const;

  std::string folder_;
};

}  // namespace kvlab::kernels
