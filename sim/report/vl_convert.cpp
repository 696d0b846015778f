// Vega-Lite to pictures, by a program of its own.
#include <fmt/format.h>

#include <cerrno>
#include <system_error>

#include "sim/report/figure.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/process.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

constexpr const char* kByModule = R"(import sys
sys.path = [folder for folder in sys.path if folder]  # not the working folder
try:
    import vl_convert
except ImportError:
    sys.exit(127)
for name in sys.argv[1:]:
    spec = open(name + ".vl.json", encoding="utf-8").read()
    open(name + ".svg", "w", encoding="utf-8").write(vl_convert.vegalite_to_svg(spec))
    open(name + ".png", "wb").write(vl_convert.vegalite_to_png(spec, scale=2))
)";

/// Whether the program was there. Throws std::runtime_error: it failed.
bool ran(std::vector<std::string> words, const fs::path& log) {
  const std::string program = words.front();
  int status = 127;
  try {
    status = run_program(std::move(words), log);
  } catch (const std::system_error& error) {
    if (error.code().value() != ENOENT) throw;
  }
  if (status == 127) return false;
  if (status != 0)
    throw std::runtime_error(
        fmt::format("--figures: {} failed: {}", program,
                    read_text_file(log, std::size_t{64} << 20).substr(0, 4096)));
  return true;
}

bool by_command(const std::vector<std::string>& names, const fs::path& log) {
  for (const std::string& name : names) {
    const std::string in = name + ".vl.json";
    if (!ran({"vl-convert", "vl2svg", "-i", in, "-o", name + ".svg"}, log)) return false;
    ran({"vl-convert", "vl2png", "--scale", "2", "-i", in, "-o", name + ".png"}, log);
  }
  return true;
}

}  // namespace

std::string write_figures(const NamedFigures& figures, const AtomicFolder& folder) {
  std::vector<std::string> names;
  for (const auto& [name, spec] : figures) {
    names.push_back((folder / name).string());
    write_file_atomically(names.back() + ".vl.json", json_text(spec, 1) + "\n");
  }
  const TemporaryFolder scratch;
  const fs::path log = scratch / "messages";
  std::vector<std::string> words{"python3", "-c", kByModule};
  words.insert(words.end(), names.begin(), names.end());
  const bool drawn = by_command(names, log) || ran(std::move(words), log);
  return drawn ? ""
               : "figures are Vega-Lite alone, for want of vl-convert (pip install "
                 "vl-convert-python)";
}

}  // namespace kvlab
