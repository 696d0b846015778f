#include "engine/evaluation/copied_fields.hpp"

#include <stdexcept>

#include "policies/catalogue.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

ordered_json value_of(const JsonFields& from, const CopiedField& field) {
  switch (field.kind) {
    case FieldKind::text:
      return from.text(field.key);
    case FieldKind::policy:
      return brief_policy(from.text(field.key));
    case FieldKind::whole:
      return from.whole(field.key);
    case FieldKind::number:
      return from.number(field.key);
    case FieldKind::optional:
      return number_or_null(from.number_or_nan(field.key));
  }
  throw std::logic_error("the kind of a copied field is unknown");
}

}  // namespace

ordered_json copy_fields(const JsonFields& from, std::span<const CopiedField> fields) {
  ordered_json object = ordered_json::object();
  for (const CopiedField& field : fields) object[std::string(field.key)] = value_of(from, field);
  return object;
}

ordered_json copy_fields(const std::vector<JsonFields>& from, std::span<const CopiedField> fields) {
  ordered_json list = ordered_json::array();
  for (const JsonFields& one : from) list.push_back(copy_fields(one, fields));
  return list;
}

}  // namespace kvlab
