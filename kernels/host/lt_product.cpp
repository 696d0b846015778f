#include "kernels/host/lt_product.hpp"

#include <fmt/format.h>

#include <stdexcept>

namespace kvlab::cuda {

cudaDataType_t lt_type(kernels::Type type) {
  if (type == kernels::Type::bf16) return CUDA_R_16BF;
  return type == kernels::Type::f16 ? CUDA_R_16F : CUDA_R_32F;
}

LtProduct::~LtProduct() {
  cublasLtMatrixLayoutDestroy(y);
  cublasLtMatrixLayoutDestroy(x);
  cublasLtMatrixLayoutDestroy(w);
  cublasLtMatmulDescDestroy(product);
}

void LtProduct::choose(cublasLtHandle_t handle, std::size_t workspace_bytes,
                       std::uint32_t alignment, std::string_view what) {
  cublasLtMatmulPreference_t preference = nullptr;
  check(cublasLtMatmulPreferenceCreate(&preference), "choosing an algorithm");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  if (alignment > 0)
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      prefer(attribute, alignment);
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, product, w, x, y, y, preference, 1, &found, &count);
  cublasLtMatmulPreferenceDestroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS || count == 0)
    throw std::runtime_error(
        fmt::format("cuBLASLt: no algorithm for {}: {}", what, cublasLtGetStatusString(status)));
  algorithm = found.algo;
}

}  // namespace kvlab::cuda
