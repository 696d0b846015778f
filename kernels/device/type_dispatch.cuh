// From a Type known when running to one known when compiling.
#pragma once

#include "kernels/device/element.cuh"
#include "kernels/types.hpp"

namespace kvlab::kernels {

/// f(T{}) with the device's type for `type`.
template <class F>
cudaError_t with_type(Type type, F&& f) {
  switch (type) {
    case KVLAB_BF16:
      return f(__nv_bfloat16{});
    case KVLAB_F16:
      return f(__half{});
    case KVLAB_F32:
      return f(float{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace kvlab::kernels
