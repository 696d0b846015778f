// Vectors whose data begin at a cache line, so that no vector load crosses a line.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace kvlab {

template <class T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}  // NOLINT: containers require this conversion
  T* allocate(std::size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), kLine));
  }
  void deallocate(T* data, std::size_t) { ::operator delete(data, kLine); }
  bool operator==(const LineAllocator&) const { return true; }
};

template <class T>
using AlignedVector = std::vector<T, LineAllocator<T>>;

}  // namespace kvlab
