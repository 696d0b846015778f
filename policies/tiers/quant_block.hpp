// The block of channels of quantized keys and values, for host and device.
#pragma once

#include <cstdint>

namespace kvlab {

/// Number of channels that share a scale in kvlab's formats, and in which bytes are counted. Each
/// format has whole bytes for it.
inline constexpr std::uint32_t kQuantBlock = 32;

}  // namespace kvlab
