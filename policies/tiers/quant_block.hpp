// The block of channels of quantized keys and values, for host and device.
#pragma once

#include <cstdint>

namespace kvlab {

/// Number of channels that share a scale in kvlab's formats. Bytes are counted for this many
/// channels, because each format takes a whole number of bytes for them.
inline constexpr std::uint32_t kQuantBlock = 32;

}  // namespace kvlab
