#include "tests/fuzz/fuzz.hpp"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>

#include "traces/base/files.hpp"
#include "traces/base/text.hpp"

namespace kvlab::fuzz {
namespace {

constexpr std::size_t kMaxData = 1 << 20;  // bytes per safetensors file

/// A folder that is removed when the process ends.
struct ProcessFolder {
  ProcessFolder() {
    const char* const requested = ::getenv("TMPDIR");
    std::string name = std::string(requested ? requested : "/dev/shm") + "/kvlab-fuzz-XXXXXX";
    require(::mkdtemp(name.data()) != nullptr, "cannot make", name);
    path = name;
  }
  ~ProcessFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::filesystem::path path;
};

/// Whether a name can be the name of a file directly in the folder.
bool is_file_name(std::string_view name) {
  constexpr std::string_view kLetters =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
  return name.size() <= 64 && name.find('.') != std::string_view::npos && name[0] != '.' &&
         name.find_first_not_of(kLetters) == std::string_view::npos;
}

/// The largest `end` of all "data_offsets": [begin, end] in `header`.
std::size_t data_bytes(std::string_view header) {
  constexpr std::string_view kKey = "data_offsets";
  std::size_t max_end = 0;
  for (std::size_t at = header.find(kKey); at != std::string_view::npos;
       at = header.find(kKey, at + 1)) {
    const std::size_t comma = header.find(',', at + kKey.size() + 1);
    if (comma == std::string_view::npos) break;
    const std::size_t digit = header.find_first_not_of(' ', comma + 1);
    std::size_t end = 0;
    if (digit != std::string_view::npos)
      std::from_chars(header.data() + digit, header.data() + header.size(), end);
    if (end <= kMaxData) max_end = std::max(max_end, end);
  }
  return max_end;
}

std::string safetensors(std::string_view part) {
  if (part.starts_with('!')) return std::string(part.substr(1));
  const std::string_view header = part.substr(0, part.find('\n'));
  std::string data(part.substr(std::min(part.size(), header.size() + 1)));
  data.resize(data_bytes(header));
  const std::uint64_t length = header.size();
  std::string file(sizeof length, '\0');
  std::copy_n(reinterpret_cast<const char*>(&length), sizeof length, file.data());
  return file.append(header).append(data);
}

}  // namespace

std::map<std::string, std::string> parts_of(std::string_view input) {
  constexpr std::string_view kMark = "=== ";
  const auto mark_from = [&](std::size_t at) {
    for (at = input.find(kMark, at);
         at != std::string_view::npos && at > 0 && input[at - 1] != '\n';)
      at = input.find(kMark, at + 1);
    return at;
  };
  std::map<std::string, std::string> parts;
  for (std::size_t at = mark_from(0); at != std::string_view::npos;) {
    const std::size_t line = input.find('\n', at);
    if (line == std::string_view::npos) break;
    const std::size_t next = mark_from(line);
    const std::string name(input.substr(at + kMark.size(), line - at - kMark.size()));
    const std::size_t end = next == std::string_view::npos ? input.size() : next - 1;
    parts[name] = std::string(input.substr(line + 1, std::max(end, line + 1) - line - 1));
    at = next;
  }
  return parts;
}

const std::filesystem::path& Folder::path() {
  static const ProcessFolder folder;
  return folder.path;
}

Folder::Folder(std::string_view input) : parts_(parts_of(input)) {
  std::map<std::string, std::string> hashes;
  const auto put = [&](const std::string& name, const std::string& bytes) {
    write(name, bytes);
    hashes["@" + name] = xxh3_hex(bytes);
  };
  // The JSON files are written last, because they may contain checksums of the other files.
  for (const std::string_view kind : {".safetensors", ".csv", ".jinja", ".json"})
    for (auto& [name, part] : parts_) {
      if (!is_file_name(name) || !name.ends_with(kind)) continue;
      if (kind == ".json")
        for (const auto& [mark, hash] : hashes) part = replace_all(part, mark, hash);
      put(name, kind == ".safetensors" ? safetensors(part) : part);
    }
}

Folder::~Folder() {
  std::error_code ignored;
  for (const auto& [name, part] : parts_)
    if (is_file_name(name)) std::filesystem::remove(path() / name, ignored);
}

std::string Folder::word(const std::string& name) const {
  const auto found = parts_.find(name);
  return found == parts_.end() ? std::string() : found->second;
}

void Folder::write(const std::string& name, std::string_view bytes) {
  const int file = ::open((path() / name).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  require(
      file >= 0 && ::write(file, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
      "cannot write", name);
  ::close(file);
}

}  // namespace kvlab::fuzz
