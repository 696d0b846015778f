#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <vector>

#include "sim/exact_pass.hpp"
#include "traces/base/numeric/hot_loops.hpp"
#include "traces/base/parallel.hpp"
#include "traces/layer_ropes.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kBlock = 256;  // queries per product

/// OpenBLAS. It stays loaded until the process ends. Only benchmarks load it, because it allocates
/// memory and starts threads.
class OpenBlas {
 public:
  OpenBlas() {
    void* const library = ::dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!library)
      throw std::runtime_error(
          "bench replay: OpenBLAS cannot be loaded (libopenblas.so.0), and the bench compares with "
          "it; install Debian's package libopenblas0-pthread");
    gemm_ = reinterpret_cast<Gemm>(::dlsym(library, "cblas_sgemm"));
    const auto set_threads =
        reinterpret_cast<void (*)(int)>(::dlsym(library, "openblas_set_num_threads"));
    if (!gemm_ || !set_threads)
      throw std::runtime_error(
          "bench replay: libopenblas.so.0 is not OpenBLAS; install Debian's package "
          "libopenblas0-pthread");
    set_threads(1);  // because the heads are distributed over threads
  }

  enum class Transposed { no = 111, yes = 112 };  // values of cblas.h

  /// c [m, n] = scale * a [m, k] * b, or scale * a * (b transposed). All matrices are in row-major
  /// order.
  void multiply(Transposed b_is, int m, int n, int k, float scale, const float* a, const float* b,
                float* c) const {
    constexpr int kRowMajor = 101;
    gemm_(kRowMajor, static_cast<int>(Transposed::no), static_cast<int>(b_is), m, n, k, scale, a, k,
          b, b_is == Transposed::yes ? k : n, 0, c, n);
  }

 private:
  using Gemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int,
                        float, float*, int);
  Gemm gemm_;
};

struct Head {
  std::vector<float> k, v;  // [token, dim]; k is rotated
};

void read_rotated(const TraceReader& trace, const RopeTable& rope, Part part, std::uint32_t layer,
                  std::uint32_t head, std::vector<float>& to) {
  const std::uint32_t dim = trace.shape().head_size;
  to.resize(std::size_t{trace.tokens()} * dim);
  trace.read(part, layer, head, 0, trace.tokens(), to.data());
  if (part == Part::v) return;
  for (std::uint32_t t = 0; t < trace.tokens(); ++t)
    rope.rotate(to.data() + t * dim, dim, t, to.data() + t * dim);
}

/// Softmax of row `query` of a block. Tokens that the query does not see become 0.
void softmax(float* row, std::uint32_t query, std::uint32_t width) {
  const HotLoops& loops = hot_loops();
  const auto shift =
      static_cast<std::int32_t>(loops.largest(row, query + 1) * 1.44269504088896341f);
  loops.exponentials(row, query + 1, shift, row);
  const float sum = loops.lane_sum(row, query + 1);
  loops.scale(row, query + 1, 1 / sum);
  std::fill(row + query + 1, row + width, 0.0f);
}

/// Computes the attention of one query head to out [token, dim]. Returns the number of
/// floating-point operations of the products.
double attend(const OpenBlas& blas, const float* q, const Head& head, std::uint32_t tokens,
              std::uint32_t dim, float scale, std::vector<float>& scores, float* out) {
  double flops = 0;
  for (std::uint32_t first = 0; first < tokens; first += kBlock) {
    const std::uint32_t rows = std::min(kBlock, tokens - first), width = first + rows;
    const auto m = static_cast<int>(rows), n = static_cast<int>(width), d = static_cast<int>(dim);
    scores.resize(std::size_t{kBlock} * tokens);
    blas.multiply(OpenBlas::Transposed::yes, m, n, d, scale, q + first * dim, head.k.data(),
                  scores.data());
    for (std::uint32_t i = 0; i < rows; ++i)
      softmax(scores.data() + std::size_t{i} * width, first + i, width);
    blas.multiply(OpenBlas::Transposed::no, m, d, n, 1, scores.data(), head.v.data(),
                  out + first * dim);
    flops += 4.0 * rows * width * dim;
  }
  return flops;
}

}  // namespace

ExactPass exact_pass(const TraceReader& trace, unsigned threads) {
  const ModelShape& shape = trace.shape();
  const LayerRopes ropes(trace);
  const OpenBlas blas;
  std::atomic<double> flops = 0;
  ExactPass pass;
  pass.time = measure_time([&] {
    parallel_for(shape.layers * shape.kv_heads, threads, [&](std::size_t unit) {
      const auto layer = static_cast<std::uint32_t>(unit / shape.kv_heads),
                 kv_head = static_cast<std::uint32_t>(unit % shape.kv_heads);
      Head head;
      read_rotated(trace, ropes[layer], Part::k, layer, kv_head, head.k);
      read_rotated(trace, ropes[layer], Part::v, layer, kv_head, head.v);
      std::vector<float> q, scores, out(head.k.size());
      for (std::uint32_t g = 0; g < shape.group(); ++g) {
        read_rotated(trace, ropes[layer], Part::q, layer, kv_head * shape.group() + g, q);
        flops += attend(blas, q.data(), head, trace.tokens(), shape.head_size,
                        trace.row(layer).scale, scores, out.data());
      }
    });
  });
  pass.flops = flops;
  return pass;
}

}  // namespace kvlab
