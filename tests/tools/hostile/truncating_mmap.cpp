// A library for LD_PRELOAD. It truncates a file whose name contains $TRUNCATES to one page directly
// after the file is mapped.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <cstring>
#include <string>

extern "C" void* mmap(void* address, size_t bytes, int protection, int flags, int file,
                      off_t offset) noexcept {
  void* const mapped =
      reinterpret_cast<void*>(syscall(SYS_mmap, address, bytes, protection, flags, file, offset));
  const char* const name = std::getenv("TRUNCATES");
  if (file < 0 || !name || mapped == MAP_FAILED) return mapped;
  char path[PATH_MAX] = "";
  const std::string link = "/proc/self/fd/" + std::to_string(file);
  if (readlink(link.c_str(), path, sizeof path - 1) > 0 && std::strstr(path, name) &&
      truncate(path, 4096) != 0)
    std::abort();
  return mapped;
}

extern "C" void* mmap64(void* address, size_t bytes, int protection, int flags, int file,
                        off_t offset) noexcept {
  return mmap(address, bytes, protection, flags, file, offset);
}
