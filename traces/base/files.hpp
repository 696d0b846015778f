// Files: written whole or not at all, read by mapping, locked.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvlab {

/// An open file or folder, closed with this object.
class Descriptor {
 public:
  Descriptor(const std::filesystem::path& path, int flags);
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return value_; }  ///< -1: it could not be opened, errno says why

 private:
  int value_;
};

/// A file being written as PATH.XXXXXXXX.part, a name that cannot be predicted and that was not
/// there. commit() syncs it, renames it to PATH and syncs the folder; without commit() it is
/// removed. Every failure throws std::runtime_error naming the file.
class AtomicFile {
 public:
  /// Refuses a PATH that exists and is no regular file: a rename would put a file in the place of a
  /// device or a pipe.
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void commit();
  /// Of the open file, until commit().
  int descriptor() const { return file_; }

 private:
  std::filesystem::path path_, part_;
  int file_ = -1;
};

/// What NAME.part or NAME.XXXXXXXX.part is to become: NAME. Other names stay as they are.
std::string finished_name(std::string name);

/// A lock on a file or folder, which goes with this object: of all that ask, one has it.
class FileLock {
 public:
  enum class Wait { no, yes };
  /// `flags`: how the file is opened.
  FileLock(std::filesystem::path path, int flags, Wait wait = Wait::no);

  bool held() const { return error_ == 0; }
  bool held_by_another() const;
  /// Throws std::runtime_error where this has no lock: `taken` if another has it.
  void require(const std::string& taken) const;

 private:
  std::filesystem::path path_;
  Descriptor file_;
  int error_;  // 0: locked
};

/// Alone with the place of PATH, so that a part of it can be made and locked there. Throws
/// std::runtime_error where another process makes PATH: a PATH.XXXXXXXX.part is there under a lock.
/// Those without one, which killed processes left, are taken away. Some file systems have no locks:
/// there the last of two that make PATH stands, and what was left stays.
class OutputPlace {
 public:
  explicit OutputPlace(const std::filesystem::path& path);

 private:
  FileLock alone_;
};

/// A folder being filled as PATH.XXXXXXXX.part, under a lock: of two processes that make one PATH,
/// one goes on. commit() renames it to PATH; without commit() it is removed with all that is in it,
/// and so are the parent folders that were made for it.
class AtomicFolder {
 public:
  /// Throws std::runtime_error where PATH exists, another process makes it, or it cannot be made.
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
  std::vector<std::filesystem::path> parents_;  // that were made, the innermost first
  std::optional<FileLock> lock_;                // of part_
};

/// The bytes of a file, mapped for reading. The file must not be truncated while it is mapped.
class MappedFile {
 public:
  /// Throws std::runtime_error if `path` is no regular file or cannot be read.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  /// Lets go of the pages that have been read, which stay valid: reading brings them back. So a
  /// large file does not stay in the process's memory.
  void release() const;

 private:
  std::span<const std::byte> bytes_;
};

/// The last name of a path, whatever slashes and dots follow it: `trace` of "a/trace/" and
/// "a/trace/."; of "." the name of the folder that it is.
std::string last_name(const std::filesystem::path& path);
/// Writes `text` to PATH by an AtomicFile. Throws std::runtime_error; PATH is then as
/// it was, and no .part is left.
void write_file_atomically(const std::filesystem::path& path, std::string_view text);
/// Makes the names in the folder of `path` last: those just made by a rename. Throws
/// std::runtime_error.
void sync_folder_of(const std::filesystem::path& path);
/// The whole of a text file of at most `max_bytes`. Throws std::runtime_error.
std::string read_text_file(const std::filesystem::path& path, std::size_t max_bytes);
/// XXH3-64 as 16 hex digits.
std::string xxh3_hex(std::span<const std::byte> bytes);
std::string xxh3_hex(std::string_view text);

// A file that one process at a time makes.

/// A claim to write PATH, held from a command's beginning to its end: of two that claim one PATH at
/// once, the second is refused. It is an empty PATH.XXXXXXXX.part under a lock, which goes with the
/// claim; one that a killed process left has no lock, is none, and is taken away.
class OutputClaim {
 public:
  /// Throws std::runtime_error naming PATH where it is claimed already, or no file can be made
  /// there.
  explicit OutputClaim(const std::filesystem::path& path);

 private:
  std::optional<OutputPlace> place_;  // until the part is there
  AtomicFile part_;                   // never committed
};

}  // namespace kvlab
