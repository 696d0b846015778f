// What the benchmarks share: a model, ids, what the GPU can do at most, times by its clock.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "engine/bench.hpp"
#include "engine/cuda/model/device_model.hpp"
#include "traces/base/json.hpp"

namespace kvlab {

/// Throws std::runtime_error.
void refuse_without_device();
/// A checkpoint's weights, or random ones; throws without a device, too.
DeviceModel bench_model(const BenchModel& model);
/// What stands first: the bench's name, what it is of, and where.
nlohmann::ordered_json bench_of(const char* name, const DeviceModel& model);
/// Any ids: a model's speed does not depend on them.
std::vector<std::int32_t> bench_ids(std::size_t count, std::uint32_t vocab);

/// How fast the device reads memory, in bytes per second. Whatever moves so many bytes again and
/// again is held to what reading as many takes: where they fit the L2 cache, or nearly, a part of
/// them is found there.
class ReadLimits {
 public:
  ReadLimits();

  /// Of memory that is much larger than the L2 cache.
  double memory() const { return memory_; }
  /// Of `bytes` that are read again and again; not less than of memory. Measured when first asked
  /// for.
  double of(std::uint64_t bytes);
  /// The share of that, of `bytes` moved in so long; see share_of_limit().
  double share(const std::string& what, std::uint64_t bytes, double milliseconds);

 private:
  std::uint64_t l2_bytes_;
  double memory_;
  std::map<std::uint64_t, double> measured_;
};
/// Operations per second of a large product of random matrices by cuBLASLt, sums in float32.
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

/// Of so many, or of one that is long; warmed up.
template <class Enqueue>
double median_milliseconds(cudaStream_t stream, Enqueue enqueue, int repeats = 5) {
  constexpr double is_long = 1000;
  const bool once = milliseconds_of(stream, enqueue) > is_long;
  std::vector<double> times;
  for (int i = 0; i < (once ? 1 : repeats); ++i) times.push_back(milliseconds_of(stream, enqueue));
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::ranges::nth_element(times, middle);
  return *middle;
}

}  // namespace kvlab
