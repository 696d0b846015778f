// A small tokenizer.json for tests to change and load.
#pragma once

#include <string>

#include "engine/tokenizer/tokenizer.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"

namespace kvlab::test {

/// A tokenizer in the style of SentencePiece. Its ids: <unk> 0, <s> 1, </s> 2, all bytes from 3 on,
/// "▁" 259, a 260, b 261, c 262, ab 263, abc 264, "▁a" 265.
inline nlohmann::json small_tokenizer() {
  nlohmann::json vocab = {{"<unk>", 0}, {"<s>", 1}, {"</s>", 2}};
  constexpr std::string_view kHex = "0123456789ABCDEF";
  for (int byte = 0; byte < 256; ++byte) {
    vocab[std::string("<0x") + kHex[byte / 16] + kHex[byte % 16] + ">"] = 3 + byte;
  }
  int id = 259;
  for (const char* token : {"▁", "a", "b", "c", "ab", "abc", "▁a"}) vocab[token] = id++;
  const auto added = [](int token_id, const char* content) {
    return nlohmann::json{
        {"id", token_id}, {"content", content}, {"special", true}, {"normalized", false}};
  };
  return {
      {"added_tokens", {added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")}},
      {"normalizer", nullptr},
      {"pre_tokenizer", {{"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "never"}}},
      {"post_processor", nullptr},
      {"decoder",
       {{"type", "Sequence"},
        {"decoders",
         {{{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}},
          {{"type", "ByteFallback"}},
          {{"type", "Fuse"}}}}}},
      {"model",
       {{"type", "BPE"},
        {"unk_token", "<unk>"},
        {"byte_fallback", true},
        {"vocab", vocab},
        {"merges", {"a b", "ab c", "▁ a"}}}}};
}

/// Loads a text as tokenizer.json.
inline Tokenizer load_text(const std::string& text) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "tokenizer.json";
  write_bytes(path, text);
  return Tokenizer::load(path);
}

inline Tokenizer load_json(const nlohmann::json& json) { return load_text(json.dump()); }

}  // namespace kvlab::test
