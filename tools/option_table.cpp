#include "tools/option_table.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <stdexcept>

#include "traces/base/text.hpp"

namespace kvlab {

void check_range(std::string_view name, std::int64_t value, Range range) {
  if (value < range.min_value || value > range.max_value)
    throw std::invalid_argument(fmt::format("--{}: {} should be between {} and {}", name, value,
                                            range.min_value, range.max_value));
}

bool GivenOptions::has(std::string_view name) const {
  return std::ranges::find(names_, name) != names_.end();
}

void GivenOptions::require(std::string_view name, std::string_view example) const {
  if (!has(name)) throw std::invalid_argument(fmt::format("--{}: missing; give {}", name, example));
}

void GivenOptions::refuse(std::initializer_list<const char*> names, std::string_view why) const {
  for (const char* name : names)
    if (has(name)) throw std::invalid_argument(fmt::format("--{}: {}; leave it out", name, why));
}

void GivenOptions::refuse_without(const char* needed,
                                  std::initializer_list<const char*> names) const {
  if (!has(needed)) refuse(names, fmt::format("requires --{}", needed));
}

void OptionTable::flag(const char* name, bool& target, std::string help, bool value) {
  options_.push_back({.name = name,
                      .value_name = "",
                      .kind = false,
                      .help = std::move(help),
                      .fill = [&target, value](const Value&) { target = value; }});
}

void OptionTable::read_text(const char* name, const char* value_name,
                            std::function<void(const std::string&)> read, std::string help,
                            std::string standard) {
  options_.push_back({.name = name,
                      .value_name = value_name,
                      .kind = std::string(),
                      .help = std::move(help),
                      .standard = std::move(standard),
                      .fill = [read = std::move(read)](const Value& value) {
                        read(std::get<std::string>(value));
                      }});
}

void OptionTable::text(const char* name, const char* value_name, std::string& target,
                       std::string help, std::optional<std::string> standard) {
  parsed(name, value_name, target, std::identity(), std::move(help), standard.value_or(target));
}

void OptionTable::text(const char* name, const char* value_name, std::optional<std::string>& target,
                       std::string help) {
  parsed(name, value_name, target, std::identity(), std::move(help));
}

void OptionTable::list(const char* name, const char* value_name, std::vector<std::string>& target,
                       std::string help) {
  parsed(name, value_name, target, list_entries, std::move(help),
         fmt::format("{}", fmt::join(target, ",")));
}

void OptionTable::texts(const char* name, const char* value_name, Takes takes,
                        std::vector<std::string>& target, std::string help) {
  options_.push_back({.name = name,
                      .value_name = value_name,
                      .kind = std::vector<std::string>(),
                      .help = std::move(help),
                      .takes = takes,
                      .fill = [&target](const Value& value) {
                        target = std::get<std::vector<std::string>>(value);
                      }});
}

void OptionTable::number(const char* name, const char* value_name, double& target,
                         std::string help) {
  options_.push_back({.name = name,
                      .value_name = value_name,
                      .kind = double{},
                      .help = std::move(help),
                      .standard = fmt::format("{:g}", target),
                      .fill = [&target](const Value& value) { target = std::get<double>(value); }});
}

void OptionTable::read_whole(const char* name, const char* value_name, Range range,
                             std::function<void(std::int64_t)> read, std::string help,
                             std::string standard) {
  options_.push_back({.name = name,
                      .value_name = value_name,
                      .kind = std::int64_t{},
                      .help = std::move(help),
                      .standard = std::move(standard),
                      .fill = [name, range, read = std::move(read)](const Value& value) {
                        check_range(name, std::get<std::int64_t>(value), range);
                        read(std::get<std::int64_t>(value));
                      }});
}

std::vector<std::string> list_entries(std::string_view text) {
  std::vector<std::string> entries = split_list(text);
  for (std::string& entry : entries) {
    entry.erase(0, std::min(entry.find_first_not_of(' '), entry.size()));
    entry.erase(entry.find_last_not_of(' ') + 1);
  }
  return entries;
}

std::string_view name_of_kind(const OptionTable::Option& option) {
  constexpr std::string_view kNames[] = {"switch", "whole", "number", "text", "texts"};
  return kNames[option.kind.index()];
}

}  // namespace kvlab
