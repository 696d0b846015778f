// Fetches keys and values of tokens from host memory, by a list.
#pragma once

#include "kernels/types.hpp"

namespace kvlab::kernels {

/// One row to fetch: the index of a pair [key, value] of one head and token in host memory, and the
/// slot that receives it.
struct FetchedRow {
  std::uint32_t row, slot;
};

/// `pool` is pinned host memory that is mapped into the device's address space. All other pointers
/// are device memory.
struct FetchRowsArgs {
  const void* pool = nullptr;            // [row, 2, half_bytes]: keys and values
  const FetchedRow* list = nullptr;      // [max_count]; all slots must differ
  const std::uint32_t* count = nullptr;  ///< number of rows in the list; at most max_count
  std::uint32_t max_count = 0;
  std::uint32_t half_bytes = 0;             ///< bytes of a key, or of a value; a multiple of 16
  void *keys = nullptr, *values = nullptr;  // [slot, half_bytes]
};
/// Copies the rows of the list with `blocks` thread blocks. The count is read on the device, so a
/// captured graph stays valid while the list changes. All memory must be aligned to 16 bytes.
cudaError_t fetch_rows(const FetchRowsArgs& args, int blocks, cudaStream_t stream);

}  // namespace kvlab::kernels
