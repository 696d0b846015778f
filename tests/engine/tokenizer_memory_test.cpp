// Measures the memory that encoding a text takes, in addition to the text.
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <string>

#include "engine/tokenizer/text.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "tests/catch.hpp"

namespace {

std::atomic<std::size_t> live = 0, peak = 0;  // bytes

}  // namespace

void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  void* const made = std::malloc(bytes);
  if (made == nullptr) return nullptr;
  const std::size_t now = live += malloc_usable_size(made);
  if (now > peak) peak = now;
  return made;
}
void* operator new(std::size_t bytes) {
  void* const made = operator new(bytes, std::nothrow);
  if (made == nullptr) throw std::bad_alloc();
  return made;
}
void operator delete(void* made) noexcept {
  live -= made == nullptr ? 0 : malloc_usable_size(made);
  std::free(made);
}
void operator delete(void* made, std::size_t) noexcept { operator delete(made); }

namespace kvlab {
namespace {

std::string repeated(const std::string& unit, std::size_t bytes) {
  std::string text;
  text.reserve(bytes + unit.size());
  while (text.size() < bytes) text += unit;
  return text;
}

/// The peak memory in bytes that is needed to encode the first `max_ids` ids of a text, without the
/// memory of the ids themselves.
std::size_t cost(const Tokenizer& tokenizer, const std::string& text, std::size_t max_ids) {
  const std::size_t before = live;
  peak = before;
  const std::size_t ids = tokenizer.encode(text, true, max_ids).size();
  // A growing array of ids is copied to one of twice the size, so both exist at that moment.
  const std::size_t growing = 3 * sizeof(std::int32_t) * ids;
  return peak - before - std::min(peak - before, growing);
}

TEST_CASE("Encoding a text takes at most four times its length, the text included, and the ids") {
  constexpr std::size_t kBytes = 2 << 20, kBlocks = 2 << 20;
  const std::string root = KVLAB_SOURCE_DIR "/";
  for (const char* file : {"engine/models/tiny/tokenizer.json", "tests/data/tokenizer/llama2.json",
                           "tests/data/tokenizer/llama3.json", "tests/data/tokenizer/qwen2.json",
                           "tests/data/tokenizer/gemma.json", "tests/data/tokenizer/olmo.json"}) {
    const Tokenizer tokenizer = Tokenizer::load(root + file);
    for (const char* unit : {"The quick brown fox jumps over the lazy dog, doesn't it? ",
                             "Съешь же ещё этих мягких булок. ", "e\u0301\u0302 x ", "<s>", "1 2 ",
                             "的一是不了人我在有他。\n", "caf\xe9 au lait, "}) {
      const std::string text = repeated(unit, kBytes);
      CAPTURE(file, unit);
      // Text that is not UTF-8 is first made valid, which takes three bytes for each invalid byte.
      const std::size_t max_bytes = (tokenizer::valid_bytes(text) < text.size() ? 5 : 3) * kBytes;
      CHECK(cost(tokenizer, text, 100) <= max_bytes + kBlocks);
      CHECK(cost(tokenizer, text, text.size()) <= max_bytes + kBlocks);
    }
  }
}

}  // namespace
}  // namespace kvlab
