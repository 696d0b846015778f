// Private folders for compiled code that will be run again. Only this user may write there.
#pragma once

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string_view>
#include <system_error>

namespace kvlab {

/// Whether this user owns the file and no other user may write it.
inline bool is_own(const struct stat& file) {
  return file.st_uid == geteuid() && (file.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

/// Whether `folder` and its parent exist as folders that only this user may write.
inline bool is_private(const std::filesystem::path& folder) {
  for (const auto& path : {folder.parent_path(), folder}) {
    struct stat found {};
    if (lstat(path.c_str(), &found) != 0 || !S_ISDIR(found.st_mode) || !is_own(found)) return false;
  }
  return folder.is_absolute();
}

/// Creates `folder` and its parent if they are missing. Returns whether they are private.
inline bool make_private(const std::filesystem::path& folder) {
  if (!folder.is_absolute()) return false;
  const std::filesystem::path above = folder.parent_path();
  std::error_code ignored;
  std::filesystem::create_directories(above.parent_path(), ignored);
  for (const auto& path : {above, folder}) mkdir(path.c_str(), 0700);
  return is_private(folder);
}

/// kvlab/NAME in $XDG_CACHE_HOME, otherwise in ~/.cache; empty if neither is known.
inline std::filesystem::path private_folder(std::string_view name) {
  const auto variable = [](const char* variable_name) {
    const char* const value = getenv(variable_name);
    return std::filesystem::path(value ? value : "");
  };
  std::filesystem::path caches = variable("XDG_CACHE_HOME");
  if (!caches.is_absolute()) caches = variable("HOME") / ".cache";
  return caches.is_absolute() ? caches / "kvlab" / name : std::filesystem::path();
}

}  // namespace kvlab
