#include "traces/base/output_claim.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>

#include <stdexcept>
#include <system_error>

namespace kvlab {

OutputClaim::OutputClaim(const std::filesystem::path& path) : part_(path) {
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  // Who looks for claims and makes one is alone with it. Some file systems have no locks: there the
  // last of two stands.
  const FileLock alone(folder, O_RDONLY | O_DIRECTORY, FileLock::Wait::yes);
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    if (name != path.filename() && finished_name(name) == path.filename() &&
        FileLock(entry.path(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW).held_by_another())
      throw std::runtime_error(
          fmt::format("{}: another command is making it; wait for that one, or name another file",
                      path.string()));
  }
  ::flock(part_.descriptor(), LOCK_EX | LOCK_NB);
}

}  // namespace kvlab
