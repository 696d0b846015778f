#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "tools/command.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

// Shell completions, made from the commands' tables of options.

/// An option as a shell sees it.
struct Flag {
  std::string name, value, text;     ///< value: what --help shows for it; empty if there is none
  std::vector<std::string> choices;  ///< the words of a value such as "cpu|cuda"
};

std::vector<Flag> flags_of(const Command& command) {
  OptionTable table;
  command.prepare(table);
  std::vector<Flag> flags{{"help", "", "show the usage of the command", {}}};
  for (const OptionTable::Option& option : table.options()) {
    if (option.name == command.positional) continue;
    Flag flag{option.name, option.value_name, option.help, {}};
    if (flag.value.find('|') != std::string::npos) flag.choices = split_list(flag.value, '|');
    std::erase_if(flag.choices, [](const std::string& word) { return word.starts_with('@'); });
    // Words in capitals, such as those of --tree NODES|FILE, stand for a value.
    const auto is_value = [](const std::string& word) {
      return word.front() >= 'A' && word.front() <= 'Z';
    };
    if (std::ranges::any_of(flag.choices, is_value)) flag.choices.clear();
    flags.push_back(std::move(flag));
  }
  return flags;
}

/// Text in single quotes, for a shell.
std::string quote(std::string text) {
  for (std::size_t at = 0; (at = text.find('\'', at)) != std::string::npos; at += 4)
    text.replace(at, 1, "'\\''");
  return "'" + text + "'";
}

std::string bash() {
  std::string cases, names;
  for (const Command& command : all_commands()) {
    names += " " + command.name;
    std::string flags;
    for (const Flag& flag : flags_of(command)) flags += " --" + flag.name;
    cases += fmt::format("    {}) words=\"{}\" ;;\n", command.name, flags.substr(1));
  }
  return fmt::format(
      "# bash completion of kvlab, made by `kvlab manual bash`\n"
      "_kvlab() {{\n  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} "
      "words=\n"
      "  if ((COMP_CWORD == 1)); then\n"
      "    COMPREPLY=($(compgen -W \"help{}\" -- \"$word\"))\n    return\n  fi\n"
      "  case $before in\n"
      "    --device) COMPREPLY=($(compgen -W \"cpu cuda\" -- \"$word\")); return ;;\n"
      "    help) COMPREPLY=($(compgen -W \"{}\" -- \"$word\")); return ;;\n  esac\n"
      "  [[ $word == -* ]] || return\n  case ${{COMP_WORDS[1]}} in\n{}  esac\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n}}\n"
      "complete -o default -F _kvlab kvlab\n",
      names, names.substr(1), cases);
}

/// Text in an option's brackets of zsh's _arguments.
std::string escape_brackets(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') safe += '\\';
    safe += c;
  }
  return safe;
}

std::string zsh() {
  std::string commands, cases;
  for (const Command& command : all_commands()) {
    commands += "    " + quote(command.name + ":" + escape_brackets(command.summary)) + "\n";
    std::string flags;
    for (const Flag& flag : flags_of(command)) {
      std::string spec = fmt::format("--{}[{}]", flag.name, escape_brackets(flag.text));
      if (!flag.choices.empty())
        spec += fmt::format(":{}:({})", escape_brackets(flag.value), fmt::join(flag.choices, " "));
      else if (!flag.value.empty())
        spec += fmt::format(":{}:_files", escape_brackets(flag.value));
      flags += " \\\n      " + quote(spec);
    }
    cases +=
        fmt::format("    {}) _arguments{} \\\n      '*:file:_files' ;;\n", command.name, flags);
  }
  return fmt::format(
      "#compdef kvlab\n# zsh completion of kvlab, made by `kvlab manual zsh`\n"
      "_kvlab() {{\n  local -a commands=(\n{}  )\n"
      "  if ((CURRENT == 2)); then _describe command commands; return; fi\n"
      "  local command=${{words[2]}}\n  shift words\n  ((CURRENT--))\n"
      "  case $command in\n{}  esac\n}}\n_kvlab \"$@\"\n",
      commands, cases);
}

std::string fish() {
  std::string text = "# fish completion of kvlab, made by `kvlab manual fish`\n";
  const auto escape = [](std::string words) {
    for (std::size_t at = 0; (at = words.find_first_of("\\'", at)) != std::string::npos; at += 2)
      words.insert(at, 1, '\\');
    return "'" + words + "'";
  };
  for (const Command& command : all_commands()) {
    text += fmt::format("complete -c kvlab -n __fish_use_subcommand -a {} -d {}\n", command.name,
                        escape(command.summary));
    for (const Flag& flag : flags_of(command)) {
      text += fmt::format("complete -c kvlab -n '__fish_seen_subcommand_from {}' -l {} -d {}",
                          command.name, flag.name, escape(flag.text));
      if (!flag.choices.empty())
        text += fmt::format(" -x -a '{}'", fmt::join(flag.choices, " "));
      else if (!flag.value.empty())
        text += " -r";
      text += "\n";
    }
  }
  return text;
}

/// A script that completes commands and options in bash, zsh or fish. Throws std::invalid_argument
/// for another shell.
std::string completion_script(const std::string& shell) {
  if (shell == "bash") return bash();
  if (shell == "zsh") return zsh();
  if (shell == "fish") return fish();
  throw std::invalid_argument(fmt::format("'{}' should be bash, zsh or fish", shell));
}

struct Request {
  std::string what;
};

void add_options(OptionTable& table, Request& request) {
  table.text("what", "bash|zsh|fish", request.what, "");
}

void check(Request&, const GivenOptions& given) {
  given.require("what", "kvlab manual bash, zsh or fish");
}

int run(const Request& request) {
  fmt::print("{}", completion_script(request.what));
  return 0;
}

}  // namespace

Command manual_command() {
  return {.name = "manual",
          .summary = "prints the completion of commands and options for a shell",
          .usage = "bash|zsh|fish",
          .example = "kvlab manual bash",
          .positional = "what",
          .prepare = make_prepare(add_options, check, run)};
}

}  // namespace kvlab
