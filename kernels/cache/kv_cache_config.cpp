// Chooses the kernels of a KvCache for the current device.
#include "kernels/cache/kv_cache_config.hpp"

#include <algorithm>
#include <stdexcept>

#include "kernels/decode/pair_attention.hpp"
#include "kernels/launch_plans.hpp"

namespace kvlab::kernels {
namespace {

/// The largest number of bytes that a token takes on any tier.
int max_row_bytes(const KvCacheConfig& config) {
  std::int64_t max_row = 0;
  for (const SlotPair& pair : config.pairs)
    for (const TierSlots& tier : pair.tiers)
      max_row = std::max(max_row, row_bytes(device_format(tier.format), config.head_size,
                                            static_cast<int>(bytes_of(config.type))));
  return static_cast<int>(max_row);
}

/// The reason why the fast attention cannot run on a device; empty if it can.
std::string why_not_fast(const KvCacheConfig& config, const DeviceLimits& limits) {
  const kvlab_cache_view cache = config.slot_cache(1, 1);
  if (!config.is_quantized()) return why_not_attention(cache, config.numbering, limits);
  PairAttention pairs{};
  pairs.type = config.type;
  pairs.group = config.query_heads / config.kv_heads;
  pairs.head_size = config.head_size;
  pairs.table.pairs = config.kv_heads;
  pairs.table.max_slots = 1;
  return why_not_tier_attention(pairs, max_row_bytes(config), limits);
}

}  // namespace

DeviceFormat device_format(const KvFormat& format) {
  return {static_cast<std::uint8_t>(format.key->bits),
          static_cast<std::uint8_t>(format.value->bits),
          format.key->encoding == Encoding::e4m3_block};
}

EvictionKernels kernels_for(const KvCacheConfig& config, const DevicePolicy& policy,
                            PlainKernels plain) {
  DeviceLimits limits;
  if (device_limits(limits) == cudaSuccess) return kernels_for(config, policy, plain, limits);
  // Without a device nothing is launched, so the choice does not matter.
  return config.is_fast() ? observing_kernels(policy) : plain_kernels(policy);
}

EvictionKernels kernels_for(const KvCacheConfig& config, const DevicePolicy& policy,
                            PlainKernels plain, const DeviceLimits& limits) {
  if (const std::string why = why_not_prefill(config.type, config.head_size, limits); !why.empty())
    throw std::invalid_argument(why);
  if (!config.is_fast()) return plain_kernels(policy);
  const std::string why = why_not_fast(config, limits);
  if (why.empty()) return observing_kernels(policy);
  if (plain == PlainKernels::absent)
    throw std::invalid_argument(
        why +
        "; the kernels that need less shared memory support neither a policy from a header nor "
        "the caller's blocks");
  return plain_kernels(policy);
}

}  // namespace kvlab::kernels
