// Compares a router's choice, the products of the chosen experts and their sum with float64.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "kernels/linear/experts.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/kernels/attention_reference.hpp"
#include "tests/skip.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

struct ExpertSize {
  Type type;
  int tokens, experts, chosen, hidden, width;
  bool biases = true, among_chosen = true, equal_logits = false;
};

class ExpertLayer {
 public:
  explicit ExpertLayer(const ExpertSize& size) : size_(size) {
    std::mt19937 random(31);
    const auto sample = [&](std::size_t count) { return random_values(size.type, count, random); };
    x_ = random_values(KVLAB_F32, count(size.tokens, size.hidden), random);
    gamma_ = sample(count(size.hidden));
    router_ = sample(count(size.experts, size.hidden));
    router_bias_ = sample(count(size.experts));
    if (size.equal_logits) std::ranges::fill(router_, 0.0f), std::ranges::fill(router_bias_, 80.0f);
    weight_ = sample(count(size.experts, size.width) * count(size.hidden));
    bias_ = sample(count(size.experts, size.width));
    y_ = fill(count(pairs(), size.width), KVLAB_F32);
    shares_ = fill(count(pairs()), KVLAB_F32);
    normed_ = fill(count(size.tokens, size.hidden), size.type);
  }

  void check() {
    const auto gamma = upload(gamma_), router = upload(router_), weight = upload(weight_),
               router_bias = upload(router_bias_), bias = upload(bias_);
    const DeviceArray<float> x{std::span<const float>(x_)};
    const DeviceArray<float> logits(count(size_.tokens, size_.experts));
    DeviceArray<std::int32_t> expert(count(pairs())), order(count(pairs())),
        starts(count(size_.experts + 1));
    const Routes routes{
        size_.tokens,  size_.experts, size_.chosen, reinterpret_cast<float*>(shares_->data()),
        expert.data(), order.data(),  starts.data()};
    const auto enqueue = [&](cudaStream_t stream) {
      const cudaError_t error = route({.type = size_.type,
                                       .routes = routes,
                                       .hidden = size_.hidden,
                                       .x = x.data(),
                                       .norm = {gamma.data(), 1e-5f, 0},
                                       .weight = router.data(),
                                       .bias = size_.biases ? router_bias.data() : nullptr,
                                       .among_chosen = size_.among_chosen,
                                       .normed = normed_->data(),
                                       .logits = logits.data()},
                                      stream);
      if (error != cudaSuccess) return error;
      return expert_product({.type = size_.type,
                             .routes = routes,
                             .n = size_.width,
                             .k = size_.hidden,
                             .weight = weight.data(),
                             .bias = size_.biases ? bias.data() : nullptr,
                             .x = normed_->data(),
                             .by_token = true,
                             .y = nullptr,
                             .y_float = reinterpret_cast<float*>(y_->data())},
                            stream);
    };
    CapturedGraph graph(enqueue);
    graph.launch();
    check_cuda(cudaDeviceSynchronize());
    check_routes(expert.to_host());
    check_products(expert.to_host());
    check_sum(routes);
  }

 private:
  static std::size_t count(int a, int b = 1) { return std::size_t(a) * std::size_t(b); }
  int pairs() const { return size_.tokens * size_.chosen; }
  DeviceArray<std::byte> upload(const std::vector<float>& values) const {
    return DeviceArray<std::byte>(std::span<const std::byte>(encode(size_.type, values)));
  }
  /// An array filled with NaN.
  static std::unique_ptr<DeviceArray<std::byte>> fill(std::size_t count, Type type) {
    auto array = std::make_unique<DeviceArray<std::byte>>(count * bytes_of(type));
    check_cuda(cudaMemset(array->data(), 0xFF, count * bytes_of(type)));
    return array;
  }
  std::vector<double> logits(int token) const {
    const float* const x = &x_[count(token, size_.hidden)];
    double squares = 0;
    for (int i = 0; i < size_.hidden; ++i) squares += double(x[i]) * double(x[i]);
    const double rms = std::sqrt(squares / size_.hidden + double(1e-5f));
    std::vector<double> all;
    for (int e = 0; e < size_.experts; ++e) {
      double sum = size_.biases ? double(router_bias_[count(e)]) : 0;
      for (int i = 0; i < size_.hidden; ++i)
        sum += double(x[i]) / rms * double(gamma_[count(i)]) *
               double(router_[count(e, size_.hidden) + count(i)]);
      all.push_back(sum);
    }
    return all;
  }

  /// Compares the chosen experts with those that float64 logits choose. If two experts have nearly
  /// equal logits, either is accepted.
  void check_routes(const std::vector<std::int32_t>& expert) const {
    const auto shares = decode(KVLAB_F32, shares_->to_host());
    int wrong = 0;
    double worst = 0;
    for (int token = 0; token < size_.tokens; ++token) {
      const auto all = logits(token);
      std::vector<int> by_logit(count(size_.experts));
      std::iota(by_logit.begin(), by_logit.end(), 0);
      std::ranges::stable_sort(by_logit, std::greater{}, [&](int e) { return all[count(e)]; });
      double sum = 0;
      for (int i = 0; i < (size_.among_chosen ? size_.chosen : size_.experts); ++i)
        sum += std::exp(all[count(by_logit[count(i)])] - all[count(by_logit[0])]);
      for (int i = 0; i < size_.chosen; ++i) {
        const std::size_t pair = count(token, size_.chosen) + count(i);
        const int right = by_logit[count(i)], own = expert[pair];
        const bool same = own == right || (!size_.equal_logits && own >= 0 && own < size_.experts &&
                                           std::abs(all[count(own)] - all[count(right)]) < 1e-3);
        wrong += same ? 0 : 1;
        const double share = std::exp(all[count(right)] - all[count(by_logit[0])]) / sum;
        worst = std::max(worst, std::abs(double(shares[pair]) - share));
      }
    }
    CHECK(wrong == 0);
    CHECK(worst < 1e-3);
  }

  /// Compares the products with those computed on the host from the device's rounded norms.
  void check_products(const std::vector<std::int32_t>& expert) const {
    const auto y = decode(KVLAB_F32, y_->to_host()),
               normed = decode(size_.type, normed_->to_host());
    double worst = 0;
    int not_finite = 0;
    for (int pair = 0; pair < pairs(); ++pair)
      for (int n = 0; n < size_.width; ++n) {
        const std::size_t row = count(expert[count(pair)], size_.width) + count(n);
        double sum = size_.biases ? double(bias_[row]) : 0, size = std::abs(sum);
        for (int i = 0; i < size_.hidden; ++i) {
          const double term = double(weight_[row * count(size_.hidden) + count(i)]) *
                              double(normed[count(pair / size_.chosen, size_.hidden) + count(i)]);
          sum += term;
          size += std::abs(term);
        }
        const double error = std::abs(double(y[count(pair, size_.width) + count(n)]) - sum) / size;
        not_finite += std::isfinite(error) ? 0 : 1;
        worst = std::max(worst, error);
      }
    CHECK(not_finite == 0);
    CHECK(worst < 1e-6);
  }

  void check_sum(const Routes& routes) const {
    const auto y = decode(KVLAB_F32, y_->to_host()), shares = decode(KVLAB_F32, shares_->to_host());
    std::vector<float> before(count(size_.tokens, size_.width), 0.5f);
    const DeviceArray<float> x{std::span<const float>(before)};
    check_cuda(add_shares(routes, reinterpret_cast<const float*>(y_->data()), size_.width, x.data(),
                          nullptr));
    const auto after = x.to_host();
    double worst = 0;
    for (int token = 0; token < size_.tokens; ++token)
      for (int n = 0; n < size_.width; ++n) {
        double sum = 0.5, size = 0.5;
        for (int c = 0; c < size_.chosen; ++c) {
          const std::size_t pair = count(token, size_.chosen) + count(c);
          const double term =
              double(shares[pair]) * double(y[pair * count(size_.width) + count(n)]);
          sum += term, size += std::abs(term);
        }
        worst = std::max(
            worst, std::abs(double(after[count(token, size_.width) + count(n)]) - sum) / size);
      }
    CHECK(worst < 1e-6);
  }

  ExpertSize size_;
  std::vector<float> x_, gamma_, router_, router_bias_, weight_, bias_;
  std::unique_ptr<DeviceArray<std::byte>> y_, shares_, normed_;
};

}  // namespace

TEST_CASE("experts agree with float64 for every type, with few tokens and with many", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const bool biases : {false, true})
      for (const int tokens : {1, 9, 32, 150}) {
        CAPTURE(int(type), biases, tokens);
        ExpertLayer({type, tokens, 5, 2, 72, 88, biases, !biases}).check();
        ExpertLayer({type, tokens, 70, 8, 200, 64, biases, biases}).check();
        ExpertLayer({type, tokens, 3, 3, 8, 8, biases, biases}).check();
      }
}

TEST_CASE("among experts with equal logits the first ones are chosen", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F32})
    ExpertLayer({type, 40, 100, 4, 64, 16, true, true, true}).check();
}

TEST_CASE("experts refuse unsupported arguments before any launch") {
  alignas(16) float memory[16] = {};
  std::int32_t ids[16] = {};
  Routes routes{1, 4, 2, memory, ids, ids, ids};
  RouteArgs router{KVLAB_BF16, routes,  8,    memory, {memory, 0, 0},
                   memory,     nullptr, true, memory, memory};
  ExpertProductArgs product{KVLAB_BF16, routes, 8,    8,      memory,
                            nullptr,    memory, true, memory, nullptr};
  const auto refused = [](auto change, auto args, auto launcher) {
    change(args);
    return launcher(args, nullptr) == cudaErrorInvalidValue;
  };
  CHECK(refused([](auto& a) { a.hidden = 12; }, router, route));
  CHECK(refused([](auto& a) { a.routes.chosen = 5; }, router, route));
  CHECK(refused([](auto& a) { a.routes.experts = kMaxExperts + 1; }, router, route));
  CHECK(refused([](auto& a) { a.norm.gamma = nullptr; }, router, route));
  CHECK(refused([](auto& a) { a.k = 4; }, product, expert_product));
  CHECK(refused([](auto& a) { a.y_float = static_cast<float*>(a.y); }, product, expert_product));
  CHECK(refused([](auto& a) { a.routes.order = nullptr; }, product, expert_product));
  CHECK(add_shares(routes, memory, 4, memory, nullptr) == cudaErrorInvalidValue);
}
