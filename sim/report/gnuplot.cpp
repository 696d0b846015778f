#include "sim/report/gnuplot.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <stdexcept>
#include <system_error>

#include "traces/base/safetensors.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kMaxSvgBytes = std::size_t{64} << 20;
constexpr int kFontSize = 16;

/// A directory that is gone when its owner is.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "kvlab-XXXXXX").string();
    if (!mkdtemp(pattern.data()))
      throw std::runtime_error(
          fmt::format("{}: cannot be made: {}", pattern, std::generic_category().message(errno)));
    path_ = pattern;
  }
  ~ScratchDirectory() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  std::filesystem::path operator/(std::string_view file) const { return path_ / file; }

 private:
  std::filesystem::path path_;
};

/// Where a child's standard streams go.
class FileActions {
 public:
  FileActions() { posix_spawn_file_actions_init(&actions_); }
  ~FileActions() { posix_spawn_file_actions_destroy(&actions_); }
  FileActions(const FileActions&) = delete;
  FileActions& operator=(const FileActions&) = delete;
  void open(int stream, const std::string& path, int flags) {
    posix_spawn_file_actions_addopen(&actions_, stream, path.c_str(), flags, 0600);
  }
  const posix_spawn_file_actions_t* get() const { return &actions_; }

 private:
  posix_spawn_file_actions_t actions_;
};

/// Runs gnuplot on a file, its messages to another. Returns its wait status.
int run_gnuplot(const std::filesystem::path& script, const std::filesystem::path& messages) {
  FileActions actions;
  actions.open(STDIN_FILENO, "/dev/null", O_RDONLY);
  actions.open(STDOUT_FILENO, "/dev/null", O_WRONLY);
  actions.open(STDERR_FILENO, messages.string(), O_WRONLY | O_CREAT | O_TRUNC);
  // -d: whoever runs this may have settings of their own, which the page should not show.
  std::string program = "gnuplot", defaults = "-d", file = script.string();
  char* const arguments[] = {program.data(), defaults.data(), file.data(), nullptr};
  pid_t child = 0;
  if (const int error = posix_spawnp(&child, "gnuplot", actions.get(), nullptr, arguments, environ))
    throw std::runtime_error(
        error == ENOENT ? "gnuplot is not installed; Debian's package gnuplot-nox has it"
                        : "gnuplot cannot be run: " + std::generic_category().message(error));
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

}  // namespace

std::string gnuplot_svg(std::string_view script, int width, int height, std::string_view name) {
  const ScratchDirectory scratch;
  const auto svg = scratch / "figure.svg", messages = scratch / "messages",
             file = scratch / "figure.gp";
  const std::string whole = fmt::format(
      "set encoding utf8\nset terminal svg size {},{} dynamic noenhanced font 'sans-serif,{}' name "
      "{}\n"
      "set output {}\n{}\nset output\n",
      width, height, kFontSize, gnuplot_string(name), gnuplot_string(svg.string()), script);
  write_file_atomically(file, whole);
  const int status = run_gnuplot(file, messages);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
    throw std::runtime_error("gnuplot is not installed; Debian's package gnuplot-nox has it");
  if (status != 0 || !std::filesystem::exists(svg))
    throw std::runtime_error(fmt::format("gnuplot failed on figure {}: {}", name,
                                         read_text_file(messages, kMaxSvgBytes).substr(0, 4096)));
  return read_text_file(svg, kMaxSvgBytes);
}

std::string gnuplot_string(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text) {
    if (c == '\'') quoted += '\'';
    quoted += c == '\n' ? ' ' : c;
  }
  return quoted + "'";
}

}  // namespace kvlab
