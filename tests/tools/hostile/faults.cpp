// A library for LD_PRELOAD. It counts the calls by which a program changes files, or its
// allocations, and makes one of them fail. Environment variables:
//   FAULT_AT=N        the number of the call that fails, from 1; 0 or absent: none fails
//   FAULT=KIND        kill: the process is killed before the call; ENOSPC, EIO: the call fails with
//                     this error; EINTR, short: write() writes less and may be called again; memory:
//                     the N-th operator new fails
//   FAULT_COUNT=FILE  receives the number of calls at the end
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

enum class Kind { none, kill, error, again, partial, memory };

struct Plan {
  Kind kind = Kind::none;
  int error = 0;
  long at = 0;
  std::atomic<long> seen{0};

  Plan() {
    const auto text = [](const char* name) {
      const char* const value = std::getenv(name);
      return value ? value : "";
    };
    at = std::atol(text("FAULT_AT"));
    const char* const requested = text("FAULT");
    const auto is = [&](const char* name) { return std::strcmp(requested, name) == 0; };
    if (is("kill")) kind = Kind::kill;
    if (is("ENOSPC")) kind = Kind::error, error = ENOSPC;
    if (is("EIO")) kind = Kind::error, error = EIO;
    if (is("EINTR")) kind = Kind::again;
    if (is("short")) kind = Kind::partial;
    if (is("memory")) kind = Kind::memory;
  }
  ~Plan() {
    const char* const file = std::getenv("FAULT_COUNT");
    std::FILE* const out = file ? std::fopen(file, "w") : nullptr;
    if (!out) return;
    std::fprintf(out, "%ld\n", seen.load());
    std::fclose(out);
  }
};

Plan& plan() {
  static Plan plan;
  return plan;
}

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

/// Counts a call and returns whether it is the call that has to fail. With FAULT=kill, this call
/// kills the process.
bool is_the_one() {
  Plan& p = plan();
  if (p.kind == Kind::memory || ++p.seen != p.at) return false;
  if (p.kind == Kind::kill) ::kill(::getpid(), SIGKILL);
  return true;
}

/// Counts a call that can return an error. Returns whether the call has to fail; if so, sets errno.
bool fails() {
  if (!is_the_one() || plan().kind != Kind::error) return false;
  errno = plan().error;
  return true;
}

using Main = int (*)(int, char**, char**);
Main real_main = nullptr;
// Whether main() runs. Allocations before main() do not fail, because no message could report that.
std::atomic<bool> in_main{false};

int counted_main(int count, char** words, char** environment) {
  in_main = true;
  const int code = real_main(count, words, environment);
  in_main = false;
  return code;
}

void* allocated(std::size_t bytes, std::size_t alignment) {
  Plan& p = plan();
  if (p.kind == Kind::memory && in_main && ++p.seen == p.at) throw std::bad_alloc();
  void* const block =
      alignment ? std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)
                : std::malloc(bytes ? bytes : 1);
  if (!block) throw std::bad_alloc();
  return block;
}

}  // namespace

extern "C" {

int __libc_start_main(Main main, int count, char** words, void (*init)(), void (*end)(),
                      void (*loader_end)(), void* stack) {
  real_main = main;
  using Start = int (*)(Main, int, char**, void (*)(), void (*)(), void (*)(), void*);
  return next<Start>("__libc_start_main")(counted_main, count, words, init, end, loader_end, stack);
}

ssize_t write(int file, const void* data, size_t bytes) {
  const auto real = next<ssize_t (*)(int, const void*, size_t)>("write");
  if (is_the_one()) {
    switch (plan().kind) {
      case Kind::error:
        errno = plan().error;
        return -1;
      case Kind::again:
        errno = EINTR;
        return -1;
      case Kind::partial:
        return real(file, data, bytes - bytes / 2);
      default:
        break;
    }
  }
  return real(file, data, bytes);
}

int open(const char* path, int flags, ...) {
  mode_t mode = 0;
  if (flags & (O_CREAT | O_TMPFILE)) {
    va_list list;
    va_start(list, flags);
    mode = va_arg(list, mode_t);
    va_end(list);
  }
  if ((flags & O_CREAT) && fails()) return -1;
  return next<int (*)(const char*, int, ...)>("open")(path, flags, mode);
}

int fsync(int file) { return fails() ? -1 : next<int (*)(int)>("fsync")(file); }
int rename(const char* from, const char* to) {
  return fails() ? -1 : next<int (*)(const char*, const char*)>("rename")(from, to);
}
int mkdir(const char* path, mode_t mode) {
  return fails() ? -1 : next<int (*)(const char*, mode_t)>("mkdir")(path, mode);
}
int remove(const char* path) { return fails() ? -1 : next<int (*)(const char*)>("remove")(path); }
int unlinkat(int folder, const char* path, int flags) {
  return fails() ? -1 : next<int (*)(int, const char*, int)>("unlinkat")(folder, path, flags);
}
void* mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset) {
  if (file >= 0 && fails()) return MAP_FAILED;
  return next<void* (*)(void*, size_t, int, int, int, off_t)>("mmap")(address, bytes, protection,
                                                                      flags, file, offset);
}

}  // extern "C"

void* operator new(std::size_t bytes) { return allocated(bytes, 0); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocated(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, std::size_t) noexcept { std::free(block); }
void operator delete(void* block, std::align_val_t) noexcept { std::free(block); }
void operator delete(void* block, std::size_t, std::align_val_t) noexcept { std::free(block); }
