#include "kernels/runtime/code_cache.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <charconv>
#include <string_view>

#include "policies/private_folder.hpp"

namespace kvlab::kernels {
namespace {

constexpr std::string_view kMark = "kvlab device code 1";

/// An open file, closed with this object.
class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  bool is_open() const { return descriptor_ >= 0; }
  /// Returns the file's contents. Returns an empty string if the file belongs to another user, if
  /// other users may write it, or if it cannot be read completely.
  std::string read_own() const {
    struct stat about;
    if (fstat(descriptor_, &about) != 0 || !S_ISREG(about.st_mode) || !is_own(about)) return "";
    std::string bytes(static_cast<std::size_t>(about.st_size), '\0');
    for (std::size_t at = 0; at < bytes.size();) {
      const ssize_t got = ::read(descriptor_, bytes.data() + at, bytes.size() - at);
      if (got <= 0) return "";
      at += static_cast<std::size_t>(got);
    }
    return bytes;
  }
  bool write(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t put = ::write(descriptor_, bytes.data(), bytes.size());
      if (put <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(put));
    }
    return true;
  }

 private:
  int descriptor_;
};

std::string hash_of(std::string_view bytes) {
  return fmt::format("{:016x}", XXH3_64bits(bytes.data(), bytes.size()));
}

/// File format: a line with the mark, a line with the key, a line with a hash of everything after
/// it, a line with the number of symbols, and then, for each kernel, a line with its name and a
/// line with its symbol. The bytes of the code follow.
std::string pack(const std::string& key, const DeviceCode& code) {
  std::string body = fmt::format("{}\n", code.symbols.size());
  for (const auto& [kernel, symbol] : code.symbols) body += fmt::format("{}\n{}\n", kernel, symbol);
  body.append(code.image.data(), code.image.size());
  return fmt::format("{}\n{}\n{}\n", kMark, key, hash_of(body)) + body;
}

std::string_view take_line(std::string_view& bytes) {
  const std::size_t end = std::min(bytes.find('\n'), bytes.size());
  const std::string_view line = bytes.substr(0, end);
  bytes.remove_prefix(std::min(end + 1, bytes.size()));
  return line;
}

std::optional<DeviceCode> unpack(std::string_view bytes, const std::string& key) {
  if (take_line(bytes) != kMark || take_line(bytes) != key) return {};
  const std::string_view hash = take_line(bytes);
  if (hash != hash_of(bytes)) return {};
  const std::string_view number = take_line(bytes);
  std::size_t symbols = 0;
  std::from_chars(number.data(), number.data() + number.size(), symbols);
  DeviceCode code;
  for (std::size_t i = 0; i < symbols; ++i) {
    const std::string kernel(take_line(bytes));
    code.symbols[kernel] = take_line(bytes);
  }
  code.image.assign(bytes.begin(), bytes.end());
  return code;
}

}  // namespace

CodeCache::CodeCache() : CodeCache(private_folder("device").string()) {}

CodeCache::CodeCache(std::string folder) : folder_(std::move(folder)) {}

std::string CodeCache::path_of(const std::string& key) const {
  return fmt::format("{}/{}.cubin", folder_, key);
}

DeviceCode CodeCache::code_of(const DeviceProgram& program) const {
  const std::string key = program.key();
  if (std::optional<DeviceCode> kept = find(key)) return *std::move(kept);
  DeviceCode code = compile(program);
  keep(key, code);
  return code;
}

std::optional<DeviceCode> CodeCache::find(const std::string& key) const {
  if (!is_private(folder_)) return {};
  const File file(open(path_of(key).c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  return file.is_open() ? unpack(file.read_own(), key) : std::nullopt;
}

void CodeCache::keep(const std::string& key, const DeviceCode& code) const {
  if (!make_private(folder_)) return;
  std::string temporary = fmt::format("{}/.XXXXXX", folder_);
  bool whole = false;
  {
    const File file(mkostemp(temporary.data(), O_CLOEXEC));
    if (!file.is_open()) return;
    whole = file.write(pack(key, code));
  }
  if (!whole || rename(temporary.c_str(), path_of(key).c_str()) != 0) unlink(temporary.c_str());
}

}  // namespace kvlab::kernels
