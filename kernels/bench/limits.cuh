// The card's own limits, measured where a bench runs: what its figures stand beside.
#pragma once

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace kvlab::bench {

inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}
inline void check(cublasStatus_t status) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  std::fprintf(stderr, "cuBLASLt: %s\n", cublasLtGetStatusString(status));
  std::exit(1);
}

template <class T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t size) : size_(size) {
    check(cudaMalloc(reinterpret_cast<void**>(&data_), size * sizeof(T)));
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { cudaFree(data_); }
  T* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

__global__ void fill_kernel(__nv_bfloat16* to, std::size_t size) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += stride) {
    std::uint32_t bits = static_cast<std::uint32_t>(i) * 2654435761u;
    bits = (bits ^ bits >> 15) * 2246822519u;
    bits ^= bits >> 13;
    to[i] = __float2bfloat16_rn(static_cast<float>(bits) * 0x1p-31f - 1.0f);
  }
}
/// Values between -1 and 1: a card is quicker on zeros.
inline void fill(const DeviceBuffer<__nv_bfloat16>& buffer) {
  fill_kernel<<<2048, 256>>>(buffer.data(), buffer.size());
  check(cudaGetLastError());
}

/// Median milliseconds of enqueue(stream), captured in a graph and replayed.
template <class Enqueue>
double median_ms(Enqueue enqueue, int repeats = 15) {
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  enqueue(stream);
  cudaGraph_t graph;
  check(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable;
  check(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < repeats + 2; ++i) {
    check(cudaEventRecord(begin, stream));
    check(cudaGraphLaunch(executable, stream));
    check(cudaEventRecord(end, stream));
    check(cudaStreamSynchronize(stream));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms);
  }
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  check(cudaGraphExecDestroy(executable));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(stream));
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

__global__ void __launch_bounds__(512)
    read_kernel(const uint4* from, std::size_t size, uint4* sink) {
  constexpr int kAtOnce = 8;
  uint4 sum{};
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size;
       i += kAtOnce * stride) {
    uint4 loaded[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      loaded[j] = i + j * stride < size ? __ldcs(from + i + j * stride) : uint4{};
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      sum.x ^= loaded[j].x;
      sum.y ^= loaded[j].y;
      sum.z ^= loaded[j].z;
      sum.w ^= loaded[j].w;
    }
  }
  if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x9E3779B9u) *sink = sum;  // or nothing would be read
}

/// Reads memory and does nothing with it.
class Reader {
 public:
  Reader() { check(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, 0)); }
  void enqueue(const __nv_bfloat16* from, std::size_t elements, cudaStream_t stream) const {
    constexpr int kCtas = 4;  // on a multiprocessor: all that it holds
    read_kernel<<<multiprocessors_ * kCtas, 512, 0, stream>>>(
        reinterpret_cast<const uint4*>(from), elements * sizeof(__nv_bfloat16) / sizeof(uint4),
        sink_.data());
    check(cudaGetLastError());
  }

 private:
  int multiprocessors_ = 0;
  DeviceBuffer<uint4> sink_{1};
};

/// Bytes per second of a kernel that only reads `buffer`, which is far larger than the L2 cache.
inline double read_bandwidth(const DeviceBuffer<__nv_bfloat16>& buffer) {
  const Reader reader;
  const double ms =
      median_ms([&](cudaStream_t stream) { reader.enqueue(buffer.data(), buffer.size(), stream); });
  return buffer.size() * sizeof(__nv_bfloat16) / (ms * 1e-3);
}

/// Operations per second of cuBLASLt's bf16 product of two square matrices of `size`.
inline double matrix_rate(const DeviceBuffer<__nv_bfloat16>& operands, int size = 8192) {
  const std::size_t elements = std::size_t(size) * size;
  const DeviceBuffer<__nv_bfloat16> product(elements);
  const DeviceBuffer<char> workspace(32 << 20);
  cublasLtHandle_t handle;
  check(cublasLtCreate(&handle));
  cublasLtMatmulDesc_t operation;
  check(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t transposed = CUBLAS_OP_T;
  check(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                       sizeof transposed));
  cublasLtMatrixLayout_t layout;
  check(cublasLtMatrixLayoutCreate(&layout, CUDA_R_16BF, size, size, size));
  cublasLtMatmulPreference_t preference;
  check(cublasLtMatmulPreferenceCreate(&preference));
  const std::size_t workspace_bytes = workspace.size();
  check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                             &workspace_bytes, sizeof workspace_bytes));
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  check(cublasLtMatmulAlgoGetHeuristic(handle, operation, layout, layout, layout, layout,
                                       preference, 1, &found, &count));
  const float one = 1, zero = 0;
  const double ms = median_ms([&](cudaStream_t stream) {
    check(cublasLtMatmul(handle, operation, &one, operands.data(), layout,
                         operands.data() + elements, layout, &zero, product.data(), layout,
                         product.data(), layout, &found.algo, workspace.data(), workspace.size(),
                         stream));
  });
  check(cublasLtMatmulPreferenceDestroy(preference));
  check(cublasLtMatrixLayoutDestroy(layout));
  check(cublasLtMatmulDescDestroy(operation));
  check(cublasLtDestroy(handle));
  return 2.0 * size * size * size / (ms * 1e-3);
}

}  // namespace kvlab::bench
