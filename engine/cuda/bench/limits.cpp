#include "engine/cuda/bench/limits.hpp"

#include <algorithm>

#include "engine/cuda/bench/bench_tools.hpp"
#include "engine/cuda/fill.hpp"
#include "kernels/host/product.hpp"

namespace kvlab::cuda {
namespace {

constexpr int kRepeats = 9;

}  // namespace

double read_bytes_per_second() {
  const std::size_t bytes =
      std::min<std::size_t>(std::size_t{4} << 30, memory_info().free / 2) / 4096 * 4096;
  const DeviceBuffer memory(bytes, "measuring the read bandwidth"), sink(256, "a sum");
  const Stream stream;
  check(
      fill_normal(kernels::Type::f32, memory.data(), bytes / sizeof(float), 1.0f, 1, stream.get()),
      "measuring the read bandwidth");
  const auto enqueue = [&] {
    check(read_all(memory.data(), bytes, sink.as<std::uint32_t>(), stream.get()),
          "measuring the read bandwidth");
  };
  return static_cast<double>(bytes) / median_milliseconds(stream.get(), enqueue, kRepeats) * 1e3;
}

double matrix_flops_per_second(kernels::Type type) {
  constexpr int size = 8192;
  const std::size_t count = std::size_t{size} * size, bytes = count * kernels::bytes_of(type);
  const DeviceBuffer a(bytes, "a product"), b(bytes, "a product"), c(bytes, "a product");
  const Stream stream;
  check(fill_normal(type, a.data(), count, 1.0f, 1, stream.get()), "measuring a product");
  check(fill_normal(type, b.data(), count, 1.0f, 2, stream.get()), "measuring a product");
  Products product;
  const auto enqueue = [&] {
    product({.type = type,
             .rows = size,
             .n = size,
             .k = size,
             .x = b.data(),
             .x_row = size,
             .w = a.data(),
             .w_row = size,
             .y = c.data(),
             .y_row = size,
             .output = ProductArgs::Output::type},
            stream.get());
  };
  return 2.0 * size * size * size / median_milliseconds(stream.get(), enqueue, kRepeats) * 1e3;
}

}  // namespace kvlab::cuda
