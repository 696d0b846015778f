// Converts a Type that is known at run time to a type known at compile time.
#pragma once

#include "kernels/device/element.cuh"
#include "kernels/types.hpp"

namespace kvlab::kernels {

/// Calls f(T{}) with the device type T for `type`.
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
