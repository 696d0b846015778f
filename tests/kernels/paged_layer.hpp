// One layer that runs prompts and then steps, only through kvlab.h. Its keys and values are stored
// slot by slot, or in an engine's pages (blocks of slots).
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/kvlab.h"
#include "tests/device.hpp"

namespace kvlab {

/// The order of dimensions in a pool of blocks.
enum class PoolOrder {
  slot_head,   ///< [block, slot, kv_head, dim]
  head_slot,   ///< [block, kv_head, slot, dim]
  keys_values  ///< [block, keys or values, slot, kv_head, dim]
};

struct Paging {
  int page = 0;  ///< slots per page; 0: no pages, slot by slot
  PoolOrder order = PoolOrder::slot_head;
  bool by_pair = false;
};

struct LayerSize {
  std::string policy = "h2o";
  kvlab_type type = KVLAB_BF16;
  kvlab_numbering numbering = KVLAB_ORIGINAL_POSITIONS;
  int head_size = 64, group = 4, kv_heads = 2;
  std::vector<int> prompts = {70, 5, 33};      ///< [sequence]: tokens
  std::vector<int> budgets = {17, 40, 65, 8};  ///< of the pairs, used cyclically
  bool in_place = false;                       ///< prompts are compacted in place
  bool captured = false;                       ///< steps are launches of one captured graph
  bool settled = false;
  bool in_parts = false;     ///< attention splits prompts' keys into parts
  bool two_streams = false;  ///< victims are chosen on a second stream
  /// The policy's header below policies/, which the library compiles. Empty: the registry's policy.
  std::string header = "";

  std::string name() const;
};

/// The arrays of one cache. At first all bits of its pool are ones (NaN in every type), so that
/// writes outside of the slots are found. Its blocks are shuffled, and entries of the block table
/// without a slot have no valid block number.
class PagedCache {
 public:
  PagedCache(const LayerSize& size, const Paging& paging, const std::vector<int>& slots);

  kvlab_cache_view cache() const;
  /// A view of one of its sequences.
  kvlab_cache_view sequence(int index) const;
  std::size_t slots() const { return static_cast<std::size_t>(slots_); }
  /// Makes sequence `to` share the first `count` blocks of sequence `from`.
  void share_blocks(int from, int to, int count);
  /// Keys and values by slot, read on the host.
  std::vector<std::byte> rows() const;
  /// The number of bytes that a kernel has written outside of the cache's slots.
  std::size_t strays() const;

 private:
  /// Bytes of an element.
  std::size_t element() const { return size_.type == KVLAB_F32 ? 4 : 2; }
  std::size_t row_bytes() const { return static_cast<std::size_t>(size_.head_size) * element(); }
  /// The offset of a slot's row in the pool, in bytes.
  std::size_t row_at(int pair, int slot) const;
  std::size_t values_at() const;

  LayerSize size_;
  Paging paging_;
  std::vector<int> capacity_;  ///< [pair]
  std::vector<std::int64_t> first_;
  std::int64_t slots_ = 0;
  std::size_t pool_bytes_ = 0;
  int max_slots_ = 1, max_blocks_ = 0, pool_blocks_ = 0;
  std::vector<std::int32_t> blocks_;
  template <class T>
  using Array = std::unique_ptr<DeviceArray<T>>;
  Array<std::byte> pool_;
  Array<std::int64_t> first_slot_;
  Array<std::int32_t> device_blocks_, lengths_, next_slots_;
  Array<std::uint32_t> positions_, ages_;
};

/// The result of a run, which must be the same for every layout of blocks.
struct LayerLeft {
  std::vector<std::byte> prompt_outputs, step_outputs, rows, states, features, seen;
  std::vector<std::uint32_t> positions, ages;
  std::vector<std::int32_t> lengths, next_slots;
  std::size_t strays = 0;
  bool operator==(const LayerLeft&) const = default;
};

/// Runs prompts in a cache with the pages `prompt`. Then compacts them to a cache with the pages
/// `resident`, and decodes `steps` tokens of each sequence there.
LayerLeft run_layer(const LayerSize& size, const Paging& prompt, const Paging& resident, int steps);

}  // namespace kvlab
