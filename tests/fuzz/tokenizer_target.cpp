// Input: an arbitrary tokenizer.json. It is loaded, encodes a text and decodes the ids. Then it is
// loaded again as the tokenizer of a model with fewer ids.
#include "engine/tokenizer/tokenizer.hpp"
#include "tests/fuzz/fuzz.hpp"

using namespace kvlab;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::Folder folder(fuzz::text_of(data, size));
  const auto path = folder / "tokenizer.json";
  const std::string text = folder.word("text");
  std::optional<Tokenizer> tokenizer;
  if (!fuzz::accepts([&] { tokenizer = Tokenizer::load(path); }, path.string())) return 0;
  fuzz::accepts([&] {
    const std::vector<std::int32_t> ids = tokenizer->encode(text);
    for (const std::int32_t id : ids)
      fuzz::require(id >= 0 && static_cast<std::size_t>(id) < tokenizer->vocab_size(),
                    "an id beyond the vocabulary");
    tokenizer->decode(ids);
    tokenizer->decode(ids, false);
  });
  tokenizer->id_of(text);
  fuzz::accepts([&] {
    const Tokenizer model_tokenizer = Tokenizer::load(path, tokenizer->vocab_size() - 1);
    model_tokenizer.decode(model_tokenizer.encode(text));
  });
  return 0;
}
