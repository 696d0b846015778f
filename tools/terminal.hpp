// What the command says, as a terminal may have it.
#pragma once

#include <cstdio>
#include <mutex>
#include <string>

namespace kvlab {

/// While it lives, all that is printed to `stdout` and `stderr` goes through it, whatever the
/// names, files and tokens that it quotes hold:
/// - stdout: line ends and tabs stay, of other control characters a question mark;
/// - stderr: each print is one line, not too long. It waits until there is something else to show,
///   output or a bar, so that an error found before stands alone. It never fails.
/// A standard stream that is closed stays so: no file that is opened takes its place.
/// The streams that it puts there are never closed: a library that was loaded meanwhile, as NVRTC
/// is, with a C++ library of its own, keeps them, and flushes them when the process ends.
class Terminal {
 public:
  Terminal();
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  /// Forgets the lines that wait: an error is to be said instead.
  void drop_lines();

 private:
  static ssize_t take_output(void* cookie, const char* bytes, std::size_t count);
  static ssize_t take_line(void* cookie, const char* bytes, std::size_t count);
  void say_lines();

  std::FILE *out_, *error_;  // the true ones
  std::mutex mutex_;
  std::string lines_;  // that wait
};

}  // namespace kvlab
