// The commands of the closed loop, in this process, so that Python's functions may be among the
// policies.
#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "tools/command.hpp"
#include "tools/embedding.hpp"
#include "tools/python/src/long_call.hpp"
#include "tools/python/src/policy.hpp"

namespace kvlab::python {
namespace {

/// What the command prints with --json.
std::string run_in_process(const std::string& name, const std::vector<std::string>& words,
                           const std::vector<Policy>& own, const nb::object& progress) {
  return result_of_long([&, told = progress_to(progress)] {
    const auto commands = all_commands();
    const auto command = std::ranges::find(commands, name, &Command::name);
    if (command == commands.end())
      throw std::invalid_argument(fmt::format("unknown command '{}'", name));
    Embedding within(compiled_from(own), told);
    if (run_command(*command, words) != 0)
      throw std::runtime_error(fmt::format("kvlab {}: a check failed", name));
    return within.json;
  });
}

/// The command itself, for the script that pip installs.
int main_in_process(std::vector<std::string> words) {
  words.insert(words.begin(), "kvlab");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  const nb::gil_scoped_release no_gil;
  return kvlab_main(static_cast<int>(argv.size()), argv.data());
}

}  // namespace

void bind_command(nb::module_& module) {
  module.def("run_command", run_in_process, nb::arg("name"), nb::arg("words"), nb::arg("own"),
             nb::arg("progress").none(), "JSON: what a command prints.");
  module.def("main", main_in_process, nb::arg("words"), "The exit code of `kvlab WORDS...`.");
}

}  // namespace kvlab::python
