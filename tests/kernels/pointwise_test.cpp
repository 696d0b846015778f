#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/pointwise.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/kernels/attention_reference.hpp"
#include "tests/skip.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

constexpr Type kTypes[] = {KVLAB_BF16, KVLAB_F16, KVLAB_F32};

DeviceArray<std::byte> upload(Type type, std::span<const float> values) {
  return DeviceArray<std::byte>(std::span<const std::byte>(encode(type, values)));
}

/// `count` elements of NaN, and 64 bytes after them that must not change.
class Poisoned {
 public:
  Poisoned(Type type, std::size_t count)
      : type_(type), bytes_(count * bytes_of(type)), device_(bytes_ + kRedzone) {
    check_cuda(cudaMemset(device_.data(), 0xFF, bytes_ + kRedzone));
    check_cuda(cudaDeviceSynchronize());
  }
  void* data() const { return device_.data(); }
  float* floats() const { return reinterpret_cast<float*>(device_.data()); }
  std::vector<float> take() const {
    std::vector<std::byte> all = device_.to_host();
    CHECK(std::all_of(all.begin() + std::ptrdiff_t(bytes_), all.end(),
                      [](std::byte b) { return b == std::byte{0xFF}; }));
    all.resize(bytes_);
    return decode(type_, all);
  }

 private:
  static constexpr std::size_t kRedzone = 64;
  Type type_;
  std::size_t bytes_;
  DeviceArray<std::byte> device_;
};

/// Checks that the error of each value is at most one rounding to `type` plus a few roundings to
/// float32.
void check_close(Type type, std::span<const float> values, std::span<const double> exact) {
  REQUIRE(values.size() == exact.size());
  const double rounding = type == KVLAB_BF16 ? 0x1p-8 : type == KVLAB_F16 ? 0x1p-11 : 0x1p-24;
  double largest = 0;
  for (const double value : exact) largest = std::max(largest, std::abs(value));
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < exact.size(); ++i)
    if (!(std::abs(double(values[i]) - exact[i]) <=
          1.01 * rounding * std::abs(exact[i]) + 0x1p-21 * largest))
      ++wrong;
  CHECK(wrong == 0);
}

/// Runs and checks `enqueue(stream)` once directly, and once in a captured graph.
template <class Enqueue, class Check>
void plain_and_captured(Enqueue enqueue, Check check) {
  check_cuda(enqueue(cudaStream_t{nullptr}));
  check();
  CapturedGraph graph(enqueue);
  graph.launch();
  check();
}

}  // namespace

TEST_CASE("the pointwise kernels refuse unsupported arguments before any launch") {
  alignas(16) float memory[16] = {};
  std::int32_t id = 0;
  CHECK(embed(KVLAB_BF16, memory, 12, 1, &id, 1, memory, nullptr) == cudaErrorInvalidValue);
  CHECK(embed(KVLAB_BF16, memory, 8, 1, &id, 0, memory, nullptr) == cudaErrorInvalidValue);
  CHECK(rms_norm(KVLAB_BF16, memory, {memory}, 1, 4, memory, nullptr) == cudaErrorInvalidValue);
  CHECK(rms_norm(KVLAB_BF16, memory + 1, {memory}, 1, 8, memory, nullptr) == cudaErrorInvalidValue);
  CHECK(add_normed(KVLAB_BF16, memory + 1, {memory}, 1, 8, memory, nullptr) ==
        cudaErrorInvalidValue);
  CHECK(norm_in_place(KVLAB_BF16, memory, 4, {memory}, 1, 8, nullptr) == cudaErrorInvalidValue);
  CHECK(norm_in_place(KVLAB_BF16, memory, 8, {}, 1, 8, nullptr) == cudaErrorInvalidValue);
  CHECK(add_residual(KVLAB_BF16, memory, 0, memory, nullptr) == cudaErrorInvalidValue);
  CHECK(gate(KVLAB_BF16, Activation::silu, 0, memory, 1, 4, memory, nullptr) ==
        cudaErrorInvalidValue);
  CHECK(rope_write(RopeWriteArgs{}, nullptr) == cudaErrorInvalidValue);
  CHECK(sample(SampleArgs{}, nullptr) == cudaErrorInvalidValue);
}

TEST_CASE("embed widens and scales rows of the table; an id below 0 gives NaN", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  std::mt19937 random(1);
  for (const Type type : kTypes)
    for (const int hidden : {8, 64, 2056}) {
      const std::size_t width = std::size_t(hidden);
      const std::vector<float> table = random_values(type, 11 * width, random);
      const auto device_table = upload(type, table);
      const std::vector<std::int32_t> ids{10, 0, 3, -1, 3};
      const DeviceArray<std::int32_t> device_ids{std::span<const std::int32_t>(ids)};
      const Poisoned x(KVLAB_F32, ids.size() * width);
      check_cuda(embed(type, device_table.data(), hidden, 1.5f, device_ids.data(), 5, x.floats(),
                       nullptr));
      const std::vector<float> got = x.take();
      for (std::size_t t = 0; t < ids.size(); ++t)
        for (std::size_t i = 0; i < width; ++i) {
          if (ids[t] < 0)
            REQUIRE(std::isnan(got[t * width + i]));
          else
            REQUIRE(got[t * width + i] == 1.5f * table[std::size_t(ids[t]) * width + i]);
        }
    }
}

TEST_CASE("norms divide by the root mean square, and round once or not at all", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  std::mt19937 random(2);
  for (const Type type : kTypes)
    for (const std::size_t hidden : {8, 520, 4096})
      for (const float offset : {0.0f, 1.0f}) {
        const std::size_t tokens = 5;
        const auto x = random_values(KVLAB_F32, tokens * hidden, random);
        const auto stream_before = random_values(KVLAB_F32, tokens * hidden, random);
        const auto gamma = random_values(type, hidden, random);
        const DeviceArray<float> device_x{std::span<const float>(x)};
        const auto device_gamma = upload(type, gamma);
        const Norm norm{device_gamma.data(), 1e-5f, offset};
        std::vector<double> exact, added;
        for (std::size_t t = 0; t < tokens; ++t) {
          double squares = 0;
          for (std::size_t i = 0; i < hidden; ++i)
            squares += double(x[t * hidden + i]) * double(x[t * hidden + i]);
          const double rms = std::sqrt(squares / double(hidden) + double(1e-5f));
          for (std::size_t i = 0; i < hidden; ++i) {
            const std::size_t at = t * hidden + i;
            exact.push_back(double(x[at]) / rms * (double(offset) + double(gamma[i])));
            added.push_back(double(stream_before[at]) + exact.back());
          }
        }
        const Poisoned y(type, tokens * hidden);
        plain_and_captured(
            [&](cudaStream_t stream) {
              return rms_norm(type, device_x.data(), norm, int(tokens), int(hidden), y.data(),
                              stream);
            },
            [&] { check_close(type, y.take(), exact); });
        const DeviceArray<float> sum{std::span<const float>(stream_before)};
        check_cuda(
            add_normed(type, device_x.data(), norm, int(tokens), int(hidden), sum.data(), nullptr));
        check_close(KVLAB_F32, sum.to_host(), added);
        check_cuda(
            rms_norm(type, device_x.data(), {}, int(tokens), int(hidden), y.data(), nullptr));
        check_close(type, y.take(), std::vector<double>(x.begin(), x.end()));
      }
}

TEST_CASE("a norm in place changes part of each row and leaves the rest", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  std::mt19937 random(8);
  for (const Type type : kTypes)
    for (const std::size_t width : {8, 520, 4096}) {
      const std::size_t tokens = 3, stride = width + 24, first = 16;
      std::vector<float> y = random_values(type, tokens * stride, random);
      y[first] = 80;  // a large element, which dominates the norm
      const auto gamma = random_values(type, width, random);
      const auto device_gamma = upload(type, gamma), device_y = upload(type, y);
      check_cuda(norm_in_place(type, device_y.data() + first * bytes_of(type), std::int64_t(stride),
                               {device_gamma.data(), 1e-5f, 1}, int(tokens), int(width), nullptr));
      std::vector<double> exact(y.begin(), y.end());
      for (std::size_t t = 0; t < tokens; ++t) {
        double squares = 0;
        for (std::size_t i = 0; i < width; ++i)
          squares += std::pow(double(y[t * stride + first + i]), 2);
        const double rms = std::sqrt(squares / double(width) + double(1e-5f));
        for (std::size_t i = 0; i < width; ++i)
          exact[t * stride + first + i] *= (1 + double(gamma[i])) / rms;
      }
      check_close(type, decode(type, device_y.to_host()), exact);
    }
}

TEST_CASE("add_residual adds every element once, for every count", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  std::mt19937 random(3);
  for (const Type type : kTypes)
    for (const std::size_t count : {1, 7, 8, 2047, 2049, 10000}) {
      const auto x = random_values(KVLAB_F32, count, random),
                 y = random_values(type, count, random);
      const DeviceArray<float> device_x{std::span<const float>(x)};
      const auto device_y = upload(type, y);
      check_cuda(add_residual(type, device_y.data(), count, device_x.data(), nullptr));
      std::vector<float> exact;
      for (std::size_t i = 0; i < count; ++i) exact.push_back(x[i] + y[i]);
      CHECK((device_x.to_host() == exact));
    }
}

TEST_CASE("gate multiplies up by the activation, also far from zero", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  std::mt19937 random(4);
  for (const Activation activation : {Activation::silu, Activation::gelu_tanh})
    for (const Type type : kTypes)
      for (const std::size_t width : {8, 88, 2056}) {
        const std::size_t tokens = 3;
        auto gate_up = random_values(type, tokens * 2 * width, random);
        gate_up[0] = 80;
        gate_up[1] = -80;
        const auto device = upload(type, gate_up);
        std::vector<double> exact;
        for (std::size_t t = 0; t < tokens; ++t)
          for (std::size_t i = 0; i < width; ++i) {
            const double x = double(gate_up[t * 2 * width + i]);
            const double bent = activation == Activation::silu
                                    ? x / (1 + std::exp(-x))
                                    : x / 2 *
                                          (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) *
                                                         (x + 0.044715 * x * x * x)));
            exact.push_back(bent * double(gate_up[t * 2 * width + width + i]));
          }
        const Poisoned y(type, tokens * width);
        check_cuda(
            gate(type, activation, 0, device.data(), int(tokens), int(width), y.data(), nullptr));
        check_close(type, y.take(), exact);
      }
}

TEST_CASE("a clamped gate is bounded above, and up is bounded on both sides", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : kTypes) {
    const std::vector<float> gate_up{80, -80, 2, -2, 8, 0.5f, -9, 7, 3, 3, 80, -80, 8, -8, 7, -7};
    std::vector<double> exact;
    for (std::size_t i = 0; i < 8; ++i) {
      const double g = std::min(double(gate_up[i]), 7.0);
      const double u = std::clamp(double(gate_up[8 + i]), -7.0, 7.0);
      exact.push_back((u + 1) * g / (1 + std::exp(-1.702 * g)));
    }
    const Poisoned y(type, 8);
    const auto device = upload(type, gate_up);
    check_cuda(gate(type, Activation::silu, 7, device.data(), 1, 8, y.data(), nullptr));
    check_close(type, y.take(), exact);
  }
}

namespace {

struct RopeCase {
  Type type;
  std::size_t head_size, rotated, query_heads, kv_heads;
  bool norm;
  float offset = 0;
};

/// A projection of four tokens of two sequences, and the outputs to which its heads must be
/// written.
class RopeTrial {
 public:
  explicit RopeTrial(const RopeCase& c)
      : c_(c),
        q_(c.type, kTokens * c.query_heads * c.head_size),
        plain_q_(c.type, kTokens * c.query_heads * c.head_size),
        plain_k_(c.type, kTokens * c.kv_heads * c.head_size),
        keys_(c.type, kSequences * c.kv_heads * kSlots * c.head_size),
        values_(c.type, kSequences * c.kv_heads * kSlots * c.head_size) {
    std::mt19937 random(6);
    qkv_ = random_values(c.type, kTokens * heads() * c.head_size, random);
    q_gamma_ = random_values(c.type, c.head_size, random);
    k_gamma_ = random_values(c.type, c.head_size, random);
    for (std::size_t position = 0; position < kPositions; ++position)
      for (std::size_t i = 0; i < c.rotated / 2; ++i) {
        const double angle =
            double(position) * std::pow(10000.0, -2.0 * double(i) / double(c.rotated));
        rope_.push_back(float2{float(std::cos(angle)), float(std::sin(angle))});
      }
  }

  void check() const {
    const auto qkv = upload(c_.type, qkv_), q_gamma = upload(c_.type, q_gamma_),
               k_gamma = upload(c_.type, k_gamma_);
    const DeviceArray<float2> rope{std::span<const float2>(rope_)};
    const DeviceArray<std::int32_t> positions{std::span<const std::int32_t>(kAt)},
        sequences{std::span<const std::int32_t>(kSequence)},
        slots{std::span<const std::int32_t>(kSlot)};
    const auto enqueue = [&](cudaStream_t stream) {
      RopeWriteArgs args{};
      args.cache = {.type = c_.type,
                    .query_heads = int(c_.query_heads),
                    .kv_heads = int(c_.kv_heads),
                    .head_size = int(c_.head_size),
                    .keys = keys_.data(),
                    .values = values_.data()};
      args.tokens = int(kTokens);
      args.qkv = qkv.data();
      args.rotated = int(c_.rotated);
      args.rope = &rope.data()->x;
      args.rope_rows = positions.data();
      args.sequences = sequences.data();
      args.slots = slots.data();
      args.q = q_.data();
      args.sequence_stride = std::int64_t(c_.kv_heads * kSlots * c_.head_size);
      args.head_stride = std::int64_t(kSlots * c_.head_size);
      args.q_gamma = c_.norm ? q_gamma.data() : nullptr;
      args.k_gamma = c_.norm ? k_gamma.data() : nullptr;
      args.norm_epsilon = 1e-6f;
      args.norm_offset = c_.offset;
      args.plain_q = plain_q_.data();
      args.plain_k = plain_k_.data();
      return rope_write(args, stream);
    };
    plain_and_captured(enqueue, [&] { check_outputs(); });
  }

 private:
  static constexpr std::size_t kTokens = 4, kSequences = 2, kSlots = 5, kPositions = 100;
  static constexpr std::int32_t kAt[kTokens] = {0, 7, 99, 7}, kSequence[kTokens] = {0, 1, 0, 0},
                                kSlot[kTokens] = {0, 4, 4, 2};

  std::size_t heads() const { return c_.query_heads + 2 * c_.kv_heads; }
  /// A head of the projection after the norm, rounded to the type.
  std::vector<float> plain(std::size_t token, std::size_t head,
                           std::span<const float> gamma) const {
    const std::size_t size = c_.head_size;
    const auto* const from = qkv_.data() + (token * heads() + head) * size;
    std::vector<float> out(from, from + size);
    if (!c_.norm || gamma.empty()) return out;
    double squares = 0;
    for (const float x : out) squares += double(x) * double(x);
    const double rms = std::sqrt(squares / double(size) + double(1e-6f));
    for (std::size_t i = 0; i < size; ++i)
      out[i] =
          round_to(c_.type, float(double(out[i]) / rms * (double(c_.offset) + double(gamma[i]))));
    return out;
  }
  std::vector<double> rotated(std::size_t token, std::span<const float> head) const {
    std::vector<double> out(head.begin(), head.end());
    const std::size_t half = c_.rotated / 2;
    for (std::size_t i = 0; i < half; ++i) {
      const float2 turn = rope_[std::size_t(kAt[token]) * half + i];
      const double a = double(head[i]), b = double(head[i + half]);
      out[i] = a * double(turn.x) - b * double(turn.y);
      out[i + half] = b * double(turn.x) + a * double(turn.y);
    }
    return out;
  }

  void check_outputs() const {
    const auto q = q_.take(), plain_q = plain_q_.take(), plain_k = plain_k_.take(),
               keys = keys_.take(), values = values_.take();
    const std::size_t size = c_.head_size;
    std::size_t written = 0;
    for (std::size_t t = 0; t < kTokens; ++t) {
      for (std::size_t h = 0; h < c_.query_heads; ++h) {
        const auto head = std::span(plain_q).subspan((t * c_.query_heads + h) * size, size);
        const auto exact = plain(t, h, q_gamma_);
        check_close(c_.norm ? c_.type : KVLAB_F32, head,
                    std::vector<double>(exact.begin(), exact.end()));
        check_close(c_.type, std::span(q).subspan((t * c_.query_heads + h) * size, size),
                    rotated(t, head));
      }
      for (std::size_t h = 0; h < c_.kv_heads; ++h) {
        const std::size_t slot =
            ((std::size_t(kSequence[t]) * c_.kv_heads + h) * kSlots + std::size_t(kSlot[t])) * size;
        const auto head = std::span(plain_k).subspan((t * c_.kv_heads + h) * size, size);
        const auto exact = plain(t, c_.query_heads + h, k_gamma_);
        check_close(c_.norm ? c_.type : KVLAB_F32, head,
                    std::vector<double>(exact.begin(), exact.end()));
        check_close(c_.type, std::span(keys).subspan(slot, size), rotated(t, head));
        const auto value = plain(t, c_.query_heads + c_.kv_heads + h, {});
        CHECK(std::equal(value.begin(), value.end(), values.begin() + std::ptrdiff_t(slot)));
        written += size;
      }
    }
    const auto untouched = [](float x) { return std::isnan(x); };
    CHECK(std::size_t(std::ranges::count_if(keys, untouched)) == keys.size() - written);
    CHECK(std::size_t(std::ranges::count_if(values, untouched)) == values.size() - written);
  }

  RopeCase c_;
  std::vector<float> qkv_, q_gamma_, k_gamma_;
  std::vector<float2> rope_;
  Poisoned q_, plain_q_, plain_k_, keys_, values_;
};

}  // namespace

TEST_CASE("rope_write norms, rotates and writes each head to its output, and writes nothing else",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : kTypes)
    for (const bool norm : {false, true}) {
      RopeTrial({type, 64, 64, 3, 1, norm}).check();
      RopeTrial({type, 256, 256, 4, 1, norm, 1}).check();
      RopeTrial({type, 96, 96, 4, 4, norm}).check();
      RopeTrial({type, 128, 128, 14, 2, norm}).check();
      RopeTrial({type, 80, 32, 4, 2, norm}).check();
      RopeTrial({type, 12, 12, 8, 1, norm}).check();
    }
}

TEST_CASE("rope_write writes nothing of an idle sequence, whose row of the table is -1", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  constexpr std::size_t kSize = 64, kSlots = 3, kPositions = 8;
  std::mt19937 random(9);
  for (const Type type : kTypes) {
    const auto qkv = upload(type, random_values(type, 2 * 3 * kSize, random));
    const DeviceArray<float2> rope{std::vector<float2>(kPositions * kSize / 2, float2{0.6f, 0.8f})};
    const std::vector<std::uint32_t> at{5, KVLAB_IDLE};
    const std::vector<std::int32_t> each{0, 1}, first{0, 0};
    const DeviceArray<std::uint32_t> now{std::span(at)};
    const DeviceArray<std::int32_t> sequences{std::span(each)}, slots{std::span(first)};
    const Poisoned q(type, 2 * kSize), keys(type, 2 * kSlots * kSize),
        values(type, 2 * kSlots * kSize);
    RopeWriteArgs args{};
    args.cache = {.type = type,
                  .query_heads = 1,
                  .kv_heads = 1,
                  .head_size = int(kSize),
                  .keys = keys.data(),
                  .values = values.data()};
    args.tokens = 2;
    args.qkv = qkv.data();
    args.rotated = int(kSize);
    args.rope = &rope.data()->x;
    args.rope_rows = reinterpret_cast<const std::int32_t*>(now.data());
    args.sequences = sequences.data();
    args.slots = slots.data();
    args.now = now.data();
    args.q = q.data();
    args.sequence_stride = std::int64_t(kSlots * kSize);
    args.head_stride = std::int64_t(kSlots * kSize);
    plain_and_captured([&](cudaStream_t stream) { return rope_write(args, stream); },
                       [&] {
                         // Only the query of sequence 0, and its key and value in slot 0, are
                         // written.
                         for (const Poisoned* out : {&q, &keys, &values}) {
                           const auto all = out->take();
                           const auto is_written = [](float x) { return !std::isnan(x); };
                           CHECK(std::ranges::all_of(std::span(all).first(kSize), is_written));
                           CHECK(std::ranges::none_of(std::span(all).subspan(kSize), is_written));
                         }
                       });
  }
}
