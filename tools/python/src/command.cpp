// Runs the commands of the end-to-end evaluation in this process, so that Python functions can be
// policies.
#include <fmt/format.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "tools/command.hpp"
#include "tools/embedding.hpp"
#include "tools/python/src/long_call.hpp"
#include "tools/python/src/policy.hpp"

namespace kvlab::python {
namespace {

Command command_called(const std::string& name) {
  const auto commands = all_commands();
  const auto command = std::ranges::find(commands, name, &Command::name);
  if (command == commands.end())
    throw std::invalid_argument(fmt::format("unknown command '{}'", name));
  return *command;
}

/// Runs a command and returns what it prints with --json.
std::string run_in_process(const std::string& name, const std::vector<std::string>& words,
                           const std::vector<Policy>& own, const nb::object& progress) {
  return result_of_long([&, told = progress_to(progress)] {
    Embedding within(compiled_from(own), told);
    if (run_command(command_called(name), words) != 0)
      throw std::runtime_error(fmt::format("kvlab {}: a check failed", name));
    return within.json;
  });
}

/// The command's options, each with the kind of its value.
std::vector<std::pair<std::string, std::string>> options_of(const std::string& name) {
  OptionTable table;
  command_called(name).prepare(table);
  std::vector<std::pair<std::string, std::string>> kinds;
  for (const OptionTable::Option& option : table.options())
    kinds.emplace_back(option.name, name_of_kind(option));
  return kinds;
}

/// The `kvlab` program, for the script that pip installs.
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
             nb::arg("progress").none(),
             "Runs a command in this process and returns what it prints with --json.");
  module.def("command_options", options_of, nb::arg("name"),
             "Options of a command, each with its kind: switch, whole, number, text or texts.");
  module.def("main", main_in_process, nb::arg("words"),
             "Runs `kvlab WORDS...` and returns its exit code.");
}

}  // namespace kvlab::python
