#include "engine/tokenizer/json.hpp"

#include <fmt/format.h>

#include <stdexcept>

#include "engine/checkpoint/checkpoint.hpp"
#include "traces/base/json.hpp"
#include "traces/base/safetensors.hpp"

namespace kvlab::tokenizer {
namespace {

constexpr int kMaxNesting = 8;
constexpr std::string_view kTopLevel = "the top level";

void append_flattened(const Node& node, std::string_view parts_key, int depth,
                      std::vector<Node>& out) {
  if (node.type() != "Sequence") {
    out.push_back(node);
    return;
  }
  if (depth == kMaxNesting) {
    throw std::runtime_error(
        fmt::format("{}: sequences nest deeper than {}", node.where(), kMaxNesting));
  }
  for (const Node& part : node.children(parts_key)) {
    append_flattened(part, parts_key, depth + 1, out);
  }
}

}  // namespace

Json read_json(const std::filesystem::path& path) {
  return parse_json(read_text_file(path, kMaxTokenizerBytes), path.string());
}

Node Node::root(const Json& json) { return {json, std::string(kTopLevel)}; }

std::string Node::path(std::string_view key) const {
  return where() == kTopLevel ? std::string(key) : fmt::format("{}.{}", where(), key);
}

std::vector<Node> Node::children(std::string_view key) const {
  std::vector<Node> nodes;
  for (const Json& item : list(key)) {
    nodes.emplace_back(item, fmt::format("{}[{}]", path(key), nodes.size()));
  }
  return nodes;
}

std::string Node::text_or(std::string_view key, std::string_view fallback) const {
  return find(key) == nullptr ? std::string(fallback) : text(key);
}

std::string Node::content(std::string_view key) const {
  std::string content = text(key);
  if (content.size() > kMaxContentBytes) {
    throw std::runtime_error(fmt::format("{} has more than {} bytes", path(key), kMaxContentBytes));
  }
  return content;
}

std::string string_pattern(const Node& node) {
  const Node pattern = node.child("pattern");
  if (pattern.find("String") == nullptr) {
    throw std::runtime_error(
        fmt::format("{}: only a String is supported as {}", pattern.where(), node.type()));
  }
  std::string text = pattern.text("String");
  if (text.empty()) throw std::runtime_error(fmt::format("{} is empty", pattern.path("String")));
  return text;
}

std::int32_t token_id(const Json& json, std::string_view where) {
  // a negative number is read as a very large one, and refused
  const bool fits =
      json.is_number_integer() && json.get<std::uint64_t>() <= static_cast<std::uint64_t>(kMaxId);
  if (!fits) {
    throw std::runtime_error(fmt::format("{} is {}; a token id from 0 to {} is expected", where,
                                         json_quoted(json.dump()), kMaxId));
  }
  return json.get<std::int32_t>();
}

std::vector<Node> flatten_sequence(const Node& root, std::string_view key,
                                   std::string_view parts_key) {
  std::vector<Node> steps;
  if (root.find(key) != nullptr) append_flattened(root.child(key), parts_key, 0, steps);
  return steps;
}

}  // namespace kvlab::tokenizer
