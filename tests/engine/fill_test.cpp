// Tests the functions that fill arrays on the device, and the search for values that are not
// finite.
#include "engine/cuda/fill.hpp"

#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/cache/rope_rows.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/skip.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kSizes[] = {1, 31, 256, 1000, 100'003};

TEST_CASE("slots are numbered, and nothing behind them is written", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::size_t size : kSizes) {
    const DeviceArray<std::int32_t> to(std::vector<std::int32_t>(size + 1, -7));
    const Stream stream;
    check_cuda(kernels::fill_iota(to.data(), static_cast<int>(size), stream.get()));
    std::vector<std::int32_t> expected(size + 1, -7);
    std::iota(expected.begin(), expected.end() - 1, 0);
    CHECK(to.to_host() == expected);
  }
}

TEST_CASE("a RoPE table has the cosines and sines of its positions, plain and captured", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const std::vector<float> inv_freq{1.0f, 0.31f, 0.0017f};
  const std::vector<std::int32_t> positions{0, 5, -1, 131'071, 1 << 20};
  constexpr float kFactor = 1.25f;
  const int half = static_cast<int>(inv_freq.size()), rows = static_cast<int>(positions.size());
  const DeviceArray<float> frequencies(inv_freq);
  const DeviceArray<std::int32_t> at(positions);
  const DeviceArray<float2> table(inv_freq.size() * positions.size());
  for (const bool by_position : {true, false})
    for (const bool captured : {false, true}) {
      const auto fill = [&](cudaStream_t stream) {
        return kernels::fill_rope_rows(frequencies.data(), half, by_position ? at.data() : nullptr,
                                       100, rows, kFactor, table.data(), stream);
      };
      check_cuda(cudaMemset(table.data(), 0xff, inv_freq.size() * positions.size() * 8));
      if (captured) {
        CapturedGraph graph(fill);
        graph.launch();
        check_cuda(cudaDeviceSynchronize());
      } else {
        const Stream stream;
        check_cuda(fill(stream.get()));
      }
      const std::vector<float2> found = table.to_host();
      for (std::size_t i = 0; i < found.size(); ++i) {
        const std::size_t row = i / inv_freq.size();
        const double position = by_position ? std::max(positions[row], 0) : 100.0 + double(row);
        const double angle = position * static_cast<double>(inv_freq[i % inv_freq.size()]);
        CHECK(std::abs(found[i].x - std::cos(angle) * kFactor) < 1e-6);
        CHECK(std::abs(found[i].y - std::sin(angle) * kFactor) < 1e-6);
      }
    }
}

TEST_CASE("random fills depend on the seed alone, and have mean 0 and the deviation", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  constexpr std::size_t kCount = 100'003;
  const DeviceArray<float> first(kCount), again(kCount), other(kCount);
  const Stream stream;
  check_cuda(cuda::fill_normal(KVLAB_F32, first.data(), kCount, 0.5f, 7, stream.get()));
  check_cuda(cuda::fill_normal(KVLAB_F32, again.data(), kCount - 1, 0.5f, 7, stream.get()));
  check_cuda(cuda::fill_normal(KVLAB_F32, other.data(), kCount, 0.5f, 8, stream.get()));
  const std::vector<float> values = first.to_host();
  std::vector<float> repeated = again.to_host();
  CHECK(repeated.back() == 0);  // not part of the shorter fill
  repeated.back() = values.back();
  CHECK(repeated == values);
  CHECK(other.to_host() != values);
  double sum = 0, squares = 0;
  for (const float value : values) sum += value, squares += double{value} * value;
  CHECK(std::abs(sum / kCount) < 0.01);
  CHECK(std::abs(std::sqrt(squares / kCount) - 0.5) < 0.01);
}

TEST_CASE("a constant fill writes exactly its elements", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::size_t size : kSizes) {
    const DeviceArray<std::uint16_t> to(size + 1);
    const Stream stream;
    check_cuda(cuda::fill_value(KVLAB_BF16, to.data(), size, 1.0f, stream.get()));
    std::vector<std::uint16_t> expected(size + 1, 0x3f80);
    expected.back() = 0;
    CHECK(to.to_host() == expected);
  }
}

TEST_CASE("a value that is not finite is found at every place", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const auto has = [](const std::vector<float>& values, std::size_t count) {
    const DeviceArray<float> array(values);
    bool found = false;
    check_cuda(cuda::has_not_finite(KVLAB_F32, array.data(), count, found, nullptr));
    return found;
  };
  for (const std::size_t size : kSizes) {
    std::vector<float> values(size, std::numeric_limits<float>::max());
    CHECK_FALSE(has(values, size));
    for (const std::size_t at : {std::size_t{0}, size / 2, size - 1})
      for (const float wrong : {std::numeric_limits<float>::infinity(),
                                -std::numeric_limits<float>::infinity(), std::nanf("")}) {
        values[at] = wrong;
        CHECK(has(values, size));
        if (at == size - 1) CHECK_FALSE(has(values, size - 1));
        values[at] = 1;
      }
  }
  CHECK_FALSE(has({1}, 0));
}

}  // namespace
}  // namespace kvlab
