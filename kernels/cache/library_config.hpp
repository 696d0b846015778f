// Converts the C structs of kvlab_kv_cache to the structs of KvCache, and checks them. Runs on the
// host only.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <stdexcept>

#include "kernels/cache/kv_cache_config.hpp"
#include "kernels/kvlab.h"

namespace kvlab::kernels {

/// Maximum number of tokens of a sequence. The limit exists because RoPE tables are indexed by
/// signed 32-bit positions.
inline constexpr std::uint32_t kMaxTokens = 0x7fff'ffff;

/// Throws std::invalid_argument with this message if `holds` is false.
template <class... Parts>
void want(bool holds, fmt::format_string<const Parts&...> message, const Parts&... parts) {
  if (!holds) throw std::invalid_argument(fmt::format(message, parts...));
}

/// Throws std::invalid_argument if kvlab does not support the configuration. The result refers to
/// the policy and to the device memory (output weights and sink logits) of `config`, so the policy
/// and this memory must outlive the result.
KvCacheConfig config_of(const kvlab_kv_cache_config& config);
/// Converts the settings for a cache that was created with `config`.
SequenceSettings settings_of(const kvlab_sequence_settings& settings, const KvCacheConfig& config);

}  // namespace kvlab::kernels
