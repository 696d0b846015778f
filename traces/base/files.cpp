#include "traces/base/files.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace kvlab {
namespace {

std::runtime_error failure(const std::filesystem::path& path, std::string_view action, int error) {
  return std::runtime_error(fmt::format("{}: cannot {}: {}", path.string(), action,
                                        std::generic_category().message(error)));
}

void refuse_special(const std::filesystem::path& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode)) return;
  throw std::runtime_error(
      fmt::format("{}: exists and is not a regular file, so it is not replaced; give another file",
                  path.string()));
}

std::filesystem::path folder_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : ".";
}

constexpr std::string_view kPart = ".part";
constexpr std::size_t kRandomPart = 1 + 8;  // a dot and unpredictable hex digits

std::string part_ending() {
  std::uint32_t number = 0;
  if (::getrandom(&number, sizeof number, 0) != sizeof number)
    throw std::runtime_error(
        "the system provides no random numbers, so a file cannot be created safely");
  return fmt::format(".{:08x}{}", number, kPart);
}

}  // namespace

Descriptor::Descriptor(const std::filesystem::path& path, int flags)
    : value_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {}

Descriptor::~Descriptor() {
  if (value_ >= 0) ::close(value_);
}

std::string finished_name(std::string name) {
  if (!name.ends_with(kPart)) return name;
  name.resize(name.size() - kPart.size());
  const std::size_t at = name.size() - std::min(name.size(), kRandomPart);
  const bool is_random = name.size() > kRandomPart && name[at] == '.' &&
                         name.find_first_not_of("0123456789abcdef", at + 1) == std::string::npos;
  if (is_random) name.resize(at);
  return name;
}

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)), part_(path_) {
  refuse_special(path_);
  part_ += part_ending();
  file_ = ::open(part_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file_ >= 0) return;
  const int error = errno;
  part_.clear();
  throw failure(path_, "create", error);
}

AtomicFile::~AtomicFile() {
  if (file_ >= 0) ::close(file_);
  if (!part_.empty()) ::unlink(part_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(file_, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw failure(path_, "write", errno);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
}

void AtomicFile::commit() {
  if (::fsync(file_) != 0) throw failure(path_, "sync", errno);
  if (::close(std::exchange(file_, -1)) != 0) throw failure(path_, "close", errno);
  if (::rename(part_.c_str(), path_.c_str()) != 0)
    throw failure(path_, "rename a file to it", errno);
  part_.clear();
  sync_folder_of(path_);
}

FileLock::FileLock(std::filesystem::path path, int flags, Wait wait)
    : path_(std::move(path)), file_(path_, flags) {
  const int operation = wait == Wait::yes ? LOCK_EX : LOCK_EX | LOCK_NB;
  error_ = file_.get() >= 0 && ::flock(file_.get(), operation) == 0 ? 0 : errno;
}

bool FileLock::held_by_another() const { return error_ == EWOULDBLOCK; }

void FileLock::require(const std::string& taken) const {
  if (held_by_another()) throw std::runtime_error(taken);
  if (error_ != 0) throw failure(path_, "lock", error_);
}

OutputPlace::OutputPlace(const std::filesystem::path& path)
    : alone_(folder_of(path), O_RDONLY | O_DIRECTORY, FileLock::Wait::yes) {
  std::error_code ignored;
  std::vector<std::filesystem::path> rests;
  for (const auto& entry : std::filesystem::directory_iterator(folder_of(path), ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.size() != path.filename().native().size() + kRandomPart + kPart.size() ||
        finished_name(name) != path.filename())
      continue;
    const FileLock lock(entry.path(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW);
    if (lock.held_by_another())
      throw std::runtime_error(fmt::format(
          "{}: another command is writing it; wait for it, or give another path", path.string()));
    if (lock.is_held()) rests.push_back(entry.path());
  }
  // Removes the unlocked .part files only after the loop. If another command is writing PATH, it
  // may own some of them. It also owns a locked file, so the loop has thrown in this case, and
  // nothing is removed.
  for (const auto& rest : rests) std::filesystem::remove_all(rest, ignored);
}

AtomicFolder::AtomicFolder(std::filesystem::path path) : path_(std::move(path)) {
  if (path_.filename().empty()) path_ = path_.parent_path();  // "out/"
  std::error_code error;
  for (auto parent = path_.parent_path();
       !parent.empty() && !std::filesystem::exists(parent, error); parent = parent.parent_path())
    parents_.push_back(parent);
  error.clear();
  if (!parents_.empty()) std::filesystem::create_directories(parents_.front(), error);
  try {
    if (error) throw failure(path_, "create", error.value());
    const OutputPlace place(path_);
    if (std::filesystem::exists(std::filesystem::symlink_status(path_, error)))
      throw std::runtime_error(
          fmt::format("{} exists already; remove it, or give another directory", path_.string()));
    std::filesystem::path part = path_;
    part += part_ending();
    if (::mkdir(part.c_str(), 0777) != 0) throw failure(path_, "create", errno);
    part_ = std::move(part);
    lock_.emplace(part_, O_RDONLY | O_DIRECTORY);
  } catch (const std::runtime_error&) {
    remove_parents();
    throw;
  }
}

AtomicFolder::~AtomicFolder() {
  if (!part_.empty()) remove();
}

/// Does not remove a parent folder that contains other files.
void AtomicFolder::remove() {
  std::error_code ignored;
  std::filesystem::remove_all(part_, ignored);
  remove_parents();
}

void AtomicFolder::remove_parents() {
  std::error_code ignored;
  for (const auto& parent : parents_) std::filesystem::remove(parent, ignored);
}

void AtomicFolder::commit() {
  std::error_code error;
  std::filesystem::rename(part_, path_, error);
  if (error) throw failure(path_, "create", error.value());
  part_.clear();
  sync_folder_of(path_);
}

MappedFile::MappedFile(const std::filesystem::path& path) {
  // O_NONBLOCK: opening a pipe must not block.
  const Descriptor descriptor(path, O_RDONLY | O_NONBLOCK);
  if (descriptor.get() < 0) throw failure(path, "open", errno);
  struct stat status {};
  if (::fstat(descriptor.get(), &status) != 0) throw failure(path, "examine", errno);
  if (!S_ISREG(status.st_mode))
    throw std::runtime_error(
        fmt::format("{}: is not a regular file; give a regular file", path.string()));
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0) return;  // an empty file cannot be mapped
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor.get(), 0);
  if (address == MAP_FAILED) throw failure(path, "map", errno);
  bytes_ = {static_cast<const std::byte*>(address), size};
}

MappedFile::~MappedFile() {
  if (bytes_.empty()) return;
  ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

void MappedFile::release() const {
  if (!bytes_.empty())
    ::madvise(const_cast<std::byte*>(bytes_.data()), bytes_.size(), MADV_DONTNEED);
}

std::string last_name(const std::filesystem::path& path) {
  std::filesystem::path clean = std::filesystem::absolute(path).lexically_normal();
  if (!clean.has_filename()) clean = clean.parent_path();  // "a/trace/"
  return clean.filename().string();
}

void sync_folder_of(const std::filesystem::path& path) {
  const std::filesystem::path folder = folder_of(path);
  const Descriptor descriptor(folder, O_RDONLY | O_DIRECTORY);
  if (descriptor.get() < 0) throw failure(folder, "open", errno);
  // Some file systems cannot sync a folder (EINVAL). This is not an error.
  if (::fsync(descriptor.get()) != 0 && errno != EINVAL) throw failure(folder, "sync", errno);
}

void write_file_atomically(const std::filesystem::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

std::string read_text_file(const std::filesystem::path& path, std::size_t max_bytes) {
  const MappedFile file(path);
  if (file.bytes().size() > max_bytes)
    throw std::runtime_error(fmt::format("{}: is {} bytes long, but at most {} are allowed",
                                         path.string(), file.bytes().size(), max_bytes));
  try {
    return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
  } catch (const std::bad_alloc&) {
    throw std::runtime_error(fmt::format("{}: is {} bytes long, which does not fit into memory",
                                         path.string(), file.bytes().size()));
  }
}

std::string xxh3_hex(std::span<const std::byte> bytes) {
  return fmt::format("{:016x}", XXH3_64bits(bytes.data(), bytes.size()));
}

std::string xxh3_hex(std::string_view text) { return xxh3_hex(std::as_bytes(std::span(text))); }

OutputClaim::OutputClaim(const std::filesystem::path& path) : place_(path), part_(path) {
  ::flock(part_.descriptor(), LOCK_EX | LOCK_NB);
  place_.reset();
}

}  // namespace kvlab
