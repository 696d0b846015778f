#include "engine/tokenizer/detokenizer.hpp"

#include <fmt/format.h>

#include <stdexcept>

#include "engine/tokenizer/text.hpp"
#include "traces/base/json.hpp"
#include "traces/base/text.hpp"

namespace kvlab::tokenizer {
namespace {

std::string joined(const std::vector<std::string>& tokens) {
  std::string text;
  for (const std::string& token : tokens) text += token;
  return text;
}

std::size_t count_at(const Node& node, std::string_view key) {
  const Json& count = node.any(key);
  if (!count.is_number_unsigned()) {
    throw std::runtime_error(fmt::format("{} must be 0 or more", node.path(key)));
  }
  return count.get<std::size_t>();
}

}  // namespace

Detokenizer Detokenizer::from_file(const Node& file) {
  Detokenizer result;
  for (const Node& node : flatten_sequence(file, "decoder", "decoders")) {
    result.steps_.push_back(read_step(node));
    if (result.steps_.size() > 1 && std::holds_alternative<ByteLevel>(result.steps_.back())) {
      throw std::runtime_error(fmt::format("{}: ByteLevel must come first", node.where()));
    }
  }
  if (result.steps_.empty()) throw std::runtime_error("decoder is missing");
  return result;
}

Detokenizer::Step Detokenizer::read_step(const Node& node) {
  const std::string type = node.type();
  if (type == "ByteLevel") return ByteLevel{};
  if (type == "ByteFallback") return ByteFallback{};
  if (type == "Fuse") return Fuse{};
  if (type == "Replace") return Replace{string_pattern(node), node.content("content")};
  if (type == "Strip") return read_strip(node);
  if (type == "Metaspace") return MetaspaceMark::read(node);
  throw std::runtime_error(
      fmt::format("{}: decoder {} is not supported; ByteLevel, Metaspace, "
                  "Replace, ByteFallback, Fuse, Strip and Sequence are",
                  node.where(), json_quoted(type)));
}

Detokenizer::Strip Detokenizer::read_strip(const Node& node) {
  Strip step{node.text("content"), count_at(node, "start"), count_at(node, "stop")};
  if (step.content.empty() || char_bytes(step.content.front()) != step.content.size()) {
    throw std::runtime_error(fmt::format("{} must be one character", node.path("content")));
  }
  return step;
}

std::string Detokenizer::apply(std::vector<std::string> tokens) const {
  for (const Step& step : steps_) {
    tokens = std::visit([&](const auto& known) { return run(known, std::move(tokens)); }, step);
  }
  return joined(tokens);
}

// A token that contains a character outside the byte-level alphabet is left unchanged.
Detokenizer::Tokens Detokenizer::run(const ByteLevel&, Tokens tokens) {
  for (std::string& token : tokens) {
    if (auto bytes = chars_to_bytes(token)) token = std::move(*bytes);
  }
  return {joined(tokens)};
}

// A run of byte tokens becomes one token, so that later steps see whole characters.
Detokenizer::Tokens Detokenizer::run(const ByteFallback&, Tokens tokens) {
  Tokens out;
  bool in_bytes = false;
  for (std::string& token : tokens) {
    const auto byte = byte_of_fallback_token(token);
    if (!byte) {
      out.push_back(std::move(token));
    } else if (in_bytes) {
      out.back() += static_cast<char>(*byte);
    } else {
      out.emplace_back(1, static_cast<char>(*byte));
    }
    in_bytes = byte.has_value();
  }
  return out;
}

Detokenizer::Tokens Detokenizer::run(const Fuse&, const Tokens& tokens) { return {joined(tokens)}; }

Detokenizer::Tokens Detokenizer::run(const Replace& step, Tokens tokens) {
  for (std::string& token : tokens) token = replace_all(token, step.from, step.to);
  return tokens;
}

Detokenizer::Tokens Detokenizer::run(const Strip& step, Tokens tokens) {
  const std::size_t bytes = step.content.size();
  for (std::string& token : tokens) {
    std::size_t begin = 0, end = token.size();
    for (std::size_t i = 0; i < step.start; ++i) {
      if (token.compare(begin, bytes, step.content) != 0) break;
      begin += bytes;
    }
    for (std::size_t i = 0; i < step.stop && end >= begin + bytes; ++i) {
      if (token.compare(end - bytes, bytes, step.content) != 0) break;
      end -= bytes;
    }
    token = token.substr(begin, end - begin);
  }
  return tokens;
}

// If a mark was prepended, the tokenizers library drops every mark of the first token.
Detokenizer::Tokens Detokenizer::run(const MetaspaceMark& step, Tokens tokens) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const bool drop = i == 0 && step.scheme != PrependScheme::kNever;
    tokens[i] = replace_all(tokens[i], step.replacement, drop ? "" : " ");
  }
  return tokens;
}

}  // namespace kvlab::tokenizer
