#include "policies/tiers/format.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

namespace kvlab {
namespace {

constexpr const KvFormat& kK4V2 = kKvFormats[4];

}  // namespace

std::string KvFormat::name() const {
  if (kivi) return fmt::format("kivi{}", key->bits);
  if (*this == kK4V2) return "k4v2";
  if (key == value) return std::string(key->name);
  return fmt::format("{}/{}", key->name, value->name);
}

std::optional<KvFormat> find_kv_format(std::string_view name) {
  for (const KvFormat& format : kKvFormats)
    if (format.name() == name) return format;
  const std::size_t slash = name.find('/');
  const std::string_view value = slash == name.npos ? name : name.substr(slash + 1);
  const KvFormat format{find_row_format(name.substr(0, slash)), find_row_format(value)};
  if (!format.key || !format.value) return std::nullopt;
  return format;
}

std::string row_format_names() {
  std::vector<std::string_view> names;
  for (const RowFormat& format : kRowFormats) names.push_back(format.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

std::string known_formats() {
  return row_format_names() + ", k4v2, kivi4, kivi2, or KEY/VALUE such as 8/4";
}

}  // namespace kvlab
