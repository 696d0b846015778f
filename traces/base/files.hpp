// Files: atomic writing, reading through a memory mapping, and locks.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvlab {

/// An open file or folder; the destructor closes it.
class Descriptor {
 public:
  Descriptor(const std::filesystem::path& path, int flags);
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return value_; }  ///< -1 if it could not be opened; errno says why

 private:
  int value_;
};

/// A file that is written under the name PATH.XXXXXXXX.part, where XXXXXXXX is unpredictable.
/// commit() syncs it, renames it to PATH and syncs the folder. Without commit() the destructor
/// removes it. Every failure throws std::runtime_error that names the file.
class AtomicFile {
 public:
  /// Refuses a PATH that exists and is not a regular file, because a rename would replace a device
  /// or a pipe by a file.
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void commit();
  /// The descriptor of the open file; valid until commit().
  int descriptor() const { return file_; }

 private:
  std::filesystem::path path_, part_;
  int file_ = -1;
};

/// The final name of NAME.part or NAME.XXXXXXXX.part: NAME. Returns other names unchanged.
std::string finished_name(std::string name);

/// An exclusive lock on a file or folder; the destructor releases it.
class FileLock {
 public:
  enum class Wait { no, yes };
  /// `flags`: passed to open().
  FileLock(std::filesystem::path path, int flags, Wait wait = Wait::no);

  bool is_held() const { return error_ == 0; }
  bool held_by_another() const;
  /// Throws std::runtime_error if this object does not hold the lock. `taken` is the message if
  /// another process holds it.
  void require(const std::string& taken) const;

 private:
  std::filesystem::path path_;
  Descriptor file_;
  int error_;  // errno; 0: locked
};

/// Exclusive access to the names of PATH and its .part files, so that a command can create and lock
/// a .part file. Throws std::runtime_error if another process is writing PATH, that is, if a locked
/// PATH.XXXXXXXX.part exists. Removes unlocked .part files, which killed processes left behind. On
/// a file system without locks, the last of two writers of PATH wins, and .part files that killed
/// processes left behind are not removed.
class OutputPlace {
 public:
  explicit OutputPlace(const std::filesystem::path& path);

 private:
  FileLock alone_;
};

/// A folder that is filled under the name PATH.XXXXXXXX.part and is locked, so that only one of two
/// processes that write the same PATH continues. commit() renames it to PATH. Without commit() the
/// destructor removes the folder, its contents and the parent folders that were created for it.
class AtomicFolder {
 public:
  /// Throws std::runtime_error if PATH exists, another process is writing it, or it cannot be
  /// created.
  explicit AtomicFolder(std::filesystem::path path);
  ~AtomicFolder();
  AtomicFolder(const AtomicFolder&) = delete;
  AtomicFolder& operator=(const AtomicFolder&) = delete;

  std::filesystem::path operator/(const std::filesystem::path& name) const { return part_ / name; }
  void commit();

 private:
  void remove();
  void remove_parents();

  std::filesystem::path path_, part_;
  std::vector<std::filesystem::path> parents_;  // parents that were created, innermost first
  std::optional<FileLock> lock_;                // on part_
};

/// The bytes of a file, mapped for reading. The file must not be truncated while it is mapped.
class MappedFile {
 public:
  /// Throws std::runtime_error if `path` is not a regular file or cannot be read.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  /// Drops the pages that have been read, so that a large file does not occupy memory. The bytes
  /// stay valid: reading them loads the pages again.
  void release() const;

 private:
  std::span<const std::byte> bytes_;
};

/// The last name of a path, ignoring trailing slashes and dots: `trace` for "a/trace/" and
/// "a/trace/.". For ".", the name of the current folder.
std::string last_name(const std::filesystem::path& path);
/// Writes `text` to PATH through an AtomicFile. On a failure it throws std::runtime_error, PATH is
/// unchanged, and no .part file is left.
void write_file_atomically(const std::filesystem::path& path, std::string_view text);
/// Syncs the folder of `path`, so that a name just created by a rename survives a crash. Throws
/// std::runtime_error on failure.
void sync_folder_of(const std::filesystem::path& path);
/// Reads a text file. Throws std::runtime_error if it cannot be read or is longer than `max_bytes`.
std::string read_text_file(const std::filesystem::path& path, std::size_t max_bytes);
/// XXH3-64 as 16 hex digits.
std::string xxh3_hex(std::span<const std::byte> bytes);
std::string xxh3_hex(std::string_view text);

// A file that only one process at a time may write.

/// A claim to write PATH, held while a command runs: if two commands claim the same PATH, the
/// second is refused. The claim is an empty PATH.XXXXXXXX.part under a lock. A file that a killed
/// process left has no lock, so it is not a claim and is removed.
class OutputClaim {
 public:
  /// Throws std::runtime_error that names PATH if PATH is already claimed or cannot be written.
  explicit OutputClaim(const std::filesystem::path& path);

 private:
  std::optional<OutputPlace> place_;  // held until part_ exists
  AtomicFile part_;                   // never committed
};

}  // namespace kvlab
