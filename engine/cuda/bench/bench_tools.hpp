// Helpers for benchmarks: a model, ids, limits of the GPU, and times by the device's clock.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "engine/bench.hpp"
#include "engine/cuda/model/device_model.hpp"
#include "traces/base/json.hpp"

namespace kvlab {

/// Throws std::runtime_error if there is no CUDA device.
void refuse_without_device();
/// Loads a checkpoint's weights or random ones. Throws std::runtime_error without a device.
DeviceModel bench_model(const BenchModel& model);
/// The first keys of a result: the name of the benchmark, the model and the device.
nlohmann::ordered_json bench_of(const char* name, const DeviceModel& model);
/// Some ids. A model's speed does not depend on them.
std::vector<std::int32_t> bench_ids(std::size_t count, std::uint32_t vocab);

/// How fast the device reads memory, in bytes per second. A launch that moves the same bytes
/// repeatedly is compared with a kernel that reads that many bytes repeatedly. This is fair: if the
/// bytes fit in the L2 cache, or nearly do, a part of them stays there in both cases.
class ReadLimits {
 public:
  ReadLimits();

  /// The rate for memory that is much larger than the L2 cache.
  double memory() const { return memory_; }
  /// The rate of reading `bytes` repeatedly; at least memory(). It is measured on the first call.
  double limit(std::uint64_t bytes);
  /// The rate of moving `bytes` in `milliseconds`, as a share of limit(bytes); see
  /// share_of_limit().
  double share(const std::string& what, std::uint64_t bytes, double milliseconds);

 private:
  std::uint64_t l2_bytes_;
  double memory_;
  std::map<std::uint64_t, double> measured_;
};
/// Operations per second of a large product of random matrices, computed by cuBLASLt with float32
/// sums.
double matrix_flops_per_second(kernels::Type type);

template <class Enqueue>
double milliseconds_of(cudaStream_t stream, Enqueue enqueue) {
  cuda::Event start(cuda::Event::Kind::timed), end(cuda::Event::Kind::timed);
  start.record(stream);
  enqueue();
  end.record(stream);
  end.wait("a benchmark");
  return static_cast<double>(end.since(start));
}

/// The median time of `repeats` runs after a warm-up run. If the warm-up run takes more than 1 s,
/// it is followed by one run only. Calls `prepare` before each run; its work is not part of the
/// time.
template <class Prepare, class Enqueue>
double median_milliseconds_after(cudaStream_t stream, Prepare prepare, Enqueue enqueue,
                                 int repeats) {
  constexpr double is_long = 1000;
  const auto run = [&] {
    prepare();
    return milliseconds_of(stream, enqueue);
  };
  const bool once = run() > is_long;
  std::vector<double> times;
  for (int i = 0; i < (once ? 1 : repeats); ++i) times.push_back(run());
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::ranges::nth_element(times, middle);
  return *middle;
}

/// Like median_milliseconds_after(), but without `prepare`.
template <class Enqueue>
double median_milliseconds(cudaStream_t stream, Enqueue enqueue, int repeats = 5) {
  return median_milliseconds_after(
      stream, [] {}, enqueue, repeats);
}

}  // namespace kvlab
