#include <algorithm>
#include <cmath>
#include <deque>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/linear/linear.hpp"
#include "kernels/loaded_code.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/kernels/attention_reference.hpp"
#include "tests/skip.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

constexpr float kEpsilon = 1e-5f;
constexpr std::size_t kRedzone = 64;  // bytes after every output

enum class Output { y, logits, residual };

struct Problem {
  Type type = KVLAB_BF16;
  int rows = 1, n = 8, k = 8;
  bool norm = false, bias = false, gated = false;
  Output output = Output::y;
  float offset = 0;
  Activation activation = Activation::silu;

  std::string name() const {
    constexpr const char* kTypes[] = {"bf16", "f16", "f32"};
    return std::string(kTypes[static_cast<int>(type)]) + " " + std::to_string(rows) + " x " +
           std::to_string(n) + " x " + std::to_string(k) + (norm ? " normed" : "") +
           (bias ? " bias" : "") + (gated ? " gated" : "") +
           (output == Output::logits     ? " logits"
            : output == Output::residual ? " residual"
                                         : "");
  }
};

double activated(Activation activation, double x) {
  if (activation == Activation::silu) return x / (1 + std::exp(-x));
  constexpr double kRoot2OverPi = 0.79788456080286535588;
  return x / 2 * (1 + std::tanh(kRoot2OverPi * (x + 0.044715 * x * x * x)));
}

/// A problem: its inputs on the host and on the device, and three results, namely the kernel's, the
/// exact one and the naive one.
class Trial {
 public:
  explicit Trial(const Problem& problem) : p_(problem), out_(out_bytes() + kRedzone) {}

  /// Poisons the output. A residual is reset to its initial values instead.
  void reset() {
    check_cuda(cudaMemset(out_.data(), 0xFF, out_bytes() + kRedzone));
    if (p_.output == Output::residual)
      check_cuda(cudaMemcpy(out_.data(), residual_.data(), out_bytes(), cudaMemcpyDeviceToDevice));
    check_cuda(cudaDeviceSynchronize());
  }

  cudaError_t enqueue(cudaStream_t stream) const {
    if (p_.gated)
      return gated_linear({.type = p_.type,
                           .rows = p_.rows,
                           .n = p_.n,
                           .k = p_.k,
                           .gate = weight_.data(),
                           .up = up_.data(),
                           .x = static_cast<const float*>(x_.data()),
                           .gamma = gamma_.data(),
                           .norm_epsilon = kEpsilon,
                           .y = out_.data(),
                           .norm_offset = p_.offset,
                           .activation = p_.activation},
                          stream);
    float* const floats = reinterpret_cast<float*>(out_.data());
    return linear({.type = p_.type,
                   .rows = p_.rows,
                   .n = p_.n,
                   .k = p_.k,
                   .weight = weight_.data(),
                   .x = x_.data(),
                   .gamma = gamma_.data(),
                   .norm_epsilon = kEpsilon,
                   .bias = bias_.data(),
                   .y = p_.output == Output::y ? out_.data() : nullptr,
                   .y_float = p_.output == Output::logits ? floats : nullptr,
                   .residual = p_.output == Output::residual ? floats : nullptr,
                   .norm_offset = p_.offset},
                  stream);
  }

  std::vector<std::byte> bytes() const { return out_.to_host(); }
  /// The output, after checking that its redzone is untouched.
  std::vector<float> results() const {
    std::vector<std::byte> all = bytes();
    CHECK(std::all_of(all.begin() + static_cast<std::ptrdiff_t>(out_bytes()), all.end(),
                      [](std::byte b) { return b == std::byte{0xFF}; }));
    all.resize(out_bytes());
    return decode(out_type(), all);
  }

  std::vector<double> exact() const {
    return compute<double>([](double x) { return x; }, [](double x) { return x; });
  }
  /// The naive result: sums are computed in float32, in the order of the elements; the normed x and
  /// the result are rounded.
  std::vector<double> naive() const {
    return compute<float>([&](float x) { return round_to(p_.type, x); },
                          [&](float x) { return round_to(out_type(), x); });
  }

 private:
  struct Values {
    std::vector<float> host;
    DeviceArray<std::byte> device;
    Values(Type type, std::size_t count, std::mt19937& random)
        : host(random_values(type, count, random)),
          device(std::span<const std::byte>(encode(type, host))) {}
    void* data() const { return device.data(); }  // null if empty
  };
  std::size_t rows() const { return std::size_t(p_.rows); }
  std::size_t n() const { return std::size_t(p_.n); }
  std::size_t k() const { return std::size_t(p_.k); }

  Type out_type() const { return p_.output == Output::y ? p_.type : KVLAB_F32; }
  std::size_t out_bytes() const { return rows() * n() * bytes_of(out_type()); }

  template <class Sum, class RoundX, class RoundY>
  std::vector<double> compute(RoundX round_x, RoundY round_y) const {
    std::vector<double> y;
    const std::size_t n = this->n(), k = this->k();
    for (std::size_t row = 0; row < rows(); ++row) {
      std::vector<Sum> x(x_.host.begin() + std::ptrdiff_t(row * k),
                         x_.host.begin() + std::ptrdiff_t((row + 1) * k));
      if (p_.norm) {
        Sum squares = 0;
        for (const Sum v : x) squares += v * v;
        const Sum scale = 1 / std::sqrt(squares / Sum(k) + Sum(kEpsilon));
        for (std::size_t i = 0; i < k; ++i)
          x[i] = round_x(x[i] * scale * Sum(p_.offset + gamma_.host[i]));
      }
      const auto dot = [&](const std::vector<float>& matrix, std::size_t at) {
        Sum sum = 0;
        for (std::size_t i = 0; i < k; ++i) sum += x[i] * Sum(matrix[at * k + i]);
        return sum;
      };
      for (std::size_t at = 0; at < n; ++at) {
        Sum value = dot(weight_.host, at);
        if (p_.bias) value += Sum(bias_.host[at]);
        if (p_.gated) value = Sum(activated(p_.activation, double(value))) * dot(up_.host, at);
        if (p_.output == Output::residual) value += Sum(residual_.host[row * n + at]);
        y.push_back(double(round_y(value)));
      }
    }
    return y;
  }

  Problem p_;
  std::mt19937 random_{1};
  Values weight_{p_.type, n() * k(), random_};
  Values up_{p_.type, p_.gated ? n() * k() : 0, random_};
  Values gamma_{p_.type, p_.norm ? k() : 0, random_};
  Values bias_{p_.type, p_.bias ? n() : 0, random_};
  Values x_{p_.norm ? KVLAB_F32 : p_.type, rows() * k(), random_};
  Values residual_{KVLAB_F32, rows() * n(), random_};
  DeviceArray<std::byte> out_;
};

double largest_error(std::span<const double> exact, auto&& values) {
  double error = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double off = std::abs(double(values[i]) - exact[i]);
    if (!(off <= error)) error = off;  // keeps NaN
  }
  return error;
}

void check_accuracy(const Problem& problem) {
  Trial trial(problem);
  trial.reset();
  check_cuda(trial.enqueue(nullptr));
  const std::vector<double> exact = trial.exact();
  double largest = 0;
  for (const double value : exact) largest = std::max(largest, std::abs(value));
  const double error = largest_error(exact, trial.results());
  const double naive = largest_error(exact, trial.naive());
  INFO(problem.name() << ": error " << error << ", naive " << naive << ", largest " << largest);
  CHECK(error <= 2 * naive + 0x1p-20 * largest);
}

}  // namespace

TEST_CASE("linear refuses unsupported arguments before any launch") {
  alignas(16) float memory[16] = {};
  const LinearArgs good{.type = KVLAB_BF16,
                        .rows = 1,
                        .n = 1,
                        .k = 8,
                        .weight = memory,
                        .x = memory,
                        .gamma = nullptr,
                        .norm_epsilon = 0,
                        .bias = nullptr,
                        .y = memory,
                        .y_float = nullptr,
                        .residual = nullptr};
  const auto refused = [&](auto&& change) {
    LinearArgs bad = good;
    change(bad);
    return linear(bad, nullptr) == cudaErrorInvalidValue;
  };
  CHECK(refused([](LinearArgs& a) { a.rows = kMaxLinearRows + 1; }));
  CHECK(refused([](LinearArgs& a) { a.rows = 0; }));
  CHECK(refused([](LinearArgs& a) { a.k = 12; }));
  CHECK(refused([](LinearArgs& a) { a.n = 0; }));
  CHECK(refused([](LinearArgs& a) { a.y = nullptr; }));
  CHECK(refused([&](LinearArgs& a) { a.residual = memory; }));
  CHECK(refused([&](LinearArgs& a) { a.weight = reinterpret_cast<std::byte*>(memory) + 2; }));
  CHECK(gated_linear(GatedLinearArgs{}, nullptr) == cudaErrorInvalidValue);
}

TEST_CASE("linear is as exact as float32 sums of the type's values, for every ragged size",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const auto& [n, k] :
         {std::pair{1, 8}, {7, 24}, {8, 128}, {33, 136}, {40, 1032}, {131, 2048}})
      for (const int rows : {1, 2, 3, 5, 8})
        for (const bool norm : {false, true}) {
          check_accuracy({.type = type, .rows = rows, .n = n, .k = k, .norm = norm});
          check_accuracy({.type = type,
                          .rows = rows,
                          .n = n,
                          .k = k,
                          .norm = norm,
                          .bias = true,
                          .output = norm ? Output::logits : Output::residual});
        }
}

TEST_CASE("gated linear is as exact as float32 sums of the type's values", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const auto& [n, k] : {std::pair{1, 8}, {12, 24}, {45, 520}, {131, 2048}, {2117, 64}})
      for (const int rows : {1, 4, 7, 8})
        for (const Activation activation : {Activation::silu, Activation::gelu_tanh})
          check_accuracy({.type = type,
                          .rows = rows,
                          .n = n,
                          .k = k,
                          .norm = true,
                          .gated = true,
                          .offset = activation == Activation::silu ? 0.0f : 1.0f,
                          .activation = activation});
}

TEST_CASE("linear is correct if blocks process many units, and for long rows", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const bool norm : {false, true}) {
    for (const int n :
         {1061, 2048, 3072, 4096, 20001})  // one unit of work has 8, 16 or 32 weight rows
      check_accuracy({.rows = 3, .n = n, .k = 264, .norm = norm, .output = Output::logits});
    check_accuracy({.rows = 8, .n = 40, .k = 8192, .norm = norm});  // with a norm, in two passes
    check_accuracy({.rows = 8, .n = 70, .k = 14336, .norm = norm, .output = Output::residual});
    check_accuracy({.type = KVLAB_F32, .rows = 8, .n = 20, .k = 8192, .norm = norm});
  }
}

TEST_CASE("linear is correct with the plans of a GPU with less shared memory", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const int shared_bytes : {101'376, 65'536}) {
    const SmallerGpu small(shared_bytes);
    // With a norm, the plan for the longest row that fits has a ring of two stages.
    const int longest = shared_bytes > 100'000 ? 8192 : 3072;
    for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
      for (const int rows : {1, 3, 8}) {
        INFO(shared_bytes << " bytes, rows " << rows);
        for (const int k : {264, 2048, longest}) {
          check_accuracy({.type = type, .rows = rows, .n = 2117, .k = k, .norm = true});
          check_accuracy(
              {.type = type, .rows = rows, .n = 300, .k = k, .norm = true, .gated = true});
          check_accuracy(
              {.type = type, .rows = rows, .n = 2117, .k = k, .output = Output::residual});
        }
        check_accuracy(
            {.type = type, .rows = rows, .n = 70, .k = 14'336, .output = Output::residual});
      }
  }
}

TEST_CASE("a normed x is not rounded to the type before the product", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16}) {
    Trial trial(
        {.type = type, .rows = 3, .n = 64, .k = 1024, .norm = true, .output = Output::logits});
    trial.reset();
    check_cuda(trial.enqueue(nullptr));
    const std::vector<double> exact = trial.exact();
    CHECK(16 * largest_error(exact, trial.results()) < largest_error(exact, trial.naive()));
  }
}

TEST_CASE("a row has the same bits alone and in a batch", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const bool norm : {false, true}) {
      const int n = 3072, k = 2056;
      std::mt19937 random(3);
      const Type x_type = norm ? KVLAB_F32 : type;
      const auto upload = [&](Type stored_type, std::size_t count) {
        return DeviceArray<std::byte>(std::span<const std::byte>(
            encode(stored_type, random_values(stored_type, count, random))));
      };
      const auto weight = upload(type, std::size_t(n) * k), gamma = upload(type, k);
      const auto x = upload(x_type, std::size_t(8) * k);
      const DeviceArray<float> together(std::size_t(8) * n), alone(std::size_t(8) * n);
      const auto run = [&](int rows, int first, const DeviceArray<float>& out) {
        check_cuda(linear({.type = type,
                           .rows = rows,
                           .n = n,
                           .k = k,
                           .weight = weight.data(),
                           .x = x.data() + std::size_t(first) * k * bytes_of(x_type),
                           .gamma = norm ? gamma.data() : nullptr,
                           .norm_epsilon = kEpsilon,
                           .bias = nullptr,
                           .y = nullptr,
                           .y_float = out.data() + std::size_t(first) * n,
                           .residual = nullptr},
                          nullptr));
      };
      run(8, 0, together);
      for (int row = 0; row < 8; ++row) run(1, row, alone);
      CHECK((together.to_host() == alone.to_host()));
    }
}

TEST_CASE("200 runs of linear, plain and in a graph, are equal to the bit", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const bool gated : {false, true}) {
      const Problem problem{
          .type = type, .rows = 5, .n = 4100, .k = 520, .norm = true, .gated = gated};
      Trial trial(problem);
      trial.reset();
      check_cuda(trial.enqueue(nullptr));
      const std::vector<std::byte> first = trial.bytes();
      CapturedGraph graph([&](cudaStream_t stream) { return trial.enqueue(stream); });
      int different = 0;
      for (int again = 0; again < 200; ++again) {
        trial.reset();
        if (again % 2)
          graph.launch();
        else
          check_cuda(trial.enqueue(nullptr));
        different += trial.bytes() != first;
      }
      CHECK(different == 0);
    }
}

namespace {

/// Layers of a small model: residual += down(gated(residual)). Each launch reads the output of the
/// launch before it.
class Chain {
 public:
  Chain() : residual_(kRows * kHidden), middle_(kRows * kInner * 2) {
    std::mt19937 random(9);
    for (int i = 0; i < kLayers; ++i) {
      std::vector<float> down = random_values(KVLAB_BF16, kHidden * kInner, random);
      for (float& value : down) value = round_to(KVLAB_BF16, value / 32);
      weights_.emplace_back(std::span<const std::byte>(
          encode(KVLAB_BF16, random_values(KVLAB_BF16, 2 * kHidden * kInner + kHidden, random))));
      downs_.emplace_back(std::span<const std::byte>(encode(KVLAB_BF16, down)));
    }
    start_ = random_values(KVLAB_F32, kRows * kHidden, random);
  }
  void reset() { residual_.assign(start_); }
  template <class Between>
  cudaError_t enqueue(cudaStream_t stream, Between between) const {
    for (std::size_t i = 0; i < kLayers; ++i) {
      const std::byte* const weights = weights_[i].data();
      cudaError_t error = gated_linear({.type = KVLAB_BF16,
                                        .rows = kRows,
                                        .n = kInner,
                                        .k = kHidden,
                                        .gate = weights,
                                        .up = weights + 2 * kHidden * kInner,
                                        .x = residual_.data(),
                                        .gamma = weights + 4 * kHidden * kInner,
                                        .norm_epsilon = kEpsilon,
                                        .y = middle_.data()},
                                       stream);
      if (error != cudaSuccess) return error;
      between();
      error = linear({.type = KVLAB_BF16,
                      .rows = kRows,
                      .n = kHidden,
                      .k = kInner,
                      .weight = downs_[i].data(),
                      .x = middle_.data(),
                      .gamma = nullptr,
                      .norm_epsilon = 0,
                      .bias = nullptr,
                      .y = nullptr,
                      .y_float = nullptr,
                      .residual = residual_.data()},
                     stream);
      if (error != cudaSuccess) return error;
      between();
    }
    return cudaSuccess;
  }
  std::vector<float> residual() const { return residual_.to_host(); }

 private:
  static constexpr int kLayers = 12, kRows = 3, kHidden = 512, kInner = 1024;
  std::deque<DeviceArray<std::byte>> weights_, downs_;
  std::vector<float> start_;
  DeviceArray<float> residual_;
  DeviceArray<std::byte> middle_;
};

}  // namespace

TEST_CASE("launches that start early wait for their inputs, alone, in a stream and in a graph",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  Chain chain;
  chain.reset();
  check_cuda(chain.enqueue(nullptr, [] { check_cuda(cudaDeviceSynchronize()); }));
  const std::vector<float> one_by_one = chain.residual();
  CHECK(
      std::all_of(one_by_one.begin(), one_by_one.end(), [](float x) { return std::isfinite(x); }));
  const Stream stream;
  CapturedGraph graph([&](cudaStream_t s) { return chain.enqueue(s, [] {}); });
  int different = 0;
  for (int again = 0; again < 50; ++again) {
    chain.reset();
    if (again % 2)
      graph.launch();
    else
      check_cuda(chain.enqueue(stream.get(), [] {}));
    different += chain.residual() != one_by_one;
  }
  CHECK(different == 0);
}

TEST_CASE("a launch may join another stream's work in a graph", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  Trial trial({.rows = 2, .n = 512, .k = 512, .norm = true, .output = Output::logits});
  trial.reset();
  check_cuda(trial.enqueue(nullptr));
  const std::vector<std::byte> plain = trial.bytes();
  const Stream other;
  DeviceArray<int> scratch(16);
  cudaEvent_t fork = nullptr, join = nullptr;
  check_cuda(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  check_cuda(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  CapturedGraph graph([&](cudaStream_t stream) {
    check_cuda(trial.enqueue(stream));
    check_cuda(cudaEventRecord(fork, stream));
    check_cuda(cudaStreamWaitEvent(other.get(), fork));
    check_cuda(cudaMemsetAsync(scratch.data(), 1, 16 * sizeof(int), other.get()));
    check_cuda(cudaEventRecord(join, other.get()));
    check_cuda(trial.enqueue(stream));
    check_cuda(cudaStreamWaitEvent(stream, join));
    return trial.enqueue(stream);
  });
  trial.reset();
  graph.launch();
  CHECK((trial.bytes() == plain));
  cudaEventDestroy(fork);
  cudaEventDestroy(join);
}
