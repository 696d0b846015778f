// Copies fields of untrusted result files to pages. A table lists the fields and their kinds.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string_view>
#include <vector>

#include "traces/base/json_fields.hpp"

namespace kvlab {

/// `policy` is text that is written without default settings. `optional` is a number, or null if
/// the field is absent.
enum class FieldKind { text, policy, whole, number, optional };

struct CopiedField {
  std::string_view key;
  FieldKind kind;
};

/// Returns the fields under the same keys. Throws std::runtime_error if a field is not of its kind.
nlohmann::ordered_json copy_fields(const JsonFields& from, std::span<const CopiedField> fields);
/// Copies the same fields of each object of a list.
nlohmann::ordered_json copy_fields(const std::vector<JsonFields>& from,
                                   std::span<const CopiedField> fields);

}  // namespace kvlab
