// Multiplies a few rows by a weight matrix that is read once. The kernel is memory-bound, so it is
// designed to read weights without pauses.
//
// Memory traffic: n * k weights (twice as many if gated). x, gamma and y add at most a few percent.
// One thread block per multiprocessor processes strips of kTiles * 8 weight rows. One warp requests
// the weights of all strips one after another (linear_ring.cuh), and begins before the preceding
// kernel ends. So the memory waits neither for arithmetic nor for x. Eight warps split k into runs
// of 128 and multiply on tensor cores. A tile of 8 weight rows is the right operand of m16n8k16.
// The left operand has 16 rows: eight rows of x rounded to T, and their rounding errors. So a
// normed x has about 16 bits of precision, and eight rows take as much time as one. The order of
// each sum is the same for any number of rows, any tile and any GPU, so equal inputs give equal
// bits, alone or in a batch.
//
// Instantiated for 2 types x 4 forms (8 kernels). rows, n and k are chosen at run time.
#include <algorithm>
#include <cstddef>

#include "kernels/device/barrier.cuh"
#include "kernels/device/grid_dependency.cuh"
#include "kernels/device/tensor_core.cuh"
#include "kernels/launch.cuh"
#include "kernels/launch_plans.hpp"
#include "kernels/linear/linear_f32.cuh"
#include "kernels/linear/linear_product.cuh"
#include "kernels/linear/linear_ring.cuh"
#include "kernels/rope.cuh"

namespace kvlab::kernels {
namespace {

constexpr int kBarrierBytes = sizeof(RingBarriers);
static_assert(kBarrierBytes % 16 == 0);
constexpr int kPartial = kTileRows * kTileRows;  // sums of a tile
/// Number of independent sums per tile. With only one, each product would wait for the previous
/// product.
constexpr int kChains = 2;
/// Partial sums of all warps, for two strips that alternate.
constexpr int kPartialBytes =
    2 * kLinearWarps * kTiles * kPartial * static_cast<int>(sizeof(float));

/// Number of threads per row of a strip's outputs. Each thread computes one output or one pair of
/// outputs.
__host__ __device__ constexpr int finishers(Form form) {
  return form == Form::gated || form == Form::rotated ? kTileRows : kTiles * kTileRows;
}

/// Bytes of a row of x in shared memory if there is no norm. The padding of 64 bytes puts two rows
/// in different banks.
__host__ __device__ constexpr std::size_t plain_row_bytes(int k) {
  return static_cast<std::size_t>(k) * 2 + 64;
}

/// Offsets in dynamic shared memory. The ring comes first; the offsets are relative to its end.
struct Layout {
  int stages;              ///< stages of the ring
  int gamma, x;            // offsets of gamma and x, which follow the barriers and the partial sums
  bool plain_x_is_shared;  ///< x is copied to shared memory; otherwise it is read in place
  std::size_t bytes;       ///< total, the ring included
};

/// Splits eight floats into the left operands of two products, of 16 bytes each. The first operand
/// consists of the rounded floats 0 and 1, their rounding errors, the rounded floats 2 and 3, and
/// their rounding errors. The second operand has the same layout for floats 4 to 7, and follows the
/// first.
template <class T>
struct SplitEight {
  __device__ void operator()(const float (&value)[8], float* to) const {
    uint4 packed[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = value[2 * i], b = value[2 * i + 1];
      std::uint32_t* const at = &packed[i / 2].x + i % 2 * 2;
      at[0] = pack<T>(a, b);
      at[1] = pack<T>(a - to_float(from_float<T>(a)), b - to_float(from_float<T>(b)));
    }
    reinterpret_cast<uint4*>(to)[0] = packed[0];
    reinterpret_cast<uint4*>(to)[1] = packed[1];
  }
};

/// A lane's part of x, as left operands of products.
struct XPart {
  uint4 left[kLoads][kChains];
};

/// Rows of x, in the layout that the products read.
template <Form kForm>
class XRows {
 public:
  __device__ XRows(const std::byte* rows, std::size_t row_bytes, int count, int k)
      : row_(rows + lane() / 4 * row_bytes), k_(lane() / 4 < count ? k : 0) {}
  /// Reads the lane's part of x from element `first` of a row on. Elements beyond k and beyond the
  /// last row are zero.
  __device__ XPart read(int first) const {
    XPart x{};
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const int k = first + load * kLoadK + lane() % 4 * 8;
      if (k >= k_) continue;
      if constexpr (has_norm(kForm)) {  // the layout that SplitEight writes
        const auto* const from = reinterpret_cast<const uint4*>(row_ + std::size_t(k) * 4);
        x.left[load][0] = from[0];
        x.left[load][1] = from[1];
      } else {
        const uint4 plain = *reinterpret_cast<const uint4*>(row_ + std::size_t(k) * 2);
        x.left[load][0] = {plain.x, 0, plain.y, 0};
        x.left[load][1] = {plain.z, 0, plain.w, 0};
      }
    }
    return x;
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }
  const std::byte* row_;
  int k_;
};

/// Copies rows of x that have no norm.
template <class T>
__device__ void copy_rows(const LinearProduct<T>& product, std::byte* to) {
  const int chunks = product.k / 8;
  for (int row = 0; row < product.rows; ++row)
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x); at < chunks; at += kLinearThreads)
      copy_async(shared_address(to + row * plain_row_bytes(product.k) + at * 16),
                 static_cast<const T*>(product.x) + std::size_t(row) * product.k + at * 8, true);
  commit_copies();
  wait_copies<0>();
  barrier_of_first<kLinearThreads>();
}

/// The outputs that one thread computes: in each strip, one output of one row. In the form gated,
/// the output combines two sums, one of the gate and one of up. In the form rotated, the thread
/// computes two outputs of the row, which RoPE rotates together.
template <class T, Form kForm>
class Finisher {
 public:
  __device__ Finisher(const LinearProduct<T>& product, const RopeWriteArgs& rope)
      : product_(product),
        rope_(rope),
        row_(static_cast<int>(threadIdx.x) / finishers(kForm)),
        output_(static_cast<int>(threadIdx.x) % finishers(kForm)) {
    if (kForm != Form::rotated || row_ >= product.rows) return;
    rope_row_ = rope_row(rope, token());
    place_ = TokenSlot(rope, token());
  }

  /// Starts loading the data that a strip's outputs need in addition to the product.
  __device__ void start(int strip) {
    if (row_ >= product_.rows) return;
    if constexpr (kForm != Form::rotated) {
      const int n = strip * outputs_of_strip(kForm) + output_;
      if (n < product_.n) residual_ = residual_of(product_, row_, n);
      return;
    }
    const int first = first_rotated_row(strip, rope_.cache.head_size);
    head_ = first / rope_.cache.head_size;
    dim_ = first % rope_.cache.head_size + output_;
    if (!is_value()) cos_sin_ = rope_row_[dim_];
    if (!is_query())
      cached_ = place_.head_offset(rope_, (head_ - rope_.cache.query_heads) % rope_.cache.kv_heads);
  }

  /// Adds the partial sums of the warps in order, and writes the outputs. `partial`: [warp, tile,
  /// row of x, output].
  __device__ void finish(int strip, const float* partial) const {
    if (row_ >= product_.rows) return;
    const auto total = [&](int tile, int column) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kLinearWarps; ++w)
        sum += partial[(w * kTiles + tile) * kPartial + row_ * kTileRows + column];
      return sum;
    };
    if constexpr (kForm == Form::rotated) {
      write_rotated(total(0, output_), total(1, output_));
    } else {
      const int n = strip * outputs_of_strip(kForm) + output_;
      if (n >= product_.n) return;
      write_output(product_, row_, n,
                   kForm == Form::gated
                       ? activate(product_.activation, total(0, output_)) * total(1, output_)
                       : total(output_ / kTileRows, output_ % kTileRows),
                   residual_);
    }
  }

 private:
  __device__ int token() const { return product_.first_row + row_; }

  __device__ bool is_query() const { return head_ < rope_.cache.query_heads; }
  __device__ bool is_value() const {
    return head_ >= rope_.cache.query_heads + rope_.cache.kv_heads;
  }

  __device__ void write_rotated(float a, float b) const {
    const int size = rope_.cache.head_size, half = size / 2, n = head_ * size + dim_;
    const T plain[] = {write_output(product_, row_, n, a, 0),
                       write_output(product_, row_, n + half, b, 0)};
    if (place_.is_idle()) return;
    if (is_value()) return put(rope_.cache.values, cached_, plain[0], plain[1]);
    const float2 rotated = rotate({to_float(plain[0]), to_float(plain[1])}, cos_sin_);
    const std::int64_t query = std::int64_t{token()} * rope_.cache.query_heads + head_;
    put(is_query() ? rope_.q : rope_.cache.keys, is_query() ? query * size : cached_,
        from_float<T>(rotated.x), from_float<T>(rotated.y));
    if (!is_query() && dim_ == 0) place_.note_position(rope_, cached_);
  }
  /// Writes two outputs to the head that begins at element `head`.
  __device__ void put(void* to, std::int64_t head, T first, T second) const {
    T* const at = static_cast<T*>(to) + head + dim_;
    at[0] = first;
    at[rope_.cache.head_size / 2] = second;
  }

  const LinearProduct<T>& product_;
  const RopeWriteArgs& rope_;
  int row_, output_;
  float residual_ = 0;
  const float2* rope_row_ = nullptr;
  TokenSlot place_;
  int head_ = 0, dim_ = 0;   ///< head and dimension of the first of the two outputs
  std::int64_t cached_ = 0;  ///< the head's first element in the cache
  float2 cos_sin_{};
};

/// The work of eight warps: they compute the product while weights arrive. `after_ring`: the shared
/// memory after the ring.
template <class T, Form kForm>
__device__ void multiply(const LinearProduct<T>& product, const RopeWriteArgs& rope,
                         const Layout& layout, std::byte* after_ring, WeightReader reader) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  float* const partials = reinterpret_cast<float*>(after_ring + kBarrierBytes);
  std::byte* const x_copy = after_ring + layout.x;
  Finisher<T, kForm> finisher(product, rope);
  const bool copied = has_norm(kForm) || layout.plain_x_is_shared;
  if constexpr (has_norm(kForm))
    norm_rows(product, after_ring + layout.gamma, x_copy, partials, SplitEight<T>{});
  else if (copied)
    copy_rows(product, x_copy);
  const XRows<kForm> rows(copied ? x_copy : static_cast<const std::byte*>(product.x),
                          has_norm(kForm) ? normed_row_bytes(product.k)
                          : copied        ? plain_row_bytes(product.k)
                                          : std::size_t(product.k) * sizeof(T),
                          product.rows, product.k);
  int half = 0;
  for (int strip = static_cast<int>(blockIdx.x); strip < strips_of(kForm, product.n);
       strip += static_cast<int>(gridDim.x)) {
    finisher.start(strip);
    float sums[kTiles][kChains][4] = {};
#pragma unroll 1
    for (int k = 0; k < product.k; k += kStageK) {
      const XPart x = rows.read(k + warp * kWarpK);
      uint4 weights[kTiles][kLoads];
#pragma unroll
      for (auto& tile : weights) reader.read(tile);
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        const auto& [first, second] = x.left[load];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          multiply_add<T>(sums[tile][0], {first.x, first.y, first.z, first.w},
                          weights[tile][load].x, weights[tile][load].y);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          multiply_add<T>(sums[tile][1], {second.x, second.y, second.z, second.w},
                          weights[tile][load].z, weights[tile][load].w);
      }
    }

    // Of each tile, a lane holds two outputs of row lane / 4 of x. Each output is the sum of two
    // results: the product with the rounded x, and the product with its rounding errors.
    float* const partial = partials + half * kLinearWarps * kTiles * kPartial;
    if (lane / 4 < product.rows) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const auto& [first, second] = sums[tile];
        *reinterpret_cast<float2*>(partial + (warp * kTiles + tile) * kPartial +
                                   lane / 4 * kTileRows + lane % 4 * 2) =
            float2{(first[0] + second[0]) + (first[2] + second[2]),
                   (first[1] + second[1]) + (first[3] + second[3])};
      }
    }
    barrier_of_first<kLinearThreads>();
    finisher.finish(strip, partial);
    half ^= 1;
  }
}

template <class T, Form kForm>
__global__ void __launch_bounds__(kLinearThreads + kWarpSize)
    linear_kernel(const __grid_constant__ LinearProduct<T> product,
                  const __grid_constant__ RopeWriteArgs rope, const Layout layout) {
  extern __shared__ __align__(16) std::byte ring[];
  std::byte* const after_ring = ring + layout.stages * kStageBytes;
  RingBarriers& barriers = *reinterpret_cast<RingBarriers*>(after_ring);
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  if (threadIdx.x >= kLinearThreads) {
    WeightSender<T> sender(ring, layout.stages, barriers);
    sender.template send<kForm>(product, rope.cache.head_size);
    wait_copies<0>();
    return;
  }
  if constexpr (has_norm(kForm)) fetch_gamma(product, after_ring + layout.gamma);
  let_successor_start();
  wait_for_predecessor();
  multiply<T, kForm>(product, rope, layout, after_ring,
                     WeightReader(ring, layout.stages, barriers));
}

/// The ring that a product needs, for 2-byte weights.
struct RingLength {
  int min_stages,
      max_stages;  ///< number of stages; a thread block requests at most `max_stages` in total
};
int gamma_begin() { return kBarrierBytes + kPartialBytes; }
int x_begin(Form form, int k) {
  return gamma_begin() + (has_norm(form) ? static_cast<int>(gamma_bytes<__half>(k)) : 0);
}

/// Computes the layout for `rows` rows with the longest ring that fits. Returns false if nothing
/// fits.
bool lay_out(Form form, int rows, int k, const RingLength& ring, const DeviceLimits& limits,
             Layout& layout) {
  layout.gamma = gamma_begin();
  layout.x = x_begin(form, k);
  const auto stages = [&](std::size_t x_bytes) {
    const std::int64_t free_bytes = static_cast<std::int64_t>(limits.shared_bytes) - layout.x -
                                    static_cast<std::int64_t>(x_bytes);
    return static_cast<int>(std::min<std::int64_t>(free_bytes / kStageBytes, kMaxStages));
  };
  std::size_t x_bytes =
      static_cast<std::size_t>(rows) * (has_norm(form) ? normed_row_bytes(k) : plain_row_bytes(k));
  layout.plain_x_is_shared = !has_norm(form) && stages(x_bytes) >= ring.min_stages;
  if (!has_norm(form) && !layout.plain_x_is_shared) x_bytes = 0;
  layout.stages = stages(x_bytes);
  if (layout.stages < ring.min_stages) return false;
  layout.stages = std::min(layout.stages, ring.max_stages);
  layout.bytes = static_cast<std::size_t>(layout.stages) * kStageBytes +
                 static_cast<std::size_t>(layout.x) + x_bytes;
  return true;
}

struct LinearLaunch {
  LaunchPlan plan;
  Layout layout;
};

/// Plans a launch for as many rows as fit.
LinearLaunch plan_product(Form form, int rows, int n, int k, const DeviceLimits& limits) {
  const int strips = strips_of(form, n), blocks = std::min(strips, limits.multiprocessors);
  const int max_stages = (strips + blocks - 1) / blocks * kTiles * ((k + kStageK - 1) / kStageK);
  // Each block takes at least two fifths of the shared memory. So while a CTA of the attention runs
  // on a multiprocessor, there is memory for one block, which can already load weights, but not for
  // two blocks. If two blocks fitted, some multiprocessors would get two of them and others none.
  const std::size_t alone = static_cast<std::size_t>(limits.shared_bytes) * 2 / 5;
  for (const int min_stages : {kPreferredStages, kMinStages}) {
    const RingLength ring{min_stages, max_stages};
    Layout layout{};
    int tile_rows = rows;
    while (tile_rows > 0 && !lay_out(form, tile_rows, k, ring, limits, layout)) --tile_rows;
    if (tile_rows == 0) continue;
    const int passes = (rows + tile_rows - 1) / tile_rows, each = (rows + passes - 1) / passes;
    lay_out(form, each, k, ring, limits, layout);
    return {{.blocks = blocks,
             .stages = layout.stages,
             .rows = each,
             .shared_bytes = std::max(layout.bytes, alone)},
            layout};
  }
  const std::size_t x_bytes = has_norm(form) ? normed_row_bytes(k) : 0;
  return {{.shared_bytes = std::size_t{kMinStages} * kStageBytes +
                           static_cast<std::size_t>(x_begin(form, k)) + x_bytes},
          {}};
}

template <class T, Form kForm>
cudaError_t launch_linear(LinearProduct<T> product, cudaStream_t stream,
                          const RopeWriteArgs& rope = {}) {
  DeviceLimits limits;
  cudaError_t error = device_limits(limits);
  if (error != cudaSuccess) return error;
  const auto [plan, layout] = plan_product(kForm, product.rows, product.n, product.k, limits);
  if (!plan.fits()) return cudaErrorNotSupported;  // why_not_linear() returns the reason
  const int each = plan.rows;
  const auto kernel = linear_kernel<T, kForm>;
  error = allow_shared_memory(kernel, limits);
  const Launch where{.grid = dim3(static_cast<unsigned>(plan.blocks)),
                     .block = dim3(kLinearThreads + kWarpSize),
                     .shared_bytes = plan.shared_bytes,
                     .stream = stream};
  for (const int rows = product.rows; product.first_row < rows && error == cudaSuccess;
       product.first_row += each) {
    product.rows = std::min(each, rows - product.first_row);
    error = launch(limits, kernel, where, product, rope, layout);
    const std::size_t done = static_cast<std::size_t>(each);
    const std::size_t n = static_cast<std::size_t>(product.n),
                      k = static_cast<std::size_t>(product.k);
    product.x = static_cast<const std::byte*>(product.x) +
                done * k * (has_norm(kForm) ? sizeof(float) : sizeof(T));
    if (product.y) product.y += done * n;
    if (product.y_float) product.y_float += done * n;
    if (product.residual) product.residual += done * n;
  }
  return error;
}

bool valid(int rows, int n, int k) {
  return rows > 0 && rows <= kMaxLinearRows && n > 0 && k > 0 && k % 8 == 0;
}
bool valid(const LinearArgs& args) {
  const int outputs = (args.y != nullptr) + (args.y_float != nullptr) + (args.residual != nullptr);
  return valid(args.rows, args.n, args.k) && outputs == 1 && args.weight && args.x &&
         aligned16(args.weight) && aligned16(args.x) && aligned16(args.gamma);
}

bool valid(const GatedLinearArgs& args) {
  return valid(args.rows, args.n, args.k) && args.gate && args.up && args.x && args.gamma &&
         args.y && aligned16(args.gate) && aligned16(args.up) && aligned16(args.x) &&
         aligned16(args.gamma);
}

template <class T>
LinearProduct<T> product_of(const LinearArgs& args) {
  return {.first_row = 0,
          .rows = args.rows,
          .n = args.n,
          .k = args.k,
          .weight = static_cast<const T*>(args.weight),
          .up = nullptr,
          .x = args.x,
          .gamma = static_cast<const T*>(args.gamma),
          .norm_epsilon = args.norm_epsilon,
          .norm_offset = args.norm_offset,
          .activation = Activation::silu,
          .bias = static_cast<const T*>(args.bias),
          .y = static_cast<T*>(args.y),
          .y_float = args.y_float,
          .residual = args.residual};
}

template <class T>
LinearProduct<T> product_of(const GatedLinearArgs& args) {
  return {.first_row = 0,
          .rows = args.rows,
          .n = args.n,
          .k = args.k,
          .weight = static_cast<const T*>(args.gate),
          .up = static_cast<const T*>(args.up),
          .x = args.x,
          .gamma = static_cast<const T*>(args.gamma),
          .norm_epsilon = args.norm_epsilon,
          .norm_offset = args.norm_offset,
          .activation = args.activation,
          .bias = nullptr,
          .y = static_cast<T*>(args.y),
          .y_float = nullptr,
          .residual = nullptr};
}

template <class T>
cudaError_t linear_of(const LinearArgs& args, cudaStream_t stream) {
  return args.gamma ? launch_linear<T, Form::normed>(product_of<T>(args), stream)
                    : launch_linear<T, Form::plain>(product_of<T>(args), stream);
}

bool belong(const LinearArgs& args, const RopeWriteArgs& rope) {
  return valid(rope) && args.y && args.y == rope.qkv && args.type == rope.cache.type &&
         args.rows == rope.tokens &&
         args.n == (rope.cache.query_heads + 2 * rope.cache.kv_heads) * rope.cache.head_size;
}

/// Whether a product and this rope_write can run in one launch.
bool is_fused(const LinearArgs& args, const RopeWriteArgs& rope) {
  constexpr int kStrip = outputs_of_strip(Form::rotated);
  return args.type != KVLAB_F32 && args.gamma && !rope.q_gamma && !rope.k_gamma && !rope.plain_q &&
         !rope.plain_k && rope.rotated == rope.cache.head_size &&
         rope.cache.head_size % kStrip == 0 && !rope.cache.pages.blocks;
}

}  // namespace

LaunchPlan linear_plan(Type type, Form form, int rows, int n, int k, const DeviceLimits& limits) {
  return type == KVLAB_F32 ? plan_linear_f32(form != Form::plain, rows, n, k, limits)
                           : plan_product(form, rows, n, k, limits).plan;
}

cudaError_t linear(const LinearArgs& args, cudaStream_t stream) {
  if (!valid(args)) return cudaErrorInvalidValue;
  switch (args.type) {
    case KVLAB_BF16:
      return linear_of<__nv_bfloat16>(args, stream);
    case KVLAB_F16:
      return linear_of<__half>(args, stream);
    case KVLAB_F32:
      return launch_linear_f32(product_of<float>(args), stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t linear_rope_write(const LinearArgs& args, const RopeWriteArgs& rope,
                              cudaStream_t stream) {
  if (!valid(args) || !belong(args, rope)) return cudaErrorInvalidValue;
  if (!is_fused(args, rope)) {
    const cudaError_t error = linear(args, stream);
    return error == cudaSuccess ? rope_write(rope, stream) : error;
  }
  return args.type == KVLAB_BF16
             ? launch_linear<__nv_bfloat16, Form::rotated>(product_of<__nv_bfloat16>(args), stream,
                                                           rope)
             : launch_linear<__half, Form::rotated>(product_of<__half>(args), stream, rope);
}

cudaError_t gated_linear(const GatedLinearArgs& args, cudaStream_t stream) {
  if (!valid(args)) return cudaErrorInvalidValue;
  switch (args.type) {
    case KVLAB_BF16:
      return launch_linear<__nv_bfloat16, Form::gated>(product_of<__nv_bfloat16>(args), stream);
    case KVLAB_F16:
      return launch_linear<__half, Form::gated>(product_of<__half>(args), stream);
    case KVLAB_F32:
      return launch_linear_f32(product_of<float>(args), stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace kvlab::kernels
