// Compares attention that observes and evicts, with the fast and the plain kernels, with float64
// and with the eviction rule on the host.
#include <memory>

#include "kernels/evict/eviction_kernels.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/kernels/evicting_batch.hpp"
#include "tests/skip.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

EvictionKernels kernels_of(const std::string& spec,
                           EvictionKernels (*launched)(const DevicePolicy&) = observing_kernels) {
  const std::string name = spec.substr(0, spec.find(':'));
  for (const DevicePolicy& policy : device_policies())
    if (policy.name == name) return launched(policy);
  throw std::invalid_argument("no kernels of " + spec);
}

/// The policy with protected tokens that fit into the smallest budget. Policies whose default
/// number of recent tokens is larger than 5 get 5.
std::string fitting(std::string_view name) {
  const Extent recent = parse_policy(name).recent;
  return std::string(name) + (recent.is_share || recent.tokens <= 5 ? "" : ":recent=5");
}

void run_steps(EvictingBatch& batch, int steps) {
  const Stream stream;
  for (int step = 0; step < steps; ++step) {
    INFO("step " << step);
    batch.sample_tokens();
    check_cuda(batch.enqueue(stream.get()));
    check_cuda(cudaDeviceSynchronize());
    batch.check();
  }
}

void run(EvictingSize size, int steps,
         EvictionKernels (*launched)(const DevicePolicy&) = observing_kernels) {
  INFO(size.name());
  size.steps = steps;
  EvictingBatch batch(kernels_of(size.policy, launched), size);
  run_steps(batch, steps);
}

/// Runs and checks cache positions with rotated keys, with the fast kernels and with the plain
/// ones.
void run_with_rotated_keys(EvictingSize size, int steps) {
  size.numbering = Positions::cache;
  INFO(size.name());
  for (const auto launched : {observing_kernels, plain_kernels}) {
    const EvictionKernels kernels = kernels_of(size.policy, launched);
    REQUIRE(kernels.oldest_first);
    EvictingBatch batch(kernels, size);
    run_steps(batch, steps);
  }
}

}  // namespace

TEST_CASE("every policy evicts on the device as on the host, step by step", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const DevicePolicy& policy : device_policies())
    for (const Positions numbering : {Positions::original, Positions::cache})
      run({.policy = fitting(policy.name),
           .sequences = 3,
           .budgets = {17, 33, 64, 65, 8},
           .prompt = 7,
           .numbering = numbering},
          90);
}

TEST_CASE("observing attention is correct for every type, head size and group", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 96, 128, 256})
      for (const int group : {1, 2, 3, 4, 7, 8, 13, 16})
        for (const Positions numbering : {Positions::original, Positions::cache})
          run({.policy = group % 2 ? "h2o" : "lru",
               .type = type,
               .head_size = head_size,
               .group = group,
               .budgets = {63, 130},
               .prompt = 61,
               .numbering = numbering},
              4);
}

TEST_CASE("cache positions with rotated keys are correct for every type, head size and group",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 96, 128, 256})
      for (const int group : {1, 2, 3, 4, 7, 8, 13, 16})
        run_with_rotated_keys({.policy = group % 2 ? "sink" : "sink:sinks=19",
                               .type = type,
                               .head_size = head_size,
                               .group = group,
                               .budgets = {63, 130},
                               .prompt = 300},
                              3);
}

TEST_CASE(
    "cache positions with rotated keys are correct at extreme budgets and sinks, and at "
    "any position",
    "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::uint32_t budget : {1u, 2u, 3u})
    run_with_rotated_keys(
        {.policy = "sink:sinks=" + std::to_string(budget - 1), .kv_heads = 1, .budgets = {budget}},
        12);
  run_with_rotated_keys({.policy = "sink:sinks=64", .budgets = {65, 129}, .prompt = 200}, 5);
  run_with_rotated_keys({.policy = "sink:sinks=100:recent=7", .budgets = {200}, .prompt = 90}, 130);
  run_with_rotated_keys({.policy = "sink", .budgets = {400}, .prompt = 30},
                        3);  // a budget above the length
  run_with_rotated_keys({.policy = "window", .budgets = {33}, .prompt = 60}, 5);
  run_with_rotated_keys({.policy = "sink", .budgets = {100}, .prompt = 120, .scale = 30.0f / 8}, 5);
  run_with_rotated_keys({.policy = "sink", .kv_heads = 1, .budgets = {70}, .prompt = 4'000'000}, 3);
}

TEST_CASE("cache positions with rotated keys are correct if pairs are split", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  run_with_rotated_keys({.policy = "sink",
                         .head_size = 128,
                         .sequences = 2,
                         .budgets = {9000, 1024, 511, 4097},
                         .prompt = 9100},
                        3);
}

TEST_CASE("observing attention is correct if pairs are split, and over many blocks", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::string policy : {"h2o", "lru", "window", "full", "random"})
    for (const Positions numbering : {Positions::original, Positions::cache})
      run({.policy = policy,
           .head_size = 128,
           .kv_heads = 2,
           .sequences = 2,
           .budgets = {9000, 1024, 511, 4097},
           .prompt = 9100,
           .numbering = numbering},
          3);
}

TEST_CASE("observing attention is correct at extreme budgets and protected tokens", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::string policy :
       {"h2o:recent=0", "h2o:recent=1", "lru", "window", "random", "lru:recent=1"})
    for (const std::uint32_t budget : {1u, 2u, 3u})
      run({.policy = policy, .kv_heads = 1, .budgets = {budget}}, 12);
  run({.policy = "h2o:sinks=7:recent=1", .budgets = {8}}, 30);  // sinks, and the newest token
  run({.policy = "h2o:sinks=0:recent=8", .budgets = {8}}, 30);  // only recent tokens
  run({.policy = "lru:sinks=4:recent=50%", .budgets = {20}}, 60);
  run({.policy = "h2o", .budgets = {400}, .prompt = 30}, 12);          // a budget above the length
  run({.policy = "streaming_h2o", .budgets = {0}, .prompt = 30}, 12);  // no budget
}

TEST_CASE("observing attention is correct for equal keys and for logits of 80", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::string policy : {"h2o:recent=0", "lru"}) {
    run({.policy = policy, .budgets = {33}, .prompt = 40, .equal_keys = true}, 60);
    run({.policy = policy, .budgets = {200}, .prompt = 200, .scale = 30.0f / 8}, 10);
    run({.policy = policy, .budgets = {100}, .prompt = 100, .tau = 0.0}, 5);
    run({.policy = policy, .budgets = {100}, .prompt = 100, .tau = 1.0}, 5);
  }
}

TEST_CASE("observing attention takes sink logits into account, with plain and fast kernels",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const auto launched : {observing_kernels, plain_kernels})
    for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
      for (const std::string policy : {"h2o", "lru"})
        for (const Positions numbering : {Positions::original, Positions::cache})
          run({.policy = policy,
               .type = type,
               .group = 5,
               .sequences = 2,
               .budgets = {63, 130, 33},
               .prompt = 61,
               .numbering = numbering,
               .sinks = true},
              4, launched);
  run({.head_size = 128, .sequences = 2, .budgets = {9000, 511}, .prompt = 9100, .sinks = true}, 3);
  run_with_rotated_keys(
      {.policy = "sink", .group = 5, .budgets = {63}, .prompt = 90, .sinks = true}, 3);
}

TEST_CASE("observing attention agrees with the host over hundreds of steps", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::string policy : {"h2o", "lru", "streaming_h2o", "sink"})
    run({.policy = policy,
         .budgets = {100, 37},
         .numbering = policy == "h2o" || policy == "lru" ? Positions::original : Positions::cache},
        500);
}

TEST_CASE("an idle sequence does not change", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  EvictingBatch batch(kernels_of("h2o"), {.sequences = 3, .budgets = {16}, .prompt = 12});
  const Stream stream;
  for (int step = 0; step < 20; ++step) {
    batch.sample_tokens({step % 2 == 0, false, step % 3 == 0});
    check_cuda(batch.enqueue(stream.get()));
    check_cuda(cudaDeviceSynchronize());
    batch.check();
  }
}

TEST_CASE("a captured graph of observing attention stays valid for a growing sequence", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::string policy : {"h2o", "lru", "sink", "full"})
    for (const bool settled : {false, true}) {
      INFO(policy);
      EvictingBatch batch(kernels_of(policy),
                          {.policy = policy,
                           .head_size = 128,
                           .sequences = 2,
                           .budgets = {90, 65},
                           .prompt = 50,
                           .numbering = policy == "sink" ? Positions::cache : Positions::original,
                           .settled = settled,
                           .steps = 100});
      CapturedGraph graph([&](cudaStream_t stream) { return batch.enqueue(stream); });
      for (int step = 0; step < 100; ++step) {
        INFO("step " << step);
        batch.sample_tokens();
        graph.launch();
        check_cuda(cudaDeviceSynchronize());
        batch.check();
      }
    }
}

TEST_CASE("consecutive layers observe only their own logits", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  constexpr int kLayers = 12;
  for (const std::string policy : {"h2o", "lru", "window", "sink", "streaming_h2o"}) {
    INFO(policy);
    std::vector<std::unique_ptr<EvictingBatch>> layers;
    for (int layer = 0; layer < kLayers; ++layer) {
      const EvictingSize size{.policy = policy,
                              .head_size = 128,
                              .sequences = 4,
                              .budgets = {700, 3000, 129},
                              .prompt = 3000,
                              .numbering = parse_policy(policy).entry->info.positions,
                              .settled = true};
      layers.push_back(std::make_unique<EvictingBatch>(kernels_of(policy), size));
      layers.back()->share_workspace(*layers.front());
    }
    CapturedGraph graph([&](cudaStream_t stream) {
      cudaError_t error = cudaSuccess;
      for (const auto& layer : layers)
        if (error == cudaSuccess) error = layer->enqueue(stream);
      return error;
    });
    for (int step = 0; step < 3; ++step) {
      for (const auto& layer : layers) layer->sample_tokens();
      graph.launch();
      check_cuda(cudaDeviceSynchronize());
      for (const auto& layer : layers) layer->check();
    }
  }
}

TEST_CASE("200 runs of observing attention give equal bits", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::string policy : {"h2o", "lru", "sink", "streaming_h2o"}) {
    EvictingBatch batch(kernels_of(policy),
                        {.policy = policy,
                         .head_size = 128,
                         .sequences = 2,
                         .budgets = {3000, 700},
                         .prompt = 3100,
                         .numbering = parse_policy(policy).entry->info.positions});
    const Stream stream;
    batch.sample_tokens();
    check_cuda(batch.enqueue(stream.get()));
    const auto bits = batch.bits();
    int different = 0;
    for (int again = 0; again < 200; ++again) {
      batch.restore();
      check_cuda(batch.enqueue(stream.get()));
      different += batch.bits() == bits ? 0 : 1;
    }
    CHECK(different == 0);
    batch.check();
  }
}

TEST_CASE("observing attention refuses unsupported arguments before any launch") {
  for (const DevicePolicy& policy : device_policies()) {
    const EvictionKernels kernels = observing_kernels(policy);
    CHECK(kernels.attention({}, nullptr) == cudaErrorInvalidValue);
    CHECK(kernels.attention_workspace({}, false) == 0);
  }
}

TEST_CASE("cache positions with rotated keys are refused if the kept tokens have gaps", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  EvictingBatch batch(kernels_of("h2o"), {.prompt = 5, .numbering = Positions::cache});
  CHECK(batch.enqueue_with_rotated_keys() == cudaErrorInvalidValue);
}
