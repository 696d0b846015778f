// Input: arbitrary text, which the tests' tokenizers encode and decode. A byte-level tokenizer has
// to give the text back.
#include "engine/tokenizer/text.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "tests/fuzz/fuzz.hpp"

using namespace kvlab;

namespace {

struct Known {
  Tokenizer tokenizer;
  bool is_byte_level;
};

Known known(const char* name, bool is_byte_level) {
  const char* const given = std::getenv("KVLAB_FUZZ_TOKENIZERS");
  return {Tokenizer::load(std::filesystem::path(given ? given : KVLAB_TOKENIZERS) / name),
          is_byte_level};
}

void round_trip(const Known& known, std::string_view text) {
  const std::vector<std::int32_t> ids = known.tokenizer.encode(text, false);
  const std::string again = known.tokenizer.decode(ids, false);
  if (!known.is_byte_level) return;
  fuzz::require(again == tokenizer::replace_invalid_utf8(text), "decoded to another text:", again);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Known all[] = {known("llama3.json", true),   known("qwen2.json", false),
                              known("llama2.json", false),  known("metaspace.json", false),
                              known("unknown.json", false), known("gemma.json", false),
                              known("olmo.json", true),     known("merged.json", true)};
  for (const Known& one : all) round_trip(one, fuzz::text_of(data, size));
  return 0;
}
