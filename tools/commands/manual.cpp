#include "tools/manual.hpp"

#include <fmt/format.h>

#include "tools/options.hpp"

namespace kvlab {
namespace {

void add_options(po::options_description& options) {
  options.add_options()("what", text_option("man|bash|zsh|fish"), "");
}

int run(const po::variables_map& options) {
  const std::string what = required(options, "what", "kvlab manual man, bash, zsh or fish");
  fmt::print("{}", what == "man" ? man_page() : completion_script(what));
  return 0;
}

}  // namespace

Command manual_command() {
  return {.name = "manual",
          .summary = "the man page, or completion for a shell, made from the options",
          .usage = "man|bash|zsh|fish",
          .example = "kvlab manual bash",
          .add_options = add_options,
          .positional = "what",
          .run = run};
}

}  // namespace kvlab
