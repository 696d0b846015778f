#include "engine/cuda/model/matmul.hpp"

#include <fmt/format.h>

namespace kvlab::cuda {

using Output = MatmulArgs::Output;

Matmul::Matmul() : workspace_(kLtWorkspaceBytes, "cuBLASLt's workspace") {
  check(cublasLtCreate(&handle_), "opening the library");
}

Matmul::~Matmul() {
  plans_.clear();
  cublasLtDestroy(handle_);
}

LtProduct& Matmul::plan_for(const MatmulArgs& args) {
  const Key key{args.type, args.rows, args.n, args.k, args.bias != nullptr, args.output};
  auto& plan = plans_[key];
  if (plan) return *plan;

  auto made = std::make_unique<LtProduct>();
  const cudaDataType_t type = lt_type(args.type);
  const cudaDataType_t y_type = args.output == Output::type ? type : CUDA_R_32F;
  const auto rows = static_cast<std::uint64_t>(args.rows), n = static_cast<std::uint64_t>(args.n),
             k = static_cast<std::uint64_t>(args.k);
  check(cublasLtMatmulDescCreate(&made->product, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "describing a product");
  made->set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  if (args.bias) {
    made->set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    made->set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.bias);
  }
  check(cublasLtMatrixLayoutCreate(&made->w, type, k, n, args.k), "describing a matrix");
  check(cublasLtMatrixLayoutCreate(&made->x, type, k, rows, args.k), "describing a matrix");
  check(cublasLtMatrixLayoutCreate(&made->y, y_type, n, rows, args.n), "describing a matrix");

  made->choose(handle_, workspace_.bytes(), 0,
               fmt::format("[{}, {}] by [{}, {}]", args.rows, args.k, args.k, args.n));
  plan = std::move(made);
  return *plan;
}

void Matmul::operator()(const MatmulArgs& args, cudaStream_t stream) {
  LtProduct& plan = plan_for(args);
  if (args.bias) plan.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.bias);
  const float alpha = 1, beta = args.output == Output::add_float32 ? 1.0f : 0.0f;
  check(cublasLtMatmul(handle_, plan.product, &alpha, args.weight, plan.w, args.x, plan.x, &beta,
                       args.y, plan.y, args.y, plan.y, &plan.algorithm, workspace_.data(),
                       workspace_.bytes(), stream),
        fmt::format("[{}, {}] by [{}, {}]", args.rows, args.k, args.k, args.n));
}

}  // namespace kvlab::cuda
