#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/kernels/attention_reference.hpp"
#include "tests/skip.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

constexpr int kPoison = 0xFF;  // every type's all-ones is not a number

struct Size {
  Type type = Type::bf16;
  int head_size = 128, group = 4, kv_heads = 2, first = 0, queries = 64;
  float scale = 0;  ///< 0: 1 / sqrt(head_size)
};

/// A chunk of a prompt on the device; poison in the slots that no query sees.
class Chunk {
 public:
  explicit Chunk(const Size& size, bool equal_keys = false) : size_(size) {
    if (size_.scale == 0) size_.scale = 1 / std::sqrt(static_cast<float>(size_.head_size));
    std::mt19937 random(23);
    q_ = random_values(size_.type, rows() * dim(), random);
    keys_ = random_values(size_.type, size_.kv_heads * slots() * dim(), random);
    values_ = random_values(size_.type, size_.kv_heads * slots() * dim(), random);
    if (equal_keys)
      for (std::size_t i = dim(); i < keys_.size(); ++i) keys_[i] = keys_[i % dim()];
    for (std::size_t i = 0; i < keys_.size(); ++i)
      if (i / dim() % slots() >= visible())
        keys_[i] = values_[i] = std::numeric_limits<float>::quiet_NaN();
    device_q_ = upload(q_);
    device_keys_ = upload(keys_);
    device_values_ = upload(values_);
    out_ = std::make_unique<DeviceArray<std::byte>>((rows() + kGuardRows) * row_bytes());
    lse_ = std::make_unique<DeviceArray<float>>(rows() + kGuardRows);
    poison();
  }

  void poison() {
    check_cuda(cudaMemset(out_->data(), kPoison, (rows() + kGuardRows) * row_bytes()));
    check_cuda(cudaMemset(lse_->data(), kPoison, (rows() + kGuardRows) * 4));
    check_cuda(cudaDeviceSynchronize());
  }

  cudaError_t enqueue(cudaStream_t stream) const {
    const std::int64_t head_stride = static_cast<std::int64_t>(slots() * dim());
    const AttentionShape shape{.type = size_.type,
                               .query_heads = size_.group * size_.kv_heads,
                               .kv_heads = size_.kv_heads,
                               .head_size = size_.head_size,
                               .softmax_scale = size_.scale,
                               .sequence_stride = head_stride * size_.kv_heads,
                               .head_stride = head_stride};
    return prefill_attention({.shape = shape,
                              .first = size_.first,
                              .queries = size_.queries,
                              .q = device_q_->data(),
                              .keys = device_keys_->data(),
                              .values = device_values_->data(),
                              .out = out_->data(),
                              .lse = lse_->data()},
                             stream);
  }

  std::vector<std::byte> bits() const { return out_->to_host(); }

  void check() const {
    const std::vector<float> out = kernels::decode(size_.type, out_->to_host());
    const std::vector<float> lse = lse_->to_host();
    AttentionErrors errors(size_.type);
    for (std::size_t row = 0; row < rows(); ++row) {
      const std::size_t kv_head = row % query_heads() / size_.group;
      const std::size_t count = (size_.first + row / query_heads() + 1) * dim();
      const std::span<const float> query(&q_[row * dim()], dim());
      const std::span<const float> keys(&keys_[kv_head * slots() * dim()], count);
      const std::span<const float> values(&values_[kv_head * slots() * dim()], count);
      errors.add(std::span(&out[row * dim()], dim()), lse[row],
                 exact_row(query, keys, values, size_.scale),
                 naive_row(size_.type, query, keys, values, size_.scale));
    }
    INFO("error " << errors.out() << ", naive " << errors.naive_out());
    CHECK(errors.good());
    const auto guard = std::span(out).subspan(rows() * dim());
    CHECK(std::all_of(guard.begin(), guard.end(), [](float v) { return std::isnan(v); }));
  }

 private:
  static constexpr std::size_t kGuardRows = 2;
  static constexpr std::size_t kUnusedSlots = 5;

  std::size_t dim() const { return size_.head_size; }
  std::size_t query_heads() const { return std::size_t(size_.group) * size_.kv_heads; }
  std::size_t rows() const { return query_heads() * size_.queries; }
  std::size_t row_bytes() const { return dim() * bytes_of(size_.type); }
  std::size_t visible() const { return std::size_t(size_.first) + size_.queries; }
  std::size_t slots() const { return visible() + kUnusedSlots; }
  std::unique_ptr<DeviceArray<std::byte>> upload(const std::vector<float>& values) const {
    return std::make_unique<DeviceArray<std::byte>>(encode(size_.type, values));
  }

  Size size_;
  std::vector<float> q_, keys_, values_;
  std::unique_ptr<DeviceArray<std::byte>> device_q_, device_keys_, device_values_, out_;
  std::unique_ptr<DeviceArray<float>> lse_;
};

void run_and_check(const Size& size, bool equal_keys = false) {
  const char* types[] = {"bf16", "f16", "f32"};
  INFO(types[static_cast<int>(size.type)] << " head size " << size.head_size << " group "
                                          << size.group << " first " << size.first << " queries "
                                          << size.queries);
  const Chunk chunk(size, equal_keys);
  const Stream stream;
  check_cuda(chunk.enqueue(stream.get()));
  check_cuda(cudaDeviceSynchronize());
  chunk.check();
}

}  // namespace

TEST_CASE("prefill attention agrees with float64 for every type, head size and group", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {Type::bf16, Type::f16, Type::f32})
    for (const int head_size : {64, 96, 128})
      for (const int group : {1, 2, 3, 4, 7, 8})
        run_and_check(
            {.type = type, .head_size = head_size, .group = group, .first = 37, .queries = 67});
}

TEST_CASE("prefill attention takes any first position and number of queries", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {Type::bf16, Type::f32})
    for (const int first : {0, 1, 63, 64, 65, 500})
      for (const int queries : {1, 31, 32, 33, 64, 129, 200})
        run_and_check({.type = type, .kv_heads = 1, .first = first, .queries = queries});
}

TEST_CASE("prefill attention holds for logits of 80 either way and for equal ones", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {Type::bf16, Type::f16, Type::f32}) {
    Size size{.type = type, .first = 70, .queries = 130};
    run_and_check(size, true);
    size.scale = 30 / std::sqrt(128.0f);  // the largest of some hundreds lie beyond 80
    run_and_check(size);
  }
}

TEST_CASE("prefill attention gives equal bits 200 times, plain and in a captured graph", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {Type::bf16, Type::f16, Type::f32}) {
    Chunk chunk({.type = type, .first = 100, .queries = 300});
    const Stream stream;
    check_cuda(chunk.enqueue(stream.get()));
    const auto bits = chunk.bits();
    CapturedGraph graph([&](cudaStream_t captured) { return chunk.enqueue(captured); });
    int different = 0;
    for (int again = 0; again < 200; ++again) {
      chunk.poison();
      if (again % 2 == 0)
        check_cuda(chunk.enqueue(stream.get()));
      else
        graph.launch();
      different += chunk.bits() == bits ? 0 : 1;
    }
    CHECK(different == 0);
  }
}

TEST_CASE("prefill attention refuses what it does not support before any launch") {
  PrefillAttentionArgs args{};
  args.shape = {.type = Type::bf16,
                .query_heads = 32,
                .kv_heads = 8,
                .head_size = 128,
                .softmax_scale = 1,
                .sequence_stride = 8 * 64 * 128,
                .head_stride = 64 * 128};
  args.queries = 1;
  CHECK(prefill_attention(args, nullptr) == cudaErrorInvalidValue);  // null pointers
  args.shape.head_size = 80;
  CHECK(prefill_attention(args, nullptr) == cudaErrorInvalidValue);
  args.shape.head_size = 128;
  args.queries = 0;
  CHECK(prefill_attention(args, nullptr) == cudaErrorInvalidValue);
}
