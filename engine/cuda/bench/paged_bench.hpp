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

/// Microseconds of one layer's attention, by the number of slots in a page (16 or 64; 0: contiguous
/// slots without pages) and by the layout of a page: [slot, kv_head, dim] (NHD) or [kv_head, slot,
/// dim] (HND).
nlohmann::ordered_json bench_pages(const PagedBenchShape& shape);

}  // namespace kvlab
