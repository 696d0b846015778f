// Device code that was compiled before, in a folder of the user's.
#pragma once

#include <optional>
#include <string>

#include "kernels/runtime/device_program.hpp"

namespace kvlab::kernels {

/// A file for each program, by its key. Files are written whole or not at all, and belong to the
/// user alone, as the folder and the one above have to; one that is damaged, or that somebody else
/// could have written, is as none.
class CodeCache {
 public:
  /// $XDG_CACHE_HOME/kvlab/device, or ~/.cache/kvlab/device. Made when first written to.
  CodeCache();
  /// Empty: nothing is found and nothing kept.
  explicit CodeCache(std::string folder);

  /// The code of `program`: kept, or compiled and then kept. Throws as compile() does; that the
  /// folder cannot be used is no error.
  DeviceCode code_of(const DeviceProgram& program) const;

 private:
  std::string path_of(const std::string& key) const;
  std::optional<DeviceCode> find(const std::string& key) const;
  void keep(const std::string& key, const DeviceCode& code) const;

  std::string folder_;
};

}  // namespace kvlab::kernels
