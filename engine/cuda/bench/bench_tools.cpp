#include "engine/cuda/bench/bench_tools.hpp"

#include <algorithm>
#include <stdexcept>

#include "engine/backend.hpp"
#include "engine/cuda/fill.hpp"
#include "kernels/host/product.hpp"

namespace kvlab {
namespace {

constexpr int kLimitRepeats = 9;

}  // namespace

void refuse_without_device() {
  if (!has_cuda_device())
    throw std::runtime_error("no CUDA device on this machine; bench measures the CUDA decoder");
}

DeviceModel bench_model(const BenchModel& model) {
  refuse_without_device();
  const auto& shape = model.random_weights;
  return shape.empty() ? DeviceModel::load(model.directory)
                       : DeviceModel::random(read_model_config(shape, shape.stem().string()));
}

nlohmann::ordered_json bench_of(const char* name, const DeviceModel& model) {
  return {{"bench", name},
          {"model", model.config().name},
          {"dtype", torch_name(model.dtype())},
          {"device", cuda::device_name()}};
}

std::vector<std::int32_t> bench_ids(std::size_t count, std::uint32_t vocab) {
  std::vector<std::int32_t> ids(count);
  for (std::size_t i = 0; i < count; ++i)
    ids[i] = static_cast<std::int32_t>((i * 2654435761u + 7) % vocab);
  return ids;
}

double read_bytes_per_second() {
  const std::size_t bytes =
      std::min<std::size_t>(std::size_t{4} << 30, cuda::memory_info().free / 2) / 4096 * 4096;
  const cuda::DeviceBuffer memory(bytes, "measuring the read bandwidth"), sink(256, "a sum");
  const cuda::Stream stream;
  cuda::check(
      cuda::fill_normal(KVLAB_F32, memory.data(), bytes / sizeof(float), 1.0f, 1, stream.get()),
      "measuring the read bandwidth");
  const auto enqueue = [&] {
    cuda::check(cuda::read_all(memory.data(), bytes, sink.as<std::uint32_t>(), stream.get()),
                "measuring the read bandwidth");
  };
  return static_cast<double>(bytes) / median_milliseconds(stream.get(), enqueue, kLimitRepeats) *
         1e3;
}

double matrix_flops_per_second(kernels::Type type) {
  constexpr int size = 8192;
  const std::size_t count = std::size_t{size} * size, bytes = count * kernels::bytes_of(type);
  const cuda::DeviceBuffer a(bytes, "a product"), b(bytes, "a product"), c(bytes, "a product");
  const cuda::Stream stream;
  cuda::check(cuda::fill_normal(type, a.data(), count, 1.0f, 1, stream.get()),
              "measuring a product");
  cuda::check(cuda::fill_normal(type, b.data(), count, 1.0f, 2, stream.get()),
              "measuring a product");
  cuda::Products product;
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
             .output = cuda::ProductArgs::Output::type},
            stream.get());
  };
  return 2.0 * size * size * size / median_milliseconds(stream.get(), enqueue, kLimitRepeats) * 1e3;
}

}  // namespace kvlab
