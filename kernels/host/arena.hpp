// One allocation of device memory for all arrays that an object keeps on the device.
#pragma once

#include <cstddef>
#include <string_view>

#include "kernels/host/memory.hpp"

namespace kvlab::cuda {

/// Hands out parts of one allocation, each aligned to 256 bytes. An object lays out its memory in
/// one function that takes an arena. The function runs twice: first without memory to measure the
/// size, then to place the parts. So the code states each size in only one place.
class Arena {
 public:
  /// Only measures; all parts are null.
  Arena() = default;
  /// Places parts in memory that begins at `memory`.
  explicit Arena(std::byte* memory) : memory_(memory) {}

  /// `count` elements of T, uninitialized; null if `count` is 0.
  template <class T>
  T* take(std::size_t count) {
    T* const part = memory_ && count > 0 ? reinterpret_cast<T*>(memory_ + bytes_) : nullptr;
    bytes_ += align_up(count * sizeof(T));
    return part;
  }
  /// The total size of all parts so far.
  std::size_t bytes() const { return bytes_; }

  /// The size of a part of `bytes` bytes, with alignment.
  static constexpr std::size_t align_up(std::size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

 private:
  static constexpr std::size_t kAlignment = 256;
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

/// The number of bytes that `layout(Arena&)` needs.
template <class Layout>
std::size_t layout_bytes(Layout&& layout) {
  Arena arena;
  layout(arena);
  return arena.bytes();
}

/// Allocates memory and places `layout(Arena&)` in it. Throws the same Error as DeviceBuffer.
template <class Layout>
DeviceBuffer allocate_layout(Layout&& layout, std::string_view what) {
  DeviceBuffer memory(layout_bytes(layout), what);
  Arena arena(memory.data());
  layout(arena);
  return memory;
}

/// Device memory of an object, and the parts that are placed in it. The constructor of `Parts`
/// takes an Arena& and `args`, and places the parts.
template <class Parts>
class Placed {
 public:
  Placed() = default;
  /// Throws the same Error as DeviceBuffer. `what` names the memory in the message.
  template <class... Args>
  explicit Placed(std::string_view what, const Args&... args)
      : memory_(bytes(args...), what), parts_(at(memory_.data(), args...)) {}

  /// The number of bytes that Placed(what, args...) allocates.
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
