// The text form of modifiers: `every=64`, `once`, `smooth=3`, `pool=max`, `scope=layer`,
// `group=max`.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "policies/policy.hpp"

namespace kvlab {

std::span<const std::string_view> modifier_names();
bool is_modifier(std::string_view name);

/// Sets the modifier `name`, one of modifier_names(). `value` is the text after the equals sign;
/// `once` alone means `once=yes`. Throws std::invalid_argument with a message that begins with
/// `what`.
void set_modifier(Modifiers& modifiers, std::string_view name, std::string_view value,
                  std::string_view what);

/// Name and value of every modifier that `modifiers` sets, and of every modifier that is off
/// although `standard` sets it.
std::vector<std::pair<std::string_view, std::string>> modifier_settings(const Modifiers& modifiers,
                                                                        const Modifiers& standard);
/// The same in text form: `every=64`, `once`.
std::vector<std::string> modifier_texts(const Modifiers& modifiers, const Modifiers& standard);

/// Throws std::invalid_argument if a modifier of a policy would have no effect.
void check_modifiers(const Modifiers& modifiers, const PolicyInfo& info);

}  // namespace kvlab
