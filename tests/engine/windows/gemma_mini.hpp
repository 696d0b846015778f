// A miniature of Gemma 3. Layer 2 of 4 sees all tokens, and the other layers have sliding windows.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/checkpoint/model.hpp"
#include "tests/engine/expected_logits.hpp"

namespace kvlab::test {

inline constexpr std::uint32_t kWindow = 11, kTokens = 90, kPrompt = 60;

inline const Model& gemma() {
  static const Model model = Model::load(source_path("tests/data/models/gemma3_mini"), 1);
  return model;
}

inline std::vector<std::int32_t> window_ids() {
  std::vector<std::int32_t> ids(kTokens);
  for (std::size_t i = 0; i < kTokens; ++i) ids[i] = static_cast<std::int32_t>(i * i * 31 % 67);
  return ids;
}

}  // namespace kvlab::test
