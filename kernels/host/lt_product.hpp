// What products by cuBLASLt have in common: types, descriptions, the choice of an algorithm.
#pragma once

#include <cublasLt.h>

#include <string_view>

#include "kernels/host/check.hpp"
#include "kernels/types.hpp"

namespace kvlab::cuda {

inline constexpr std::size_t kLtWorkspaceBytes = 32u << 20;  // what Hopper's kernels ask for

cudaDataType_t lt_type(kernels::Type type);

/// Row-major [r, c] is column-major [c, r]: y^T [n, rows] = w [n, k] * x^T [k, rows].
struct LtProduct {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm{};

  LtProduct() = default;
  LtProduct(const LtProduct&) = delete;
  LtProduct& operator=(const LtProduct&) = delete;
  ~LtProduct();

  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check(cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof value),
          "describing a product");
  }

  /// Once all is described. `alignment` of pointers in bytes, 0: the library's own assumption.
  /// Throws std::runtime_error that names `what`.
  void choose(cublasLtHandle_t handle, std::size_t workspace_bytes, std::uint32_t alignment,
              std::string_view what);
};

}  // namespace kvlab::cuda
