#include "engine/cuda/matmul.hpp"

#include <fmt/format.h>

#include <stdexcept>

namespace kvlab::cuda {
namespace {

using kernels::Type;
using Output = MatmulArgs::Output;

constexpr std::size_t kWorkspaceBytes = 32u << 20;  // what Hopper's kernels ask for

cudaDataType_t data_type(Type type) {
  if (type == Type::bf16) return CUDA_R_16BF;
  return type == Type::f16 ? CUDA_R_16F : CUDA_R_32F;
}

template <class T>
void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof value),
        "describing a product");
}

}  // namespace

/// Row-major [r, c] is column-major [c, r]: y^T [n, rows] = W [n, k] * x^T [k, rows].
struct Matmul::Plan {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t weight = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm{};

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    cublasLtMatrixLayoutDestroy(y);
    cublasLtMatrixLayoutDestroy(x);
    cublasLtMatrixLayoutDestroy(weight);
    cublasLtMatmulDescDestroy(product);
  }
};

Matmul::Matmul() : workspace_(kWorkspaceBytes, "cuBLASLt's workspace") {
  check(cublasLtCreate(&handle_), "opening the library");
}

Matmul::~Matmul() {
  plans_.clear();
  cublasLtDestroy(handle_);
}

Matmul::Plan& Matmul::plan_for(const MatmulArgs& args) {
  const Key key{args.type, args.rows, args.n, args.k, args.bias != nullptr, args.output};
  auto& plan = plans_[key];
  if (plan) return *plan;

  auto made = std::make_unique<Plan>();
  const cudaDataType_t type = data_type(args.type);
  const cudaDataType_t y_type = args.output == Output::type ? type : CUDA_R_32F;
  const auto rows = static_cast<std::uint64_t>(args.rows), n = static_cast<std::uint64_t>(args.n),
             k = static_cast<std::uint64_t>(args.k);
  check(cublasLtMatmulDescCreate(&made->product, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "describing a product");
  set(made->product, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  if (args.bias) {
    set(made->product, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(made->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.bias);
  }
  check(cublasLtMatrixLayoutCreate(&made->weight, type, k, n, args.k), "describing a matrix");
  check(cublasLtMatrixLayoutCreate(&made->x, type, k, rows, args.k), "describing a matrix");
  check(cublasLtMatrixLayoutCreate(&made->y, y_type, n, rows, args.n), "describing a matrix");

  cublasLtMatmulPreference_t preference = nullptr;
  check(cublasLtMatmulPreferenceCreate(&preference), "choosing an algorithm");
  const std::size_t workspace = workspace_.bytes();
  cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                       &workspace, sizeof workspace);
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle_, made->product, made->weight, made->x, made->y,
                                     made->y, preference, 1, &found, &count);
  cublasLtMatmulPreferenceDestroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS || count == 0)
    throw std::runtime_error(fmt::format("cuBLASLt: no algorithm for [{}, {}] by [{}, {}]: {}",
                                         args.rows, args.k, args.k, args.n,
                                         cublasLtGetStatusString(status)));
  made->algorithm = found.algo;
  plan = std::move(made);
  return *plan;
}

void Matmul::operator()(const MatmulArgs& args, cudaStream_t stream) {
  Plan& plan = plan_for(args);
  if (args.bias) set(plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.bias);
  const float alpha = 1, beta = args.output == Output::add_float32 ? 1.0f : 0.0f;
  check(cublasLtMatmul(handle_, plan.product, &alpha, args.weight, plan.weight, args.x, plan.x,
                       &beta, args.y, plan.y, args.y, plan.y, &plan.algorithm, workspace_.data(),
                       workspace_.bytes(), stream),
        fmt::format("[{}, {}] by [{}, {}]", args.rows, args.k, args.k, args.n));
}

}  // namespace kvlab::cuda
