// Decode attention over blocks of slots beside slots one behind the other.
#pragma once

#include <cstdint>

#include "traces/base/json.hpp"

namespace kvlab {

/// Sequences of `slots` live tokens each, in bfloat16.
struct PagedBenchShape {
  std::uint32_t head_size, group, kv_heads, batch, slots;
  std::uint64_t pool;  ///< bytes of keys and values, of all layers, at most
};

/// Microseconds of one layer's attention, by pages: 0 (no blocks), 16 and 64 slots, where a block
/// is [slot, kv_head, dim] (NHD) and where it is [kv_head, slot, dim] (HND).
nlohmann::ordered_json bench_pages(const PagedBenchShape& shape);

}  // namespace kvlab
