// Many products of one shape by cuBLASLt, sums in float32.
#pragma once

#include <map>
#include <memory>
#include <tuple>

#include "kernels/host/lt_product.hpp"
#include "kernels/host/memory.hpp"
#include "kernels/types.hpp"

namespace kvlab::cuda {

/// y[b, r, n] = sum over k of x[b, r, k] * w[b, n, k], or w[b, k, n]. Strides in elements.
struct BatchedProductArgs {
  kernels::Type type;  ///< of x and w; float32 is multiplied as such, or as TF32
  int batches, rows, n, k;
  const void* x;  // [batch, row, k]
  std::int64_t x_row, x_batch;
  const void* w;  // [batch, n, k], or [batch, k, n]
  std::int64_t w_row, w_batch;
  bool w_by_k;  ///< w is [batch, k, n]
  float* y;     // [batch, row, n]
  std::int64_t y_row, y_batch;
  bool tf32 = false;  ///< of float32 11 bits count
};

/// A cuBLASLt handle, its workspace and the algorithms chosen so far, one for each shape. For one
/// stream at a time. All pointers aligned to 16 bytes.
class BatchedProduct {
 public:
  BatchedProduct();
  ~BatchedProduct();
  BatchedProduct(const BatchedProduct&) = delete;
  BatchedProduct& operator=(const BatchedProduct&) = delete;

  void operator()(const BatchedProductArgs& args, cudaStream_t stream);

 private:
  using Key = std::tuple<kernels::Type, int, int, int, int, bool, bool>;
  LtProduct& plan_for(const BatchedProductArgs& args);

  cublasLtHandle_t handle_ = nullptr;
  DeviceBuffer workspace_;
  std::map<Key, std::unique_ptr<LtProduct>> plans_;
};

}  // namespace kvlab::cuda
