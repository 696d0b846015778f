#include "policies/modifiers/text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <stdexcept>

namespace kvlab {
namespace {

std::uint32_t parse_count(std::string_view text, std::string_view what, std::uint32_t min_value) {
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < min_value ||
      value >= 1u << 31)
    throw std::invalid_argument(
        fmt::format("{}: '{}' should be a whole number of tokens, at least {} and below 2^31", what,
                    text, min_value));
  return value;
}

/// Returns whether `text` equals `second`. Throws unless it equals `first` or `second`.
bool parse_choice(std::string_view text, std::string_view what, std::string_view first,
                  std::string_view second) {
  if (text != first && text != second)
    throw std::invalid_argument(
        fmt::format("{}: '{}' should be {} or {}", what, text, first, second));
  return text == second;
}

}  // namespace

std::span<const std::string_view> modifier_names() {
  static constexpr std::string_view kNames[] = {"every", "once",  "smooth",
                                                "pool",  "scope", "group"};
  return kNames;
}

bool is_modifier(std::string_view name) {
  return std::ranges::find(modifier_names(), name) != modifier_names().end();
}

void set_modifier(Modifiers& modifiers, std::string_view name, std::string_view value,
                  std::string_view what) {
  if (name == "every") modifiers.every = parse_count(value, what, 1);
  if (name == "once") modifiers.once = parse_choice(value, what, "no", "yes");
  if (name == "smooth") modifiers.smooth = parse_count(value, what, 0);
  if (name == "pool")
    modifiers.pool =
        parse_choice(value, what, "mean", "max") ? Modifiers::Pool::max : Modifiers::Pool::mean;
  if (name == "scope")
    modifiers.scope = parse_choice(value, what, "head", "layer") ? Modifiers::Scope::layer
                                                                 : Modifiers::Scope::head;
  if (name == "group")
    modifiers.group =
        parse_choice(value, what, "sum", "max") ? Modifiers::Group::max : Modifiers::Group::sum;
}

std::vector<std::pair<std::string_view, std::string>> modifier_settings(const Modifiers& modifiers,
                                                                        const Modifiers& standard) {
  std::vector<std::pair<std::string_view, std::string>> settings;
  const auto add = [&](std::string_view name, auto member, auto text) {
    constexpr Modifiers kNone;
    if (modifiers.*member != kNone.*member || modifiers.*member != standard.*member)
      settings.emplace_back(name, text(modifiers.*member));
  };
  const auto number = [](std::uint32_t value) { return fmt::format("{}", value); };
  add("every", &Modifiers::every, number);
  add("once", &Modifiers::once, [](bool once) { return once ? "yes" : "no"; });
  add("smooth", &Modifiers::smooth, number);
  add("pool", &Modifiers::pool,
      [](Modifiers::Pool pool) { return pool == Modifiers::Pool::max ? "max" : "mean"; });
  add("scope", &Modifiers::scope,
      [](Modifiers::Scope scope) { return scope == Modifiers::Scope::layer ? "layer" : "head"; });
  add("group", &Modifiers::group,
      [](Modifiers::Group group) { return group == Modifiers::Group::max ? "max" : "sum"; });
  return settings;
}

std::vector<std::string> modifier_texts(const Modifiers& modifiers, const Modifiers& standard) {
  std::vector<std::string> texts;
  for (const auto& [name, value] : modifier_settings(modifiers, standard))
    texts.push_back(name == "once" && value == "yes" ? "once" : fmt::format("{}={}", name, value));
  return texts;
}

void check_modifiers(const Modifiers& modifiers, const PolicyInfo& info) {
  if (modifiers.once && modifiers.every > 1)
    throw std::invalid_argument(
        fmt::format("policy {}: under once tokens are evicted only after a prompt, so every={} has "
                    "no effect; use every=1 or once=no",
                    info.name, modifiers.every));
  if (modifiers.pool == Modifiers::Pool::max && modifiers.smooth == 0)
    throw std::invalid_argument(
        fmt::format("policy {}: pool=max has no effect without smooth; give smooth=R, the number "
                    "of positions on either side",
                    info.name));
  if (modifiers.group == Modifiers::Group::max && !needs_mass(info.needs))
    throw std::invalid_argument(
        fmt::format("policy {}: group=max applies to accumulated attention, which {} does not "
                    "observe; leave it out",
                    info.name, info.name));
}

}  // namespace kvlab
