// From a Type known when running to one known when compiling.
#pragma once

#include "kernels/device/element.cuh"
#include "kernels/types.hpp"

namespace kvlab::kernels {

/// f(T{}) with the device's type for `type`.
template <class F>
cudaError_t with_type(Type type, F&& f) {
  switch (type) {
    case Type::bf16:
      return f(__nv_bfloat16{});
    case Type::f16:
      return f(__half{});
    case Type::f32:
      return f(float{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace kvlab::kernels
