// Every line of the registry (and the two of extended_registry.cmake) on the device against the
// host, bit for bit.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "kernels/policy_probe.hpp"
#include "policies/catalogue.hpp"
#include "policies/observation.hpp"
#include "tests/device.hpp"
#include "tests/policies/draw.hpp"
#include "tests/policies/random_floats.hpp"
#include "tests/skip.hpp"

using namespace kvlab;

namespace {

constexpr std::uint32_t kTokens = 1000, kSteps = 48;
constexpr Guards kGuards{.sinks = 4, .recent = 100};

/// What a probe computes, on the host or from the device.
struct Outcome {
  std::vector<std::uint64_t> ranks;        // [step, token]
  std::vector<std::uint32_t> leave_after;  // [step, token]
  std::vector<std::byte> slots;            // [token, slot_bytes]
  std::vector<float> weights;              // [token], by age

  bool operator==(const Outcome&) const = default;
};

std::vector<Step> make_steps() {
  std::vector<Step> steps;
  std::uint32_t now = kTokens - 1;
  for (std::uint32_t s = 0; s < kSteps; ++s) {
    steps.push_back({.now = now,
                     .budget = 128 + s,
                     .live = kTokens,
                     .queries = 1 + s % 5,
                     .seed = 42,
                     .sequence = 1,
                     .layer = s % 3,
                     .kv_head = 7});
    now += 1 + s % 5;
  }
  return steps;
}

std::vector<Observation> make_observations(std::span<const Step> steps) {
  std::vector<Observation> seen;
  for (const Step& step : steps)
    for (std::uint32_t i = 0; i < kTokens; ++i)
      seen.push_back(draw_observation(i, step.now, step.queries));
  return seen;
}

/// How many tokens leave before each, with these ranks.
void place(std::span<const std::uint64_t> ranks, std::uint32_t now,
           std::span<std::uint32_t> leave_after) {
  std::vector<std::uint32_t> order(ranks.size());
  std::iota(order.begin(), order.end(), 0u);
  std::ranges::sort(
      order, {}, [&](std::uint32_t i) { return std::tuple(kGuards.guard(i, now), ranks[i], i); });
  for (std::uint32_t i = 0; i < order.size(); ++i) leave_after[order[i]] = i;
}

Outcome run_on_host(const PolicySpec& spec, std::span<const Step> steps,
                    std::span<const Observation> seen) {
  const auto states = spec.entry->make_states(spec.params);
  std::vector<std::uint32_t> indices(kTokens);
  std::iota(indices.begin(), indices.end(), 0u);
  states->reserve(kTokens);
  Outcome out{.ranks = std::vector<std::uint64_t>(kSteps * kTokens),
              .leave_after = std::vector<std::uint32_t>(kSteps * kTokens),
              .slots = {},
              .weights = {}};
  for (const std::uint32_t i : indices) states->admit(i, Token{i}, steps[0]);
  for (std::uint32_t s = 0; s < kSteps; ++s) {
    const std::span ranks = std::span(out.ranks).subspan(s * kTokens, kTokens);
    states->observe(indices, seen.subspan(s * kTokens, kTokens), steps[s]);
    states->rank(indices, indices, steps[s], ranks);
    place(ranks, steps[s].now, std::span(out.leave_after).subspan(s * kTokens, kTokens));
  }
  for (const std::uint32_t i : indices) {
    const auto bytes = states->bytes(i);
    out.slots.insert(out.slots.end(), bytes.begin(), bytes.end());
    out.weights.push_back(i < states->tail() ? states->weight(i) : 0.0f);
  }
  return out;
}

/// A policy's device code with its inputs and outputs in device memory.
class DeviceRun {
 public:
  DeviceRun(const DeviceProbe& probe, const PolicySpec& spec, std::span<const Step> steps,
            std::span<const Observation> seen)
      : probe_(probe),
        params_(spec.params),
        steps_(steps),
        seen_(seen),
        slots_(kTokens * probe.slot_bytes) {}

  cudaError_t enqueue(cudaStream_t stream) const {
    const ProbeRun run{.tokens = kTokens,
                       .steps = kSteps,
                       .step = steps_.data(),
                       .seen = seen_.data(),
                       .guards = kGuards,
                       .ranks = ranks_.data(),
                       .leave_after = leave_after_.data(),
                       .slots = slots_.data(),
                       .weights = weights_.data()};
    return probe_.launch(run, params_, stream);
  }
  Outcome take() {
    Outcome out{.ranks = ranks_.to_host(),
                .leave_after = leave_after_.to_host(),
                .slots = slots_.to_host(),
                .weights = weights_.to_host()};
    ranks_.clear();
    leave_after_.clear();
    slots_.clear();
    weights_.clear();
    check_cuda(cudaDeviceSynchronize());
    return out;
  }

 private:
  const DeviceProbe& probe_;
  std::vector<double> params_;
  DeviceArray<Step> steps_;
  DeviceArray<Observation> seen_;
  DeviceArray<std::uint64_t> ranks_{kSteps * kTokens};
  DeviceArray<std::uint32_t> leave_after_{kSteps * kTokens};
  DeviceArray<std::byte> slots_;
  DeviceArray<float> weights_{kTokens};
};

void check_equal(const Outcome& device, const Outcome& host) {
  CHECK((device.ranks == host.ranks));
  CHECK((device.leave_after == host.leave_after));
  CHECK((device.slots == host.slots));
  CHECK((device.weights == host.weights));
}

}  // namespace

TEST_CASE("every policy of the catalogue is compiled for the device") {
  REQUIRE(device_probes().size() == policy_catalogue().size());
  for (std::size_t i = 0; i < device_probes().size(); ++i) {
    CHECK(device_probes()[i].name == policy_catalogue()[i].info.name);
    CHECK(device_probes()[i].slot_bytes == policy_catalogue()[i].slot_bytes);
  }
}

TEST_CASE("a probe refuses an empty run before launching") {
  CHECK(device_probes()[0].launch(ProbeRun{}, {}, nullptr) == cudaErrorInvalidValue);
  CHECK(launch_observations(ObservationRun{}, nullptr) == cudaErrorInvalidValue);
}

TEST_CASE("every policy does on the device what it does on the host, to the bit", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const std::vector<Step> steps = make_steps();
  const std::vector<Observation> seen = make_observations(steps);
  const Stream stream;
  for (const DeviceProbe& probe : device_probes()) DYNAMIC_SECTION(probe.name) {
      const PolicySpec spec = parse_policy(probe.name);
      const Outcome host = run_on_host(spec, steps, seen);
      DeviceRun run(probe, spec, steps, seen);
      check_cuda(run.enqueue(stream.get()));
      check_equal(run.take(), host);
    }
}

TEST_CASE("every policy's device code runs in a captured graph, again and again", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const std::vector<Step> steps = make_steps();
  const std::vector<Observation> seen = make_observations(steps);
  for (const DeviceProbe& probe : device_probes()) DYNAMIC_SECTION(probe.name) {
      const PolicySpec spec = parse_policy(probe.name);
      const Outcome host = run_on_host(spec, steps, seen);
      DeviceRun run(probe, spec, steps, seen);
      CapturedGraph graph([&](cudaStream_t stream) { return run.enqueue(stream); });
      for (int again = 0; again < 3; ++again) {
        graph.launch();
        check_equal(run.take(), host);
      }
    }
}

TEST_CASE("masses and requests are the same on the device, to the bit", "[gpu]") {
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
      const ObservationRun run{.count = kCount,
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
            (device_requests[i] != 0) != requested(unweighted, run.row_max, run.threshold16))
          ++different;
      }
      CHECK(different == 0);
    }
}
