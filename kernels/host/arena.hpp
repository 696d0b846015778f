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

  /// `count` elements of T, uninitialised; null where there are none.
  template <class T>
  T* take(std::size_t count) {
    T* const part = memory_ && count > 0 ? reinterpret_cast<T*>(memory_ + bytes_) : nullptr;
    bytes_ += align_up(count * sizeof(T));
    return part;
  }
  /// Of all parts so far.
  std::size_t bytes() const { return bytes_; }

  /// What a part of so many bytes takes.
  static constexpr std::size_t align_up(std::size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

 private:
  static constexpr std::size_t kAlignment = 256;
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

/// What `layout(Arena&)` takes.
template <class Layout>
std::size_t layout_bytes(Layout&& layout) {
  Arena arena;
  layout(arena);
  return arena.bytes();
}

/// The memory that `layout(Arena&)` has been placed in. Throws as DeviceBuffer does.
template <class Layout>
DeviceBuffer allocate_layout(Layout&& layout, std::string_view what) {
  DeviceBuffer memory(layout_bytes(layout), what);
  Arena arena(memory.data());
  layout(arena);
  return memory;
}

/// The parts of an owner's memory, and the memory. `Parts` lays itself out in its constructor, from
/// an Arena& and the same `args`.
template <class Parts>
class Placed {
 public:
  Placed() = default;
  /// Throws as DeviceBuffer does.
  template <class... Args>
  explicit Placed(std::string_view what, const Args&... args)
      : memory_(bytes(args...), what), parts_(at(memory_.data(), args...)) {}

  /// What Placed(what, args...) allocates.
  template <class... Args>
  static std::size_t bytes(const Args&... args) {
    return layout_bytes([&](Arena& arena) { [[maybe_unused]] const Parts parts(arena, args...); });
  }

  const Parts* operator->() const { return &parts_; }
  const Parts& operator*() const { return parts_; }
  const DeviceBuffer& memory() const { return memory_; }

 private:
  template <class... Args>
  static Parts at(std::byte* memory, const Args&... args) {
    Arena arena(memory);
    return Parts(arena, args...);
  }

  DeviceBuffer memory_;
  Parts parts_{};
};

}  // namespace kvlab::cuda
