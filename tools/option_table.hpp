// The options of a command as a table. Each line names an option, the word for its value in --help,
// the member of the request that it fills, and its help text. The initial value of the member is
// the option's default. The parser, --help, shell completion and the keywords of the Python package
// all read this table.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace kvlab {

/// The numbers that an option accepts.
struct Range {
  std::int64_t min_value, max_value;
};
/// For an option whose range depends on other options. The command calls check_range() itself, once
/// it knows the other options.
inline constexpr Range kAnyNumber{std::numeric_limits<std::int64_t>::min(),
                                  std::numeric_limits<std::int64_t>::max()};
/// Throws std::invalid_argument if the value of `--name` is outside the range.
void check_range(std::string_view name, std::int64_t value, Range range);

/// How many words may follow each occurrence of an option that takes several texts. With either
/// value the option may be repeated.
enum class Takes { one_word, several_words };

/// The names of the options that the user gave.
class GivenOptions {
 public:
  explicit GivenOptions(std::vector<std::string> names) : names_(std::move(names)) {}
  bool has(std::string_view name) const;
  /// Throws std::invalid_argument if `--name` was not given; `example` shows correct use:
  /// "--model DIR".
  void require(std::string_view name, std::string_view example) const;
  /// Throws std::invalid_argument for the first of `names` that was given. The message is
  /// "--NAME: WHY; leave it out".
  void refuse(std::initializer_list<const char*> names, std::string_view why) const;
  /// Like refuse(), with the reason "requires --NEEDED", if the option `needed` was not given.
  void refuse_without(const char* needed, std::initializer_list<const char*> names) const;

 private:
  std::vector<std::string> names_;
};

class OptionTable {
 public:
  /// A value as the command line gives it. Its type is the kind of the option: switch, whole
  /// number, number, text or several texts.
  using Value = std::variant<bool, std::int64_t, double, std::string, std::vector<std::string>>;

  struct Option {
    std::string name, value_name;
    Value kind;  ///< its type is the kind of the option; its value has no meaning
    std::string help;
    std::string standard = "";  ///< the default as --help shows it; empty: it shows none
    Takes takes = Takes::one_word;
    std::function<void(const Value&)> fill;  ///< throws std::invalid_argument for a wrong value
  };
  using Check = std::function<void(const GivenOptions&)>;

  /// A switch: sets `target` to `value`.
  void flag(const char* name, bool& target, std::string help, bool value = true);
  /// `standard`: the default that --help shows, if it is not the initial value of `target`; ""
  /// shows none.
  void text(const char* name, const char* value_name, std::string& target, std::string help,
            std::optional<std::string> standard = std::nullopt);
  /// A text that may be empty. An empty text differs from an option that was not given.
  void text(const char* name, const char* value_name, std::optional<std::string>& target,
            std::string help);
  /// A text that `parse` converts to the target's value.
  template <class T, class Parse>
  void parsed(const char* name, const char* value_name, T& target, Parse parse, std::string help,
              std::string standard = "") {
    read_text(
        name, value_name, [&target, parse](const std::string& text) { target = parse(text); },
        std::move(help), std::move(standard));
  }
  /// A list in one text, separated by commas. Spaces around its entries are dropped.
  void list(const char* name, const char* value_name, std::vector<std::string>& target,
            std::string help);
  void texts(const char* name, const char* value_name, Takes takes,
             std::vector<std::string>& target, std::string help);
  void number(const char* name, const char* value_name, double& target, std::string help);
  /// A whole number. `standard`: see text().
  template <class Number>
  void whole(const char* name, const char* value_name, Range range, Number& target,
             std::string help, std::optional<std::string> standard = std::nullopt) {
    read_whole(
        name, value_name, range,
        [&target](std::int64_t value) { target = static_cast<Number>(value); }, std::move(help),
        standard.value_or(std::to_string(target)));
  }

  /// Adds a check of several options together, or a step that completes a request. Checks run in
  /// the order of these calls, after all options are filled. They throw std::invalid_argument or
  /// std::runtime_error.
  void check(Check check) { checks_.push_back(std::move(check)); }

  const std::vector<Option>& options() const { return options_; }
  const std::vector<Check>& checks() const { return checks_; }

 private:
  void read_text(const char* name, const char* value_name,
                 std::function<void(const std::string&)> read, std::string help,
                 std::string standard);
  void read_whole(const char* name, const char* value_name, Range range,
                  std::function<void(std::int64_t)> read, std::string help, std::string standard);

  std::vector<Option> options_;
  std::vector<Check> checks_;
};

/// The entries of a list, without surrounding spaces.
std::vector<std::string> list_entries(std::string_view text);

/// The name of an option's kind: "switch", "whole", "number", "text" or "texts".
std::string_view name_of_kind(const OptionTable::Option& option);

}  // namespace kvlab
