// A cache of compiled device code, in a folder of the user.
#pragma once

#include <optional>
#include <string>

#include "kernels/runtime/device_program.hpp"

namespace kvlab::kernels {

/// One file per program, named by its key. Files are written whole or not at all. Files, the folder
/// and the folder above it must belong to the user alone. A file that is damaged, or that another
/// user could have written, is ignored.
class CodeCache {
 public:
  /// $XDG_CACHE_HOME/kvlab/device, or ~/.cache/kvlab/device. Created by the first write.
  CodeCache();
  /// With an empty folder name nothing is found and nothing is kept.
  explicit CodeCache(std::string folder);

  /// The code of `program`: from the cache, or compiled and then kept. Throws as compile() does. An
  /// unusable folder is no error.
  DeviceCode code_of(const DeviceProgram& program) const;

 private:
  std::string path_of(const std::string& key) const;
  std::optional<DeviceCode> find(const std::string& key) const;
  void keep(const std::string& key, const DeviceCode& code) const;

  std::string folder_;
};

}  // namespace kvlab::kernels
