// Tests the kernel that computes a product, applies RoPE and writes to the cache. It is compared
// with the two kernels that it replaces, which other tests compare with float64.
#include <algorithm>
#include <cmath>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/linear/linear.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/kernels/attention_reference.hpp"
#include "tests/skip.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

constexpr std::size_t kRopeRedzone = 64;  // bytes after every output
constexpr int kSlots = 5, kPositions = 100;

struct Case {
  Type type = KVLAB_BF16;
  int rows = 1, query_heads = 4, kv_heads = 2, head_size = 64, rotated = 64, k = 264;
  bool bias = false, head_norm = false, pairs = false;

  int heads() const { return query_heads + 2 * kv_heads; }
  std::string name() const {
    return std::to_string(static_cast<int>(type)) + ": " + std::to_string(rows) + " rows, " +
           std::to_string(query_heads) + "/" + std::to_string(kv_heads) + " heads of " +
           std::to_string(head_size) + ", " + std::to_string(rotated) + " rotated, k " +
           std::to_string(k) + (bias ? ", bias" : "") + (head_norm ? ", head norm" : "") +
           (pairs ? ", pairs" : "");
  }
};

/// The outputs: the plain projection, the rotated queries, and the cache.
struct Outputs {
  explicit Outputs(const Case& c)
      : y(bytes(c, c.rows * c.heads())),
        q(bytes(c, c.rows * c.query_heads)),
        keys(bytes(c, c.rows * c.kv_heads * kSlots)),
        values(bytes(c, c.rows * c.kv_heads * kSlots)),
        positions(std::size_t(c.rows * c.kv_heads * kSlots) * sizeof(std::uint32_t) +
                  kRopeRedzone) {}
  static std::size_t bytes(const Case& c, int heads) {
    return std::size_t(heads) * std::size_t(c.head_size) * bytes_of(c.type) + kRopeRedzone;
  }
  void poison() const {
    for (const auto* part : {&y, &q, &keys, &values, &positions})
      check_cuda(cudaMemset(part->data(), 0xFF, part->to_host().size()));
    check_cuda(cudaDeviceSynchronize());
  }
  /// The bytes of all outputs, with their redzones.
  std::vector<std::byte> take() const {
    std::vector<std::byte> all;
    for (const auto* part : {&y, &q, &keys, &values, &positions}) {
      const auto bytes = part->to_host();
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }
  DeviceArray<std::byte> y, q, keys, values, positions;
};

class RopeTrial {
 public:
  explicit RopeTrial(const Case& c) : c_(c), out(c) {
    for (int position = 0; position < kPositions; ++position)
      for (int i = 0; i < c.rotated / 2; ++i) {
        const double angle = position * std::pow(10000.0, -2.0 * i / c.rotated);
        turns_.push_back(float2{float(std::cos(angle)), float(std::sin(angle))});
      }
    rope_.assign(turns_);
    for (int row = 0; row < c.rows; ++row) sequence_.push_back(c.rows - 1 - row);
    sequences_.assign(sequence_);
    move(0);
  }
  /// Changes positions and slots.
  void move(int by) {
    std::vector<std::int32_t> position, slot;
    for (int row = 0; row < c_.rows; ++row) {
      position.push_back((row * 37 + by * 11) % kPositions);
      // If slots are given by pair, they are relative to the next slot.
      slot.push_back((row + by) % (c_.pairs ? 2 : kSlots));
    }
    positions_.assign(position);
    slots_.assign(slot);
    std::vector<std::int64_t> first;
    std::vector<std::int32_t> next;
    for (int pair = 0; pair < c_.rows * c_.kv_heads; ++pair) {
      first.push_back(std::int64_t{pair} * kSlots);
      next.push_back((2 * pair + by) % (kSlots - 1));
    }
    first_slot_.assign(first);
    next_slots_.assign(next);
  }

  LinearArgs product() const {
    return {.type = c_.type,
            .rows = c_.rows,
            .n = c_.heads() * c_.head_size,
            .k = c_.k,
            .weight = weight_.data(),
            .x = x_.data(),
            .gamma = gamma_.data(),
            .norm_epsilon = 1e-5f,
            .bias = bias_.data(),
            .y = out.y.data(),
            .y_float = nullptr,
            .residual = nullptr};
  }
  RopeWriteArgs rope() const {
    RopeWriteArgs args{};
    args.cache.type = c_.type;
    args.tokens = c_.rows;
    args.cache.query_heads = c_.query_heads;
    args.cache.kv_heads = c_.kv_heads;
    args.cache.head_size = c_.head_size;
    args.rotated = c_.rotated;
    args.qkv = out.y.data();
    args.q_gamma = args.k_gamma = head_gamma_.data();
    args.norm_epsilon = 1e-5f;
    args.rope = &rope_.data()->x;
    args.rope_rows = positions_.data();
    args.sequences = sequences_.data();
    args.slots = slots_.data();
    args.cache.keys = out.keys.data();
    args.cache.values = out.values.data();
    args.head_stride = std::int64_t{kSlots} * c_.head_size;
    args.sequence_stride = args.head_stride * c_.kv_heads;
    args.q = out.q.data();
    if (c_.pairs) {
      args.cache.first_slot = first_slot_.data();
      args.cache.next_slots = next_slots_.data();
      args.cache.positions = reinterpret_cast<std::uint32_t*>(out.positions.data());
      args.now = reinterpret_cast<const std::uint32_t*>(positions_.data());
    }
    return args;
  }
  std::vector<std::byte> in_two() const {
    out.poison();
    check_cuda(linear(product(), nullptr));
    check_cuda(rope_write(rope(), nullptr));
    return out.take();
  }
  cudaError_t enqueue(cudaStream_t stream) const {
    return linear_rope_write(product(), rope(), stream);
  }

 private:
  DeviceArray<std::byte> random(Type type, int count) {
    return DeviceArray<std::byte>(std::span<const std::byte>(
        encode(type, random_values(type, std::size_t(count), generator_))));
  }

  Case c_;
  std::mt19937 generator_{11};
  std::vector<float2> turns_;
  std::vector<std::int32_t> sequence_;
  DeviceArray<std::byte> weight_{random(c_.type, c_.heads() * c_.head_size * c_.k)},
      gamma_{random(c_.type, c_.k)}, x_{random(KVLAB_F32, c_.rows*c_.k)},
      bias_{random(c_.type, c_.bias ? c_.heads() * c_.head_size : 0)},
      head_gamma_{random(c_.type, c_.head_norm ? c_.head_size : 0)};
  DeviceArray<float2> rope_{std::size_t(kPositions * c_.rotated / 2)};
  DeviceArray<std::int32_t> positions_{std::size_t(c_.rows)}, sequences_{std::size_t(c_.rows)},
      slots_{std::size_t(c_.rows)}, next_slots_{std::size_t(c_.rows * c_.kv_heads)};
  DeviceArray<std::int64_t> first_slot_{std::size_t(c_.rows * c_.kv_heads)};

 public:
  Outputs out;
};

void check(const Case& c) {
  INFO(c.name());
  RopeTrial trial(c);
  CapturedGraph graph([&](cudaStream_t stream) { return trial.enqueue(stream); });
  for (int by = 0; by < 2; ++by) {
    trial.move(by);
    const std::vector<std::byte> two = trial.in_two();
    trial.out.poison();
    check_cuda(trial.enqueue(nullptr));
    CHECK((trial.out.take() == two));
    trial.out.poison();
    graph.launch();
    CHECK((trial.out.take() == two));
  }
}

}  // namespace

TEST_CASE("a product that ends with RoPE refuses arguments that do not match") {
  alignas(16) float memory[16] = {};
  std::int32_t index = 0;
  float2 turn{};
  LinearArgs product{.type = KVLAB_BF16,
                     .rows = 1,
                     .n = 48,
                     .k = 8,
                     .weight = memory,
                     .x = memory,
                     .gamma = memory,
                     .norm_epsilon = 0,
                     .bias = nullptr,
                     .y = memory,
                     .y_float = nullptr,
                     .residual = nullptr};
  RopeWriteArgs rope{};
  rope.cache.type = KVLAB_BF16;
  rope.tokens = rope.cache.query_heads = rope.cache.kv_heads = 1;
  rope.cache.head_size = rope.rotated = 16;
  rope.qkv = memory;
  rope.rope = &turn.x;
  rope.rope_rows = rope.sequences = rope.slots = &index;
  rope.cache.keys = rope.cache.values = rope.q = memory;
  const auto refused = [&](auto change) {
    LinearArgs bad_product = product;
    RopeWriteArgs bad_rope = rope;
    change(bad_product, bad_rope);
    return linear_rope_write(bad_product, bad_rope, nullptr) == cudaErrorInvalidValue;
  };
  CHECK(refused([](LinearArgs& p, RopeWriteArgs&) { p.n = 32; }));
  CHECK(refused([](LinearArgs& p, RopeWriteArgs&) { p.type = KVLAB_F16; }));
  CHECK(refused([&](LinearArgs& p, RopeWriteArgs&) { p.y = memory + 4; }));
  CHECK(refused([](LinearArgs& p, RopeWriteArgs&) { p.k = 12; }));
  CHECK(refused([](LinearArgs&, RopeWriteArgs& r) { r.tokens = 2; }));
  CHECK(refused([](LinearArgs&, RopeWriteArgs& r) { r.rotated = 18; }));
  CHECK(refused([](LinearArgs&, RopeWriteArgs& r) { r.cache.keys = nullptr; }));
}

TEST_CASE("a product that ends with RoPE equals the two launches to the bit", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int rows : {1, 2, 5, 8}) {
      check({.type = type, .rows = rows});
      check({.type = type,
             .rows = rows,
             .query_heads = 8,
             .kv_heads = 1,
             .head_size = 128,
             .rotated = 128,
             .k = 2048,
             .bias = true});
      check({.type = type,
             .rows = rows,
             .query_heads = 3,
             .kv_heads = 3,
             .head_size = 96,
             .rotated = 96,
             .k = 520});
      check({.type = type, .rows = rows, .query_heads = 7, .kv_heads = 1, .bias = true});
      check({.type = type, .rows = rows, .kv_heads = 1, .head_size = 256, .rotated = 256});
    }
  check({.rows = 8, .query_heads = 2, .kv_heads = 1, .k = 8192});  // takes two passes
  check({.rows = 5, .query_heads = 6, .kv_heads = 3, .pairs = true});
  // These need two launches:
  check({.rows = 3, .head_norm = true});
  check({.rows = 3, .head_size = 80, .rotated = 32});
}

TEST_CASE("200 runs of a product that ends with RoPE are equal to the bit", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  RopeTrial trial(
      {.rows = 5, .query_heads = 32, .kv_heads = 8, .head_size = 128, .rotated = 128, .k = 520});
  const std::vector<std::byte> first = trial.in_two();
  CapturedGraph graph([&](cudaStream_t stream) { return trial.enqueue(stream); });
  int different = 0;
  for (int again = 0; again < 200; ++again) {
    trial.out.poison();
    if (again % 2)
      graph.launch();
    else
      check_cuda(trial.enqueue(nullptr));
    different += trial.out.take() != first;
  }
  CHECK(different == 0);
}
