// Products of decode steps beside the card's read bandwidth and beside cuBLASLt: a ladder from the
// plain kernel to ours.
//
// linear_bench [products|step]
//
// Every figure is of launches one behind the other in a graph, each on weights that are in no
// cache. cuBLASLt is given an x that is normed already and has no gate to apply, and is taken at
// the best of the algorithms that it proposes.
#include <algorithm>
#include <cstdint>
#include <string>

#include "kernels/bench/limits.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/device/vector.cuh"
#include "kernels/linear/linear.hpp"

namespace {

using namespace kvlab::kernels;
using kvlab::bench::check;
using kvlab::bench::DeviceBuffer;
using kvlab::bench::median_ms;
using Element = __nv_bfloat16;

constexpr std::size_t kPool = std::size_t{1} << 30;  // elements: 2 GiB of weights
constexpr int kMostWidth = 128 * 1024;

struct Memory {
  DeviceBuffer<Element> weights{kPool};
  DeviceBuffer<Element> x{std::size_t{kMostLinearRows} * kMostWidth};
  DeviceBuffer<float> residual{std::size_t{kMostLinearRows} * kMostWidth};
  DeviceBuffer<Element> y{std::size_t{kMostLinearRows} * kMostWidth};
  DeviceBuffer<std::byte> workspace{32 << 20};
};

enum class Kind { normed, plain, gated };

struct Shape {
  const char* name;
  Kind kind;
  int n, k;
  std::size_t elements() const { return std::size_t(n) * k * (kind == Kind::gated ? 2 : 1); }
};

constexpr int kWarps = 8;

/// Step 1: a warp for each output, an element a lane.
__global__ void naive_kernel(const Element* weight, const Element* x, int rows, int n, int k,
                             Element* y) {
  const int lane = threadIdx.x % kWarpSize;
  const int at = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  if (at >= n) return;
  for (int row = 0; row < rows; ++row) {
    float sum = 0;
    for (int i = lane; i < k; i += kWarpSize)
      sum = fmaf(to_float(weight[std::size_t(at) * k + i]), to_float(x[std::size_t(row) * k + i]),
                 sum);
    sum = warp_sum(sum);
    if (lane == 0) y[std::size_t(row) * n + at] = from_float<Element>(sum);
  }
}

/// Step 2: 16-byte loads, four on their way, each weight read once for all rows.
template <int kRows>
__global__ void vectorised_kernel(const Element* weight, const Element* x, int n, int k,
                                  Element* y) {
  const int lane = threadIdx.x % kWarpSize;
  const int at = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  if (at >= n) return;
  float sums[kRows] = {};
#pragma unroll 4
  for (int i = lane * 8; i < k; i += kWarpSize * 8) {
    float w[8];
    load_eight(weight + std::size_t(at) * k + i, w);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float v[8];
      load_eight(x + std::size_t(row) * k + i, v);
#pragma unroll
      for (int e = 0; e < 8; ++e) sums[row] = fmaf(w[e], v[e], sums[row]);
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const float sum = warp_sum(sums[row]);
    if (lane == 0) y[std::size_t(row) * n + at] = from_float<Element>(sum);
  }
}

void run_naive(const Memory& m, const Shape& s, const Element* weight, int rows,
               cudaStream_t stream) {
  const int n = static_cast<int>(s.elements() / s.k);
  naive_kernel<<<(n + kWarps - 1) / kWarps, kWarps * kWarpSize, 0, stream>>>(
      weight, m.x.data(), rows, n, s.k, m.y.data());
  check(cudaGetLastError());
}

void run_vectorised(const Memory& m, const Shape& s, const Element* weight, int rows,
                    cudaStream_t stream) {
  const int n = static_cast<int>(s.elements() / s.k);
  const auto kernel = rows == 1   ? vectorised_kernel<1>
                      : rows == 2 ? vectorised_kernel<2>
                      : rows == 4 ? vectorised_kernel<4>
                                  : vectorised_kernel<8>;
  kernel<<<(n + kWarps - 1) / kWarps, kWarps * kWarpSize, 0, stream>>>(weight, m.x.data(), n, s.k,
                                                                       m.y.data());
  check(cudaGetLastError());
}

void run_ours(const Memory& m, const Shape& s, const Element* weight, int rows,
              cudaStream_t stream) {
  if (s.kind == Kind::gated) {
    check(gated_linear({.type = Type::bf16,
                        .rows = rows,
                        .n = s.n,
                        .k = s.k,
                        .gate = weight,
                        .up = weight + std::size_t(s.n) * s.k,
                        .x = m.residual.data(),
                        .gamma = m.x.data(),
                        .norm_epsilon = 1e-5f,
                        .y = m.y.data()},
                       stream));
    return;
  }
  const bool normed = s.kind == Kind::normed;
  check(linear({.type = Type::bf16,
                .rows = rows,
                .n = s.n,
                .k = s.k,
                .weight = weight,
                .x = normed ? static_cast<const void*>(m.residual.data()) : m.x.data(),
                .gamma = normed ? m.x.data() : nullptr,
                .norm_epsilon = 1e-5f,
                .bias = nullptr,
                .y = m.y.data(),
                .y_float = nullptr,
                .residual = nullptr},
               stream));
}

/// Milliseconds of one launch, from many on weights that take turns.
template <class Run>
double launch_ms(const Memory& m, const Shape& s, Run run) {
  const std::size_t places = kPool / s.elements();
  const int launches = static_cast<int>(std::min<std::size_t>(places, 64));
  return median_ms([&](cudaStream_t stream) {
           for (int i = 0; i < launches; ++i)
             run(m.weights.data() + std::size_t(i) * s.elements(), stream);
         }) /
         launches;
}

/// cuBLASLt's product of [rows, k] by [n, k].
class Library {
 public:
  Library() { check(cublasLtCreate(&handle_)); }
  ~Library() { cublasLtDestroy(handle_); }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  double best_ms(const Memory& m, const Shape& s, int rows) const {
    const std::uint64_t n = s.elements() / s.k, k = s.k;
    cublasLtMatmulDesc_t operation;
    check(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t transposed = CUBLAS_OP_T;
    check(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                         sizeof transposed));
    cublasLtMatrixLayout_t weights, x, y;
    check(cublasLtMatrixLayoutCreate(&weights, CUDA_R_16BF, k, n, k));
    check(cublasLtMatrixLayoutCreate(&x, CUDA_R_16BF, k, rows, k));
    check(cublasLtMatrixLayoutCreate(&y, CUDA_R_16BF, n, rows, n));
    cublasLtMatmulPreference_t preference;
    check(cublasLtMatmulPreferenceCreate(&preference));
    const std::size_t bytes = m.workspace.size();
    check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                               &bytes, sizeof bytes));
    cublasLtMatmulHeuristicResult_t found[8];
    int count = 0;
    check(cublasLtMatmulAlgoGetHeuristic(handle_, operation, weights, x, y, y, preference, 8, found,
                                         &count));
    double best = 1e9;
    const float one = 1, zero = 0;
    for (int i = 0; i < count; ++i)
      best = std::min(best, launch_ms(m, s, [&](const Element* weight, cudaStream_t stream) {
                        check(cublasLtMatmul(handle_, operation, &one, weight, weights, m.x.data(),
                                             x, &zero, m.y.data(), y, m.y.data(), y, &found[i].algo,
                                             m.workspace.data(), bytes, stream));
                      }));
    check(cublasLtMatmulPreferenceDestroy(preference));
    for (const auto layout : {weights, x, y}) check(cublasLtMatrixLayoutDestroy(layout));
    check(cublasLtMatmulDescDestroy(operation));
    return best;
  }

 private:
  cublasLtHandle_t handle_;
};

void bench_shape(const Memory& m, const Library& library, const Shape& s, double bandwidth) {
  const double bytes = double(s.elements()) * sizeof(Element);
  for (const int rows : {1, 2, 4, 8}) {
    const auto rate = [&](auto run) {
      const double ms = launch_ms(m, s, [&](const Element* weight, cudaStream_t stream) {
        run(m, s, weight, rows, stream);
      });
      return bytes / (ms * 1e-3);
    };
    const double naive = rate(run_naive), vectorised = rate(run_vectorised), ours = rate(run_ours);
    const double cublas = bytes / (library.best_ms(m, s, rows) * 1e-3);
    std::printf(
        "%-14s %6d x %-5d  %d  %6.0f  %6.0f  %6.0f  %6.0f GB/s  %7.2f us  %5.1f%%  %4.2fx\n",
        s.name, s.n, s.k, rows, naive * 1e-9, vectorised * 1e-9, cublas * 1e-9, ours * 1e-9,
        bytes / ours * 1e6, 100 * ours / bandwidth, ours / cublas);
  }
}

/// All products of the layers of a decode step, one behind the other, as in a model.
void bench_step(const Memory& m, const char* name, const std::vector<Shape>& layer, int layers,
                double bandwidth) {
  std::size_t elements = 0;
  for (const Shape& s : layer) elements += s.elements() * layers;
  for (const int rows : {1, 8}) {
    const double ms = median_ms([&](cudaStream_t stream) {
      std::size_t at = 0;
      for (int i = 0; i < layers; ++i)
        for (const Shape& s : layer) {
          if (at + s.elements() > kPool) at = 0;
          run_ours(m, s, m.weights.data() + at, rows, stream);
          at += s.elements();
        }
    });
    const double rate = double(elements) * sizeof(Element) / (ms * 1e-3);
    std::printf("%-14s %d layers, %d rows: %.3f ms, %.0f GB/s, %.1f%%\n", name, layers, rows, ms,
                rate * 1e-9, 100 * rate / bandwidth);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "";
  const Memory memory;
  kvlab::bench::fill(memory.weights);
  kvlab::bench::fill(memory.x);
  check(cudaMemset(memory.residual.data(), 0x3f, memory.residual.size() * sizeof(float)));
  const double bandwidth = kvlab::bench::read_bandwidth(memory.weights);
  std::printf("read bandwidth %.0f GB/s\n", bandwidth * 1e-9);
  const std::vector<Shape> large{{"8B qkv", Kind::normed, 6144, 4096},
                                 {"8B out", Kind::plain, 4096, 4096},
                                 {"8B gate, up", Kind::gated, 14336, 4096},
                                 {"8B down", Kind::plain, 4096, 14336}};
  const std::vector<Shape> small{{"1B qkv", Kind::normed, 3072, 2048},
                                 {"1B out", Kind::plain, 2048, 2048},
                                 {"1B gate, up", Kind::gated, 8192, 2048},
                                 {"1B down", Kind::plain, 2048, 8192}};
  if (which != "step") {
    const Library library;
    std::printf("%-14s %14s  %s  %6s  %6s  %6s  %6s\n", "product", "n x k", "rows", "naive",
                "vector", "cublas", "ours");
    for (const Shape& s : large) bench_shape(memory, library, s, bandwidth);
    bench_shape(memory, library, {"8B logits", Kind::normed, 128256, 4096}, bandwidth);
    for (const Shape& s : small) bench_shape(memory, library, s, bandwidth);
  }
  if (which == "products") return 0;
  bench_step(memory, "8B products", large, 32, bandwidth);
  bench_step(memory, "1B products", small, 16, bandwidth);
}
