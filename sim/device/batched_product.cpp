#include "sim/device/batched_product.hpp"

#include <fmt/format.h>

namespace kvlab::cuda {
namespace {

constexpr std::uint32_t kAlignment = 16;  // of pointers, bytes

cublasLtMatrixLayout_t layout(cudaDataType_t type, int rows, int columns, std::int64_t stride,
                              int batches, std::int64_t batch_stride) {
  cublasLtMatrixLayout_t made = nullptr;
  check(cublasLtMatrixLayoutCreate(&made, type, static_cast<std::uint64_t>(rows),
                                   static_cast<std::uint64_t>(columns), stride),
        "describing a matrix");
  const std::int32_t count = batches;
  check(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                         sizeof count),
        "describing a matrix");
  check(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                         &batch_stride, sizeof batch_stride),
        "describing a matrix");
  return made;
}

}  // namespace

BatchedProduct::BatchedProduct() : workspace_(kLtWorkspaceBytes, "cuBLASLt's workspace") {
  check(cublasLtCreate(&handle_), "opening the library");
}

BatchedProduct::~BatchedProduct() {
  plans_.clear();
  cublasLtDestroy(handle_);
}

LtProduct& BatchedProduct::plan_for(const BatchedProductArgs& args) {
  const Key key{args.type, args.batches, args.rows, args.n, args.k, args.w_by_k, args.tf32};
  auto& plan = plans_[key];
  if (plan) return *plan;

  auto made = std::make_unique<LtProduct>();
  const cudaDataType_t type = lt_type(args.type);
  check(cublasLtMatmulDescCreate(&made->product,
                                 args.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                                 CUDA_R_32F),
        "describing a product");
  const cublasOperation_t transposed = args.w_by_k ? CUBLAS_OP_N : CUBLAS_OP_T;
  made->set(CUBLASLT_MATMUL_DESC_TRANSA, transposed);
  made->w = layout(type, args.w_by_k ? args.n : args.k, args.w_by_k ? args.k : args.n, args.w_row,
                   args.batches, args.w_batch);
  made->x = layout(type, args.k, args.rows, args.x_row, args.batches, args.x_batch);
  made->y = layout(CUDA_R_32F, args.n, args.rows, args.y_row, args.batches, args.y_batch);

  made->choose(handle_, workspace_.bytes(), kAlignment,
               fmt::format("{} products [{}, {}] by [{}, {}]", args.batches, args.rows, args.k,
                           args.k, args.n));
  plan = std::move(made);
  return *plan;
}

void BatchedProduct::operator()(const BatchedProductArgs& args, cudaStream_t stream) {
  LtProduct& plan = plan_for(args);
  const float alpha = 1, beta = 0;
  check(cublasLtMatmul(handle_, plan.product, &alpha, args.w, plan.w, args.x, plan.x, &beta, args.y,
                       plan.y, args.y, plan.y, &plan.algorithm, workspace_.data(),
                       workspace_.bytes(), stream),
        fmt::format("{} products [{}, {}] by [{}, {}]", args.batches, args.rows, args.k, args.k,
                    args.n));
}

}  // namespace kvlab::cuda
