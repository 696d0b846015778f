// Products of many rows by cuBLASLt, sums in float32.
#pragma once

#include <map>
#include <memory>
#include <tuple>

#include "kernels/host/lt_product.hpp"
#include "kernels/host/memory.hpp"
#include "kernels/types.hpp"

namespace kvlab::cuda {

/// y[r, n] = sum over k of W[n, k] * x[r, k] (+ bias[n]).
struct MatmulArgs {
  kernels::Type type;  ///< of weight, bias and x
  int rows, n, k;
  const void* weight;  // [n, k]
  const void* bias;    // [n], or null; only with Output::type
  const void* x;       // [rows, k]
  enum class Output { type, float32, add_float32 } output;
  void* y;  // [rows, n] of type or float32; add_float32: y += the product
};

/// A cuBLASLt handle, its workspace and the algorithms chosen so far, one for each shape. For one
/// stream at a time. All pointers aligned to 256 bytes.
class Matmul {
 public:
  Matmul();
  ~Matmul();
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  void operator()(const MatmulArgs& args, cudaStream_t stream);

 private:
  using Key = std::tuple<kernels::Type, int, int, int, bool, MatmulArgs::Output>;
  LtProduct& plan_for(const MatmulArgs& args);

  cublasLtHandle_t handle_ = nullptr;
  DeviceBuffer workspace_;
  std::map<Key, std::unique_ptr<LtProduct>> plans_;
};

}  // namespace kvlab::cuda
