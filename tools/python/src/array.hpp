// numpy arrays that own their memory.
#pragma once

#include <nanobind/ndarray.h>

#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

namespace kvlab::python {

template <class T>
using Array = nanobind::ndarray<nanobind::numpy, T>;
using FloatArray = Array<float>;

/// Moves `values` to an array of this shape. Needs the GIL.
template <class T>
Array<T> array_of(std::vector<T> values, std::initializer_list<std::size_t> shape) {
  auto held = std::make_unique<std::vector<T>>(std::move(values));
  T* const data = held->data();
  nanobind::capsule owner(held.get(),
                          [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  static_cast<void>(held.release());
  return Array<T>(data, shape, owner);
}

}  // namespace kvlab::python
