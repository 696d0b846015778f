#include "engine/tokenizer/added.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <stdexcept>

#include "engine/tokenizer/text.hpp"
#include "traces/base/cancel.hpp"
#include "traces/base/json.hpp"

namespace kvlab::tokenizer {
namespace {

AddedToken read_added_token(const Node& node) {
  const bool special = node.flag("special", false);
  AddedToken token{.content = node.content("content"),
                   .id = token_id(node.any("id"), node.path("id")),
                   .special = special,
                   .single_word = node.flag("single_word", false),
                   .lstrip = node.flag("lstrip", false),
                   .rstrip = node.flag("rstrip", false),
                   .normalized = node.flag("normalized", !special)};
  if (token.content.empty()) {
    throw std::runtime_error(fmt::format("{} is empty", node.path("content")));
  }
  return token;
}

// Returns where the character that ends before byte `end` starts. `end` is above 0.
std::size_t last_char(std::string_view text, std::size_t end) {
  do --end;
  while ((static_cast<unsigned char>(text[end]) & 0xC0) == 0x80);
  return end;
}

bool ends_with_word(std::string_view text) {
  return !text.empty() && is_word(code_point_at(text, last_char(text, text.size())));
}

bool starts_with_word(std::string_view text) {
  return !text.empty() && is_word(code_point_at(text, 0));
}

std::size_t begin_of_trailing_space(std::string_view text, std::size_t at_least) {
  std::size_t begin = text.size();
  while (begin > at_least) {
    const std::size_t previous = last_char(text, begin);
    if (!is_white_space(code_point_at(text, previous))) break;
    begin = previous;
  }
  return std::max(begin, at_least);
}

std::size_t end_of_leading_space(std::string_view text, std::size_t at) {
  while (at < text.size() && is_white_space(code_point_at(text, at))) at += char_bytes(text[at]);
  return at;
}

}  // namespace

std::vector<AddedToken> read_added_tokens(const Node& file) {
  std::vector<AddedToken> tokens;
  if (file.find("added_tokens") == nullptr) return tokens;
  std::map<std::int32_t, std::string> content_of;
  std::map<std::string, std::int32_t> id_of;
  for (const Node& node : file.children("added_tokens")) {
    AddedToken token = read_added_token(node);
    const auto [content, new_id] = content_of.emplace(token.id, token.content);
    const auto [id, new_content] = id_of.emplace(token.content, token.id);
    if (content->second != token.content) {
      throw std::runtime_error(fmt::format("{}: id {} is already that of {}", node.where(),
                                           token.id, json_quoted(content->second)));
    }
    if (id->second != token.id) {
      throw std::runtime_error(fmt::format("{}: {} already has id {}", node.where(),
                                           json_quoted(token.content), id->second));
    }
    if (new_id && new_content) tokens.push_back(std::move(token));
  }
  return tokens;
}

void AddedTokenMatcher::add(std::string_view spelling, const AddedToken& token) {
  std::uint32_t node = 0;
  for (const char byte : spelling) {
    const std::uint64_t key = std::uint64_t{node} << 8 | static_cast<std::uint8_t>(byte);
    const auto [edge, is_new] = edges_.emplace(key, static_cast<std::uint32_t>(nodes_.size()));
    if (is_new) nodes_.emplace_back();
    node = edge->second;
  }
  if (node != 0 && !nodes_[node]) nodes_[node] = token;
}

std::optional<AddedTokenMatcher::Match> AddedTokenMatcher::longest_at(std::string_view text,
                                                                      std::size_t at) const {
  std::optional<Match> longest;
  std::uint32_t node = 0;
  while (at < text.size()) {
    const auto edge = edges_.find(std::uint64_t{node} << 8 | static_cast<std::uint8_t>(text[at]));
    if (edge == edges_.end()) break;
    node = edge->second;
    ++at;
    if (nodes_[node]) longest = Match{at, &*nodes_[node]};
  }
  return longest;
}

bool AddedTokenMatcher::split(std::string_view text,
                              const std::function<bool(const Segment&)>& sink) const {
  constexpr std::size_t kBetweenChecks = 4096;  // bytes
  std::size_t done = 0;
  for (std::size_t at = 0; at < text.size();) {
    const auto match = longest_at(text, at);
    if (!match) {
      if (++at % kBetweenChecks == 0) throw_if_cancelled();
      continue;
    }
    const AddedToken& token = *match->token;
    std::size_t begin = at, end = match->end;
    at = match->end;
    if (token.single_word &&
        (ends_with_word(text.substr(0, begin)) || starts_with_word(text.substr(end)))) {
      continue;
    }
    if (token.lstrip) begin = begin_of_trailing_space(text.substr(0, begin), std::min(done, begin));
    if (token.rstrip) end = end_of_leading_space(text, end);
    if (done < begin && !sink({done, begin, std::nullopt})) return false;
    if (!sink({begin, end, token.id})) return false;
    done = end;
  }
  return done == text.size() || sink({done, text.size(), std::nullopt});
}

}  // namespace kvlab::tokenizer

namespace kvlab::tokenizer {
namespace {

void append_special(const Node& known, const Node& item, std::vector<std::int32_t>& ids) {
  const Node token = known.child(item.text("id"));
  for (const Json& id : token.list("ids")) ids.push_back(token_id(id, token.path("ids")));
}

// Reads the template for a single text: special tokens before and after $A.
PostProcessor read_template(const Node& node) {
  PostProcessor result;
  bool text_seen = false;
  for (const Node& item : node.children("single")) {
    if (item.find("SpecialToken") != nullptr) {
      append_special(node.child("special_tokens"), item.child("SpecialToken"),
                     text_seen ? result.after : result.before);
    } else if (item.child("Sequence").text("id") == "A" && !text_seen) {
      text_seen = true;
    } else {
      throw std::runtime_error(fmt::format(
          "{}: the text must appear once in the template, as sequence A", item.where()));
    }
  }
  if (!text_seen) {
    throw std::runtime_error(fmt::format("{} has no sequence A", node.path("single")));
  }
  return result;
}

}  // namespace

PostProcessor PostProcessor::from_file(const Node& file) {
  PostProcessor result;
  for (const Node& node : flatten_sequence(file, "post_processor", "processors")) {
    const std::string type = node.type();
    if (type == "TemplateProcessing") {
      // Each later template is applied around the earlier ones.
      const PostProcessor outer = read_template(node);
      result.before.insert(result.before.begin(), outer.before.begin(), outer.before.end());
      result.after.insert(result.after.end(), outer.after.begin(), outer.after.end());
    } else if (type != "ByteLevel") {  // ByteLevel only changes offsets
      throw std::runtime_error(
          fmt::format("{}: post-processor {} is not supported; "
                      "TemplateProcessing, ByteLevel and Sequence are",
                      node.where(), json_quoted(type)));
    }
  }
  return result;
}

}  // namespace kvlab::tokenizer
