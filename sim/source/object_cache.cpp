#include "sim/source/object_cache.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <exception>
#include <system_error>

#include "policies/private_folder.hpp"
#include "traces/base/files.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostBytes = std::size_t{64} << 20;
constexpr std::string_view kMark = "kvlab-object ";  // then the sum, behind the object's own bytes

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
    const std::string kept = read_text_file(path_of(key), kMostBytes);
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
  const fs::path fresh = folder_ / fmt::format("{}.{}", key, getpid());  // of this process alone
  try {
    const std::string bytes = read_text_file(object, kMostBytes);
    write_file_atomically(fresh, bytes + trailer_of(bytes));
    fs::rename(fresh, path_of(key));
  } catch (const std::exception&) {  // a full disk, say: the next run compiles again
    std::error_code ignored;
    fs::remove(fresh, ignored);
  }
}

}  // namespace kvlab
