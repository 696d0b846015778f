#include "tools/command.hpp"

#include <fmt/ostream.h>

#include <algorithm>
#include <boost/any.hpp>
#include <boost/program_options.hpp>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "policies/catalogue.hpp"
#include "policies/old_names.hpp"
#include "sim/processes/process_group.hpp"
#include "tools/embedding.hpp"
#include "traces/base/text.hpp"

namespace po = boost::program_options;

namespace kvlab {
namespace {

constexpr unsigned kColumns = 80;

using Warn = std::function<void(const std::string&)>;

/// A Boost value of type T with the option's value name and default. Boost uses the default only
/// for the help, so Boost gets it as text.
template <class T>
po::typed_value<T>* semantic_as(const OptionTable::Option& option) {
  auto* const value = po::value<T>()->value_name(option.value_name);
  return option.standard.empty() ? value : value->default_value(T(), option.standard);
}

/// How Boost parses the option. Boost takes ownership.
const po::value_semantic* semantic_of(const OptionTable::Option& option) {
  if (std::holds_alternative<bool>(option.kind)) return po::bool_switch();
  if (std::holds_alternative<std::int64_t>(option.kind)) return semantic_as<std::int64_t>(option);
  if (std::holds_alternative<double>(option.kind)) return semantic_as<double>(option);
  if (std::holds_alternative<std::string>(option.kind)) return semantic_as<std::string>(option);
  auto* const several = po::value<std::vector<std::string>>()->value_name(option.value_name);
  return option.takes == Takes::several_words ? several->multitoken() : several;
}

/// The value that Boost parsed, with the type of the option.
OptionTable::Value value_of(const po::variable_value& given, const OptionTable::Option& option) {
  return std::visit([&]<class T>(const T&) -> OptionTable::Value { return given.as<T>(); },
                    option.kind);
}

/// `text` with its lines broken at spaces; the rest of a broken line is indented.
std::string wrap(std::string_view text) {
  std::string lines;
  std::size_t column = 0;
  for (const char c : text) {
    lines += c;
    column = c == '\n' ? 0 : column + 1;
    const std::size_t space = lines.rfind(' ');
    if (column <= kColumns || space == std::string::npos || lines.size() - space > column) continue;
    lines.replace(space, 1, "\n         ");
    column = lines.size() - space - 1;
  }
  return lines;
}

void print_help(const Command& command, const po::options_description& options) {
  fmt::print("{}\n\n{}\n\n", command.summary,
             wrap(fmt::format("Usage: kvlab {} {}", command.name, command.usage)));
  // The option for positional words is not listed, because the usage shows it without its name.
  po::options_description named("Options", kColumns);
  for (const auto& option : options.options())
    if (option->long_name() != command.positional) named.add(option);
  fmt::print("{}\nExample: {}\n", fmt::streamed(named), command.example);
}

/// Boost names an option sometimes with its dashes, sometimes without.
std::string without_dashes(const std::string& option) {
  return option.substr(std::min(option.find_first_not_of('-'), option.size()));
}

[[noreturn]] void refuse_unknown(const std::string& name, const Command& command,
                                 const po::options_description& options) {
  std::vector<std::string> names;
  for (const auto& option : options.options()) names.push_back(option->long_name());
  const auto near = nearest_name(without_dashes(name), names);
  throw std::invalid_argument(
      fmt::format("unknown option '{}'; {}", name,
                  near ? "did you mean --" + *near + "?"
                       : fmt::format("`kvlab {} --help` lists the known options", command.name)));
}

/// Throws an error that says what a value should be, which Boost's message does not.
[[noreturn]] void refuse_value(const std::string& name, const po::parsed_options& parsed,
                               const po::options_description& options) {
  const auto given = std::find_if(parsed.options.begin(), parsed.options.end(),
                                  [&](const auto& option) { return option.string_key == name; });
  const auto semantic = options.find(name, false).semantic();
  const bool whole = dynamic_cast<const po::typed_value<std::int64_t>*>(semantic.get()) != nullptr;
  throw std::invalid_argument(
      fmt::format("--{}: '{}' should be {}", name,
                  given == parsed.options.end() || given->value.empty() ? "" : given->value.front(),
                  whole ? "a whole number" : "a number"));
}

/// Throws an error for a positional word that the command does not accept.
[[noreturn]] void refuse_word(const Command& command, const po::parsed_options& loose) {
  std::string last;
  for (const auto& option : loose.options)
    if (option.position_key >= 0 && !option.value.empty()) last = option.value.front();
  throw std::invalid_argument(fmt::format("'{}' is not expected here; usage: kvlab {} {}", last,
                                          command.name, command.usage));
}

/// The words of an option; empty if its value is not text.
std::vector<std::string> texts_of(const po::variable_value& value) {
  if (const auto* text = boost::any_cast<std::string>(&value.value())) return {*text};
  if (const auto* list = boost::any_cast<std::vector<std::string>>(&value.value())) return *list;
  return {};
}

/// Limits the number of values of an option, because some checks compare every value with all
/// others.
void refuse_many(const po::variables_map& values) {
  constexpr std::size_t kMax = 10'000;
  for (const auto& [name, value] : values)
    if (const std::size_t count = texts_of(value).size(); count > kMax)
      throw std::invalid_argument(
          fmt::format("--{}: {} values are given; at most {} are accepted", name, count, kMax));
}

/// A list of metrics with old names replaced by current ones.
std::string current_metrics(const std::string& list) {
  std::string text;
  for (const std::string& metric : split_list(list)) {
    if (!text.empty()) text += ',';
    text += current_metric(metric);
  }
  return text;
}

/// `words` with old names replaced by current ones: the names of options, and of metrics in the
/// values of `--metric` and `--show`. Warns about each old name.
std::vector<std::string> use_current_names(std::vector<std::string> words,
                                           const po::options_description& options,
                                           const Warn& warn_with) {
  const auto warn = [&](const std::string& before, const std::string& now) {
    warn_with(fmt::format("{0} is called {1} now; the next release will refuse {0}",
                          printable(before), printable(now)));
  };
  std::string option;  // the last option so far, whose value the next word may be
  for (std::string& word : words) {
    const bool is_option = word.starts_with("--");
    const std::size_t equals = is_option ? std::min(word.find('='), word.size()) : 0;
    if (is_option) option = word.substr(2, equals - 2);
    const std::string now(current_name(kOldOptions, option));
    if (is_option && now != option && !options.find_nothrow(option, false) &&
        options.find_nothrow(now, false)) {
      warn(fmt::format("--{}", option), fmt::format("--{}", now));
      word.replace(2, option.size(), now);
      continue;
    }
    const bool has_value = !is_option || equals < word.size();
    if (!has_value || (option != "metric" && option != "show")) continue;
    const std::size_t begin = is_option ? equals + 1 : 0;
    const std::string given = word.substr(begin), metrics = current_metrics(given);
    if (metrics == given) continue;
    warn(given, metrics);
    word.replace(begin, std::string::npos, metrics);
  }
  return words;
}

/// Warns about policies that are written with old names.
void warn_of_old_policies(const po::variables_map& values, const Warn& warn) {
  if (!values.count("policy")) return;
  for (const std::string& text : texts_of(values["policy"]))
    for (const std::string& policy : split_list(text))
      if (const std::string now = current_policy(policy); now != policy)
        warn(fmt::format("policy {} is written {} now; the next release will refuse {}",
                         printable(policy), now, printable(policy)));
}

po::variables_map parse(const Command& command, const po::options_description& options,
                        const std::vector<std::string>& given, const Warn& warn) {
  const std::vector<std::string> words = use_current_names(given, options, warn);
  po::positional_options_description positional;
  if (!command.positional.empty()) positional.add(command.positional.c_str(), -1);
  po::variables_map values;
  // Forbids abbreviated options, so that a mistyped option is reported and not taken for a longer
  // one.
  const int style = po::command_line_style::default_style & ~po::command_line_style::allow_guessing;
  po::command_line_parser loose(words);  // accepts any number of words
  loose.options(options).style(style);
  po::command_line_parser strict = loose;
  po::parsed_options parsed(&options);
  try {
    parsed = strict.positional(positional).run();
    po::store(parsed, values);
  } catch (const po::too_many_positional_options_error&) {
    refuse_word(command, loose.run());
  } catch (const po::multiple_occurrences& error) {
    const std::string name = without_dashes(error.get_option_name());
    if (name == command.positional) refuse_word(command, loose.run());
    throw std::invalid_argument(fmt::format("--{}: given more than once; give it once", name));
  } catch (const po::unknown_option& error) {
    refuse_unknown(error.get_option_name(), command, options);
  } catch (const po::invalid_option_value& error) {
    refuse_value(without_dashes(error.get_option_name()), parsed, options);
  }
  return values;
}

/// Refuses an empty path or list. It is usually a mistake in a script, and later messages could not
/// show an empty name. `--prompt` and `--turn` may be empty here, because their commands check
/// them.
void refuse_empty(const po::variables_map& values) {
  for (const auto& [name, value] : values) {
    if (value.defaulted() || name == "prompt" || name == "turn") continue;
    for (const std::string& text : texts_of(value))
      if (text.empty())
        throw std::invalid_argument(
            fmt::format("--{}: is empty; give a value, or leave the option out", name));
  }
}

/// Whether a file with this name is part of a trace, a run or a model.
bool is_part_of_input(const std::filesystem::path& path) {
  constexpr std::string_view kParts[] = {"manifest.json", "run.json",    "results.csv",
                                         "kept.json",     "config.json", "tokenizer.json"};
  return path.extension() == ".safetensors" ||
         std::ranges::find(kParts, path.filename().string()) != std::end(kParts);
}

/// Refuses an output that would overwrite the input of another option.
void refuse_overwriting(const po::variables_map& values) {
  for (const std::string output : {"out", "report", "centre-out"}) {
    if (!values.count(output)) continue;
    const std::string path = texts_of(values[output]).front();
    const bool writes_tensors = output == "centre-out";  // its command checks what it replaces
    if (!writes_tensors && is_part_of_input(path) && std::filesystem::is_regular_file(path))
      throw std::invalid_argument(fmt::format(
          "--{}: {} is part of a trace, a run or a model; name another file", output, path));
    for (const auto& [name, value] : values)
      for (const std::string& text : texts_of(value))
        for (const std::string& item : split_list(text)) {
          std::error_code none;  // a path that is not a file is not an input
          const bool is_file = item.starts_with('@');
          if (name == output || !std::filesystem::equivalent(path, item.substr(is_file), none))
            continue;
          throw std::invalid_argument(fmt::format(
              "--{}: {} is also the input of --{}; give another path", output, path, name));
        }
  }
}

/// Fills the request with the options that were given, in the order of the table, and checks it.
void fill_request(const OptionTable& table, const po::variables_map& values) {
  std::vector<std::string> given;
  for (const auto& [name, value] : values)
    if (!value.defaulted()) given.push_back(name);
  const GivenOptions names(std::move(given));
  for (const OptionTable::Option& option : table.options())
    if (names.has(option.name)) option.fill(value_of(values[option.name], option));
  for (const OptionTable::Check& check : table.checks()) check(names);
}

/// Parses and checks the words. Returns the function that runs the command.
std::function<int()> prepared_run(const Command& command, const std::vector<std::string>& words,
                                  const Warn& warn) {
  OptionTable table;
  std::function<int()> run = command.prepare(table);
  po::options_description options("Options", 100);
  options.add_options()("help,h", "this text");
  for (const OptionTable::Option& option : table.options())
    options.add_options()(option.name.c_str(), semantic_of(option), option.help.c_str());
  const po::variables_map values = parse(command, options, words, warn);
  if (values.count("help"))
    return [command, options] {
      if (leads_command_line()) print_help(command, options);
      return 0;
    };
  refuse_many(values);
  refuse_empty(values);
  warn_of_old_policies(values, warn);
  refuse_overwriting(values);
  fill_request(table, values);
  return run;
}

}  // namespace

int run_command(const Command& command, const std::vector<std::string>& words) {
  // A program that embeds commands gets an error in each of its processes. If one command line
  // started several processes (mpirun), only the first of them reports the error.
  const bool reports = Embedding::current() || leads_command_line();
  const Warn warn = [&](const std::string& what) {
    if (reports) fmt::print(stderr, "kvlab: {}\n", what);
  };
  std::function<int()> run;
  try {
    run = prepared_run(command, words, warn);
  } catch (const std::exception&) {
    if (reports) throw;
    return kBadInput;  // the first process of this command line prints the error
  }
  return run();
}

}  // namespace kvlab
