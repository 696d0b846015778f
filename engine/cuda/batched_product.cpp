#include "engine/cuda/batched_product.hpp"

#include <fmt/format.h>

#include <stdexcept>

namespace kvlab::cuda {
namespace {

using kernels::Type;

constexpr std::size_t kWorkspaceBytes = 32u << 20;  // what Hopper's kernels ask for
constexpr std::uint32_t kAlignment = 16;            // of pointers, bytes

cudaDataType_t data_type(Type type) {
  if (type == Type::bf16) return CUDA_R_16BF;
  return type == Type::f16 ? CUDA_R_16F : CUDA_R_32F;
}

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

/// Row-major [r, c] is column-major [c, r]: y^T [n, rows] = w [n, k] * x^T [k, rows].
struct BatchedProduct::Plan {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm{};

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    cublasLtMatrixLayoutDestroy(y);
    cublasLtMatrixLayoutDestroy(x);
    cublasLtMatrixLayoutDestroy(w);
    cublasLtMatmulDescDestroy(product);
  }
};

BatchedProduct::BatchedProduct() : workspace_(kWorkspaceBytes, "cuBLASLt's workspace") {
  check(cublasLtCreate(&handle_), "opening the library");
}

BatchedProduct::~BatchedProduct() {
  plans_.clear();
  cublasLtDestroy(handle_);
}

BatchedProduct::Plan& BatchedProduct::plan_for(const BatchedProductArgs& args) {
  const Key key{args.type, args.batches, args.rows, args.n, args.k, args.w_by_k};
  auto& plan = plans_[key];
  if (plan) return *plan;

  auto made = std::make_unique<Plan>();
  const cudaDataType_t type = data_type(args.type);
  check(cublasLtMatmulDescCreate(&made->product, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "describing a product");
  const cublasOperation_t turned = args.w_by_k ? CUBLAS_OP_N : CUBLAS_OP_T;
  check(cublasLtMatmulDescSetAttribute(made->product, CUBLASLT_MATMUL_DESC_TRANSA, &turned,
                                       sizeof turned),
        "describing a product");
  made->w = layout(type, args.w_by_k ? args.n : args.k, args.w_by_k ? args.k : args.n, args.w_row,
                   args.batches, args.w_batch);
  made->x = layout(type, args.k, args.rows, args.x_row, args.batches, args.x_batch);
  made->y = layout(CUDA_R_32F, args.n, args.rows, args.y_row, args.batches, args.y_batch);

  cublasLtMatmulPreference_t preference = nullptr;
  check(cublasLtMatmulPreferenceCreate(&preference), "choosing an algorithm");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_.bytes());
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    prefer(attribute, kAlignment);
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle_, made->product, made->w, made->x, made->y, made->y, preference, 1, &found, &count);
  cublasLtMatmulPreferenceDestroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS || count == 0)
    throw std::runtime_error(fmt::format(
        "cuBLASLt: no algorithm for {} products [{}, {}] by "
        "[{}, {}]: {}",
        args.batches, args.rows, args.k, args.k, args.n, cublasLtGetStatusString(status)));
  made->algorithm = found.algo;
  plan = std::move(made);
  return *plan;
}

void BatchedProduct::operator()(const BatchedProductArgs& args, cudaStream_t stream) {
  Plan& plan = plan_for(args);
  const float alpha = 1, beta = 0;
  check(cublasLtMatmul(handle_, plan.product, &alpha, args.w, plan.w, args.x, plan.x, &beta, args.y,
                       plan.y, args.y, plan.y, &plan.algorithm, workspace_.data(),
                       workspace_.bytes(), stream),
        fmt::format("{} products [{}, {}] by [{}, {}]", args.batches, args.rows, args.k, args.k,
                    args.n));
}

}  // namespace kvlab::cuda
