// Matrix products by cuBLASLt, single or batched, with sums in float32.
#pragma once

#include <cublasLt.h>

#include <map>
#include <memory>
#include <tuple>

#include "kernels/host/memory.hpp"
#include "kernels/types.hpp"

namespace kvlab::cuda {

/// y[b, r, n] = the sum over k of x[b, r, k] * w[b, n, k], plus bias[n] if there is one. With
/// w_by_k, the second factor is w[b, k, n]. Strides are in elements.
struct ProductArgs {
  enum class Output { type, float32, add_float32 };

  kernels::Type type;  ///< of x, w and bias
  int batches = 1;
  int rows, n, k;
  const void* x;  // [batch, row, k]
  std::int64_t x_row, x_batch = 0;
  const void* w;  // [batch, n, k], or [batch, k, n]
  std::int64_t w_row, w_batch = 0;
  bool w_by_k = false;         ///< whether w is [batch, k, n]
  const void* bias = nullptr;  // [n], or null; only with Output::type
  void* y;                     // [batch, row, n]
  std::int64_t y_row, y_batch = 0;
  Output output = Output::float32;  ///< add_float32: adds the product to y
  bool tf32 = false;                ///< rounds float32 inputs to TF32 (11 bits)
  std::uint32_t alignment = 256;    ///< alignment of all pointers and strides, in bytes
};

/// A cuBLASLt handle, its workspace, and the algorithms chosen so far (one for each combination of
/// shape and strides). Use an object on one stream at a time.
class Products {
 public:
  Products();
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  /// Throws std::runtime_error if cuBLASLt has no algorithm for the product.
  void operator()(const ProductArgs& args, cudaStream_t stream);

 private:
  struct Plan;
  /// All members of ProductArgs except the pointers.
  using Key = std::tuple<kernels::Type, ProductArgs::Output, int, int, int, int, std::int64_t,
                         std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                         std::uint32_t, bool, bool, bool>;
  Plan& plan_for(const ProductArgs& args);

  cublasLtHandle_t handle_ = nullptr;
  DeviceBuffer workspace_;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

}  // namespace kvlab::cuda
