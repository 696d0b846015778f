// Fields of a tokenizer.json: each getter throws std::runtime_error that names the field.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab::tokenizer {

using Json = nlohmann::json;

/// Longer added tokens, and longer texts that replace others, are refused: a hostile file could
/// make encoding quadratic with them.
constexpr std::size_t kMaxContentBytes = 1024;

/// The file's JSON. Throws std::runtime_error that names the file.
Json read_json(const std::filesystem::path& path);

/// One object of the file and where it stands there ("pre_tokenizer.pretokenizers[1]").
class Node : public JsonFields {
 public:
  using JsonFields::JsonFields;
  static Node root(const Json& json);

  /// Where a member stands, for messages.
  std::string path(std::string_view key) const;

  /// The member, or nullptr where it is missing or null.
  const Json* find(std::string_view key) const { return json_find(json(), key); }
  Node child(std::string_view key) const { return {any(key), path(key)}; }
  std::vector<Node> children(std::string_view key) const;

  /// Any text, as a token may be.
  std::string text(std::string_view key) const { return raw(key); }
  std::string text_or(std::string_view key, std::string_view fallback) const;
  /// A text that the tokenizer puts in place of others: at most kMaxContentBytes.
  std::string content(std::string_view key) const;
  std::string type() const { return text("type"); }
};

/// The text of `pattern`: {"String": ...}; regular expressions are refused.
std::string string_pattern(const Node& node);

/// Ids above this are refused: larger than any vocabulary, small enough for a table.
constexpr std::int32_t kMaxId = (1 << 24) - 1;
/// `json` as a token id. Throws std::runtime_error that names `where`.
std::int32_t token_id(const Json& json, std::string_view where);

/// The objects of a step that may be null, one, or a (nested) Sequence with its parts under
/// `parts_key`.
std::vector<Node> flatten_sequence(const Node& root, std::string_view key,
                                   std::string_view parts_key);

}  // namespace kvlab::tokenizer
