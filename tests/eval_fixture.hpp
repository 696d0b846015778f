// Inputs for tests of the end-to-end evaluation: the demo's text under one policy.
#pragma once

#include <string>
#include <vector>

#include "engine/tokenizer/tokenizer.hpp"
#include "policies/cache_config.hpp"
#include "tests/catch.hpp"
#include "traces/base/safetensors.hpp"

namespace kvlab {

/// Returns the first `count` tokens of the demo's text, encoded with the bundled model's tokenizer.
/// The first one is the begin-of-text token.
inline std::vector<std::int32_t> some_tokens(std::size_t count) {
  static const Tokenizer tokenizer =
      Tokenizer::load(KVLAB_SOURCE_DIR "/engine/models/tiny/tokenizer.json");
  const std::string text = read_text_file(KVLAB_SOURCE_DIR "/tools/demo/prompt.txt", 1 << 20);
  std::vector<std::int32_t> ids{0};
  for (const std::int32_t id : tokenizer.encode(text, false)) ids.push_back(id);
  REQUIRE(ids.size() >= count);
  ids.resize(count);
  return ids;
}

inline CacheConfig config_of(const std::string& policy, std::uint32_t budget, Prefill prefill,
                             Positions positions) {
  return {.policy = parse_policy(policy),
          .budget = {.extent = tokens(budget)},
          .prefill = prefill,
          .positions = positions,
          .seed = 3};
}

}  // namespace kvlab
