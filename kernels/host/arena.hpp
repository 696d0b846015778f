// One allocation of device memory for everything that an owner keeps there.
#pragma once

#include <cstddef>
#include <string_view>

#include "kernels/host/memory.hpp"

namespace kvlab::cuda {

/// Hands out parts of one allocation, each aligned to 256 bytes. An owner lays itself out by one
/// function of an arena, which is run twice: without memory to measure, then to place. So no size
/// stands in two places.
class Arena {
 public:
  /// Measures: parts are null.
  Arena() = default;
  /// Places, from `memory` on.
  explicit Arena(std::byte* memory) : memory_(memory) {}

  /// `count` elements of T, uninitialised.
  template <class T>
  T* take(std::size_t count) {
    T* const part = memory_ ? reinterpret_cast<T*>(memory_ + bytes_) : nullptr;
    bytes_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return part;
  }
  /// Of all parts so far.
  std::size_t bytes() const { return bytes_; }

 private:
  static constexpr std::size_t kAlignment = 256;
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

/// What `layout(Arena&)` takes.
template <class Layout>
std::size_t measured(Layout&& layout) {
  Arena arena;
  layout(arena);
  return arena.bytes();
}

/// The memory that `layout(Arena&)` has been placed in. Throws as DeviceBuffer does.
template <class Layout>
DeviceBuffer placed(Layout&& layout, std::string_view what) {
  DeviceBuffer memory(measured(layout), what);
  Arena arena(memory.data());
  layout(arena);
  return memory;
}

}  // namespace kvlab::cuda
