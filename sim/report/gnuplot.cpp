#include "sim/report/gnuplot.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <filesystem>
#include <stdexcept>
#include <system_error>

#include "traces/base/files.hpp"
#include "traces/base/process.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kMaxSvgBytes = std::size_t{64} << 20;
constexpr int kFontSize = 16;
constexpr const char* kNotInstalled =
    "gnuplot is not installed; Debian's package gnuplot-nox has it";

/// Runs gnuplot on a file, its messages to another. Returns its exit code.
int run_gnuplot(const std::filesystem::path& script, const std::filesystem::path& messages) {
  try {
    // -d: whoever runs this may have settings of their own, which the page should not show.
    return run_program({"gnuplot", "-d", script.string()}, messages);
  } catch (const std::system_error& error) {
    throw std::runtime_error(error.code().value() == ENOENT
                                 ? kNotInstalled
                                 : "gnuplot cannot be run: " + error.code().message());
  }
}

/// What gnuplot draws of `script` on `terminal`.
std::string drawn(std::string_view script, std::string_view terminal, std::string_view name) {
  const TemporaryFolder scratch;
  const auto svg = scratch / "figure", messages = scratch / "messages",
             file = scratch / "figure.gp";
  const std::string whole =
      fmt::format("set encoding utf8\nset terminal {}\nset output {}\n{}\nset output\n", terminal,
                  gnuplot_string(svg.string()), script);
  write_file_atomically(file, whole);
  const int status = run_gnuplot(file, messages);
  if (status == 127) throw std::runtime_error(kNotInstalled);
  if (status != 0 || !std::filesystem::exists(svg))
    throw std::runtime_error(fmt::format("gnuplot failed on figure {}: {}", name,
                                         read_text_file(messages, kMaxSvgBytes).substr(0, 4096)));
  return read_text_file(svg, kMaxSvgBytes);
}

}  // namespace

std::string gnuplot_svg(const Drawing& drawing, std::string_view name) {
  return drawn(drawing.script,
               fmt::format("svg size {},{} dynamic noenhanced font 'sans-serif,{}' name {}",
                           drawing.width, drawing.height, kFontSize, gnuplot_string(name)),
               name);
}

std::string gnuplot_png(const Drawing& drawing, std::string_view name) {
  return drawn(drawing.script,
               fmt::format("pngcairo size {},{} noenhanced font 'sans-serif,{}' fontscale 1.5 "
                           "linewidth 2 pointscale 2 background '#ffffff'",
                           2 * drawing.width, 2 * drawing.height, kFontSize),
               name);
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
