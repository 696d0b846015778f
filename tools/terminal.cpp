#include "tools/terminal.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <new>

#include "traces/base/message.hpp"

namespace kvlab {
namespace {

/// The process's only Terminal.
Terminal* terminal = nullptr;

/// Makes reads and writes of standard streams fail if the streams are closed. Otherwise they would
/// use a file that is opened later.
void keep_closed_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(stream, F_GETFD) < 0) [[maybe_unused]]
      const int same = ::open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

std::string line_of(std::string_view text) {
  if (text.ends_with('\n')) text.remove_suffix(1);
  return brief_line(text) + "\n";
}

std::FILE* through(cookie_write_function_t* write) {
  std::FILE* const stream = ::fopencookie(nullptr, "w", {nullptr, write, nullptr, nullptr});
  if (!stream) throw std::bad_alloc();
  std::setvbuf(stream, nullptr, _IONBF, 0);  // unbuffered: each print call is one write
  return stream;
}

}  // namespace

Terminal::Terminal() : out_(stdout), error_(stderr) {
  keep_closed_streams();
  terminal = this;
  stdout = through(take_output);
  stderr = through(take_line);
}

Terminal::~Terminal() {
  say_lines();
  stdout = out_;
  stderr = error_;
  terminal = nullptr;
}

void Terminal::drop_lines() {
  const std::lock_guard lock(mutex_);
  lines_.clear();
}

void Terminal::say_lines() {
  std::fwrite(lines_.data(), 1, lines_.size(), error_);
  std::fflush(error_);
  lines_.clear();
}

void Terminal::end_bar() {
  if (!bar_open_) return;
  bar_open_ = false;
  lines_ += '\n';
  say_lines();
}

ssize_t Terminal::take_output(void*, const char* bytes, std::size_t count) {
  if (!terminal) return static_cast<ssize_t>(count);
  Terminal& self = *terminal;
  try {
    const std::lock_guard lock(self.mutex_);
    self.end_bar();
    self.say_lines();
    const std::string text = printable_lines({bytes, count});
    if (std::fwrite(text.data(), 1, text.size(), self.out_) == text.size() &&
        std::fflush(self.out_) == 0)
      return static_cast<ssize_t>(count);
  } catch (const std::bad_alloc&) {  // exceptions must not pass through the C library
    errno = ENOMEM;
  }
  return 0;
}

ssize_t Terminal::take_line(void*, const char* bytes, std::size_t count) {
  if (!terminal) return static_cast<ssize_t>(count);
  Terminal& self = *terminal;
  const std::string_view text(bytes, count);
  try {
    const std::lock_guard lock(self.mutex_);
    if (text.starts_with('\r')) {
      self.lines_ += text;
      self.say_lines();
      self.bar_open_ = true;
    } else {
      self.end_bar();
      if (text != "\n") self.lines_ += line_of(text);
    }
  } catch (const std::bad_alloc&) {  // the message is lost
  }
  return static_cast<ssize_t>(count);
}

}  // namespace kvlab
