// Every policy of the registry (and the two of extended_registry.cmake) on the device, compared
// with the host bit for bit.
#include <random>

#include "policies/observation.hpp"
#include "tests/policies/probe_outcome.hpp"
#include "tests/policies/random_floats.hpp"
#include "tests/skip.hpp"

using namespace kvlab;

TEST_CASE("every policy whose hooks the device calls is compiled for it") {
  auto compiled = kernels::device_policies().begin();
  for (const PolicyEntry& entry : policy_catalogue()) {
    if (entry.has_order_hooks()) continue;
    REQUIRE(compiled != kernels::device_policies().end());
    CHECK(compiled->name == entry.info.name);
    CHECK(compiled->slot_bytes == entry.slot_bytes);
    ++compiled;
  }
  CHECK(compiled == kernels::device_policies().end());
}

TEST_CASE("a probe refuses an empty run before launching") {
  CHECK(run_probe(kernels::device_policies()[0], ProbeArgs{}, {}, nullptr) ==
        cudaErrorInvalidValue);
  CHECK(launch_observations(ObservationArgs{}, nullptr) == cudaErrorInvalidValue);
}

TEST_CASE("every policy gives the host's bits on the device", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const std::vector<Step> steps = make_steps();
  const std::vector<Observation> seen = make_observations(steps);
  const Stream stream;
  for (const kernels::DevicePolicy& policy : kernels::device_policies())
    DYNAMIC_SECTION(policy.name) {
      const PolicySpec spec = parse_policy(policy.name);
      const Outcome host = run_on_host(spec, steps, seen);
      DeviceRun run(policy, spec, steps, seen);
      check_cuda(run.enqueue(stream.get()));
      check_equal(run.take(), host);
    }
}

TEST_CASE("every policy's device code runs repeatedly in a captured graph", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const std::vector<Step> steps = make_steps();
  const std::vector<Observation> seen = make_observations(steps);
  for (const kernels::DevicePolicy& policy : kernels::device_policies())
    DYNAMIC_SECTION(policy.name) {
      const PolicySpec spec = parse_policy(policy.name);
      const Outcome host = run_on_host(spec, steps, seen);
      DeviceRun run(policy, spec, steps, seen);
      CapturedGraph graph([&](cudaStream_t stream) { return run.enqueue(stream); });
      for (int again = 0; again < 3; ++again) {
        graph.launch();
        check_equal(run.take(), host);
      }
    }
}

TEST_CASE("masses and requests have the host's bits on the device", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  constexpr std::uint32_t kCount = 100'000;
  std::mt19937_64 random(5);
  std::vector<float> weights, probabilities;
  for (std::uint32_t i = 0; i < kCount; ++i) {
    weights.push_back(random_weight(random));
    probabilities.push_back(random_probability(random));
  }
  const DeviceArray<float> device_weights(weights), device_probabilities(probabilities);
  const DeviceArray<std::uint64_t> masses(kCount);
  const DeviceArray<std::uint8_t> requests(kCount);
  const Stream stream;
  for (const double tau : {0.0, 0.01, 0.5, 1.0})
    for (const float largest : {1.0f, 0.37f, 1e-6f}) {
      const ObservationArgs run{.count = kCount,
                                .weights = device_weights.data(),
                                .probabilities = device_probabilities.data(),
                                .row_max = fixed_mass(1.0f, largest),
                                .threshold16 = request_threshold16(tau),
                                .masses = masses.data(),
                                .requests = requests.data()};
      check_cuda(launch_observations(run, stream.get()));
      const auto device_masses = masses.to_host();
      const auto device_requests = requests.to_host();
      std::uint32_t different = 0;
      for (std::uint32_t i = 0; i < kCount; ++i) {
        const std::uint64_t unweighted = fixed_mass(1.0f, probabilities[i]);
        if (device_masses[i] != fixed_mass(weights[i], probabilities[i]) ||
            (device_requests[i] != 0) != is_requested(unweighted, run.row_max, run.threshold16))
          ++different;
      }
      CHECK(different == 0);
    }
}
