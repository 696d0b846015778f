// Centred keys: one vector for each KV head of a layer, the centre, is subtracted from every key
// before the key is quantized. Softmax cancels the constant q·centre, so attention does not change.
// Keys with a large common bias lose less precision when they are quantized without it.
#pragma once

#include <cstdint>

namespace kvlab {

/// Where the centre of a KV head comes from.
enum class KeyCentre : std::uint8_t {
  none,       ///< keys are not centred
  prompt,     ///< the mean of the first keys of the append that begins at position 0
  constants,  ///< constants of the model, from a file
};

/// Number of keys whose mean is the centre, if the prompt has that many.
inline constexpr std::uint32_t kCentreKeys = 128;

/// Number of keys whose mean is the centre, after a first append of `tokens` tokens. 0: there is no
/// centre. This is so for an append of one token, because that is a decoded token and not a prompt.
constexpr std::uint32_t centre_keys(std::uint32_t tokens) {
  if (tokens < 2) return 0;
  return tokens < kCentreKeys ? tokens : kCentreKeys;
}

/// One channel of the centre: the mean of a channel of the keys, which are added in order in
/// float32. Host and device use it, so that their centres are equal bit for bit.
struct CentreChannel {
  float sum = 0;
  std::uint32_t keys = 0;

  constexpr void add(float key) { sum += key, ++keys; }
  constexpr float mean() const { return sum / static_cast<float>(keys); }
};

}  // namespace kvlab
