#include "kernels/host/product.hpp"

#include <fmt/format.h>

#include <stdexcept>

namespace kvlab::cuda {
namespace {

using Output = ProductArgs::Output;

constexpr std::size_t kWorkspaceBytes = 32u << 20;  // the size that cuBLASLt's Hopper kernels need

void check(cublasStatus_t status, std::string_view what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(fmt::format("cuBLASLt: {}: {}", what, cublasLtGetStatusString(status)));
}

cudaDataType_t library_type(kernels::Type type) {
  if (type == KVLAB_BF16) return CUDA_R_16BF;
  return type == KVLAB_F16 ? CUDA_R_16F : CUDA_R_32F;
}

cublasLtMatrixLayout_t layout(cudaDataType_t type, int rows, int columns, std::int64_t stride,
                              std::int32_t batches, std::int64_t batch_stride) {
  constexpr const char* kWhat = "describing a matrix";
  cublasLtMatrixLayout_t made = nullptr;
  check(cublasLtMatrixLayoutCreate(&made, type, static_cast<std::uint64_t>(rows),
                                   static_cast<std::uint64_t>(columns), stride),
        kWhat);
  check(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batches,
                                         sizeof batches),
        kWhat);
  check(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                         &batch_stride, sizeof batch_stride),
        kWhat);
  return made;
}

std::string text_of(const ProductArgs& args) {
  return fmt::format("{} product{} [{}, {}] by [{}, {}]", args.batches,
                     args.batches == 1 ? "" : "s", args.rows, args.k, args.k, args.n);
}

}  // namespace

/// cuBLASLt computes with column-major matrices, and a row-major [r, c] is a column-major [c, r].
/// So cuBLASLt is given the product y^T [n, rows] = w [n, k] * x^T [k, rows].
struct Products::Plan {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm{};

  explicit Plan(const ProductArgs& args) {
    check(cublasLtMatmulDescCreate(
              &product, args.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "describing a product");
    set(CUBLASLT_MATMUL_DESC_TRANSA, args.w_by_k ? CUBLAS_OP_N : CUBLAS_OP_T);
    if (args.bias) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.bias);
    }
    const cudaDataType_t type = library_type(args.type);
    const cudaDataType_t y_type = args.output == Output::type ? type : CUDA_R_32F;
    w = layout(type, args.w_by_k ? args.n : args.k, args.w_by_k ? args.k : args.n, args.w_row,
               args.batches, args.w_batch);
    x = layout(type, args.k, args.rows, args.x_row, args.batches, args.x_batch);
    y = layout(y_type, args.n, args.rows, args.y_row, args.batches, args.y_batch);
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    for (const auto matrix : {w, x, y}) cublasLtMatrixLayoutDestroy(matrix);
    cublasLtMatmulDescDestroy(product);
  }

  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check(cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof value),
          "describing a product");
  }

  void choose(cublasLtHandle_t handle, const ProductArgs& args) {
    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "choosing an algorithm");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value);
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      prefer(attribute, args.alignment);
    cublasLtMatmulHeuristicResult_t found{};
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, product, w, x, y, y, preference, 1, &found, &count);
    cublasLtMatmulPreferenceDestroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS || count == 0)
      throw std::runtime_error(fmt::format("cuBLASLt: no algorithm for {}: {}", text_of(args),
                                           cublasLtGetStatusString(status)));
    algorithm = found.algo;
  }
};

Products::Products() : workspace_(kWorkspaceBytes, "cuBLASLt's workspace") {
  check(cublasLtCreate(&handle_), "opening the library");
}

Products::~Products() {
  plans_.clear();
  cublasLtDestroy(handle_);
}

Products::Plan& Products::plan_for(const ProductArgs& args) {
  const Key key{args.type,      args.output,  args.batches, args.rows,
                args.n,         args.k,       args.x_row,   args.x_batch,
                args.w_row,     args.w_batch, args.y_row,   args.y_batch,
                args.alignment, args.w_by_k,  args.tf32,    args.bias != nullptr};
  auto& plan = plans_[key];
  if (plan) return *plan;
  auto made = std::make_unique<Plan>(args);
  made->choose(handle_, args);
  plan = std::move(made);
  return *plan;
}

void Products::operator()(const ProductArgs& args, cudaStream_t stream) {
  Plan& plan = plan_for(args);
  if (args.bias) plan.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.bias);
  const float alpha = 1, beta = args.output == Output::add_float32 ? 1.0f : 0.0f;
  check(cublasLtMatmul(handle_, plan.product, &alpha, args.w, plan.w, args.x, plan.x, &beta, args.y,
                       plan.y, args.y, plan.y, &plan.algorithm, workspace_.data(),
                       workspace_.bytes(), stream),
        text_of(args));
}

}  // namespace kvlab::cuda
