// Filters what a command prints, so that it is safe for a terminal.
#pragma once

#include <cstdio>
#include <mutex>
#include <string>

namespace kvlab {

/// While this object exists, everything printed to `stdout` and `stderr` goes through it, because
/// quoted names, files and tokens may contain anything.
///
/// On stdout, line ends and tabs stay, and other control characters become question marks. On
/// stderr, each print is one line of limited length. The line waits until output or a progress bar
/// is printed. If an error occurs before then, drop_lines() removes it, so that the error is
/// printed alone. Printing to stderr never fails.
///
/// If the process was started with a closed standard stream, the stream stays closed: a file that
/// is opened later does not get its file descriptor. The streams that this object installs are
/// never closed, because a library that has its own C++ library, such as NVRTC, may hold them and
/// flush them when the process ends.
class Terminal {
 public:
  Terminal();
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  /// Drops the waiting lines, because an error is printed instead.
  void drop_lines();

 private:
  static ssize_t take_output(void* cookie, const char* bytes, std::size_t count);
  static ssize_t take_line(void* cookie, const char* bytes, std::size_t count);
  void say_lines();
  /// Ends the line of a progress bar, so that the next text begins on a new line.
  void end_bar();

  std::FILE *out_, *error_;  // the original streams
  std::mutex mutex_;
  std::string lines_;      // waiting lines
  bool bar_open_ = false;  // whether the current line shows a progress bar
};

}  // namespace kvlab
