#include "traces/base/output_claim.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace kvlab {
namespace {

/// A lock that goes with this object; on a file that can be opened, and where no other has it.
class Lock {
 public:
  Lock(const std::filesystem::path& path, int flags, int operation)
      : file_(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | flags)) {
    held_by_another = file_ >= 0 && ::flock(file_, operation) != 0 && errno == EWOULDBLOCK;
  }
  ~Lock() {
    if (file_ >= 0) ::close(file_);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  bool held_by_another = false;

 private:
  int file_;
};

}  // namespace

OutputClaim::OutputClaim(const std::filesystem::path& path) : part_(path) {
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  // Who looks for claims and makes one is alone with it. Some file systems have no locks: there the
  // last of two stands.
  const Lock alone(folder, O_DIRECTORY, LOCK_EX);
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    if (name != path.filename() && finished_name(name) == path.filename() &&
        Lock(entry.path(), O_NOFOLLOW, LOCK_EX | LOCK_NB).held_by_another)
      throw std::runtime_error(
          fmt::format("{}: another command is making it; wait for that one, or name another file",
                      path.string()));
  }
  ::flock(part_.descriptor(), LOCK_EX | LOCK_NB);
}

}  // namespace kvlab
