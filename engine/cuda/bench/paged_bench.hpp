// Times decode attention over blocks of slots and, for comparison, over contiguous slots.
#pragma once

#include <cstdint>

#include "traces/base/json.hpp"

namespace kvlab {

/// Sequences with `slots` live tokens each, in bfloat16.
struct PagedBenchShape {
  std::uint32_t head_size, group, kv_heads, batch, slots;
  std::uint64_t pool;  ///< maximum bytes of keys and values over all layers
};

/// Microseconds of one layer's attention by page size: 0 (no blocks), 16 and 64 slots, for blocks
/// [slot, kv_head, dim] (NHD) and [kv_head, slot, dim] (HND).
nlohmann::ordered_json bench_pages(const PagedBenchShape& shape);

}  // namespace kvlab
