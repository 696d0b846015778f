#include "engine/cuda/bench/bench_tools.hpp"

#include <algorithm>
#include <stdexcept>

#include "engine/backend.hpp"
#include "engine/bench_limits.hpp"
#include "engine/cuda/fill.hpp"
#include "kernels/host/product.hpp"

namespace kvlab {
namespace {

constexpr int kLimitRepeats = 9;
// Reads of this multiple of the L2 cache's size find almost none of the data in the L2 cache.
constexpr std::uint64_t kManyCaches = 16;
// Bytes that one timed run reads. If the memory is smaller, the run reads it several times, up to
// 64.
constexpr std::uint64_t kReadInARow = std::uint64_t{256} << 20;

std::uint64_t l2_bytes() {
  int device = 0, bytes = 0;
  cuda::check(cudaGetDevice(&device), "reading the size of the L2 cache");
  cuda::check(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device),
              "reading the size of the L2 cache");
  return static_cast<std::uint64_t>(bytes);
}

/// The rate, in bytes per second, of reading the same memory repeatedly. The memory has `wanted`
/// bytes or, if that is less, half as many as are free.
double read_bytes_per_second(std::uint64_t wanted, cuda::Caching caching) {
  constexpr const char* measuring = "measuring the read bandwidth";
  const std::size_t bytes =
      std::max<std::size_t>(std::min<std::size_t>(wanted, cuda::memory_info().free / 2) / 4096, 1) *
      4096;
  const auto repeats = std::clamp<std::uint64_t>(kReadInARow / bytes, 1, 64);
  const cuda::DeviceBuffer memory(bytes, measuring), sink(256, "a sum");
  const cuda::Stream stream;
  cuda::check(
      cuda::fill_normal(KVLAB_F32, memory.data(), bytes / sizeof(float), 1.0f, 1, stream.get()),
      measuring);
  const auto enqueue = [&] {
    for (std::uint64_t i = 0; i < repeats; ++i)
      cuda::check(
          cuda::read_all(memory.data(), bytes, caching, sink.as<std::uint32_t>(), stream.get()),
          measuring);
  };
  return static_cast<double>(bytes * repeats) /
         median_milliseconds(stream.get(), enqueue, kLimitRepeats) * 1e3;
}

}  // namespace

ReadLimits::ReadLimits()
    : l2_bytes_(l2_bytes()),
      memory_(read_bytes_per_second(std::uint64_t{4} << 30, cuda::Caching::stream)) {}

double ReadLimits::limit(std::uint64_t bytes) {
  if (bytes >= kManyCaches * l2_bytes_) return memory_;
  const auto [at, is_new] = measured_.try_emplace(bytes, memory_);
  if (is_new)
    for (const cuda::Caching caching : {cuda::Caching::keep, cuda::Caching::stream})
      at->second = std::max(at->second, read_bytes_per_second(bytes, caching));
  return at->second;
}

double ReadLimits::share(const std::string& what, std::uint64_t bytes, double milliseconds) {
  return share_of_limit(what, static_cast<double>(bytes) / (milliseconds * 1e-3), limit(bytes),
                        "bytes/s");
}

void refuse_without_device() {
  if (!has_cuda_device())
    throw std::runtime_error("no CUDA device on this machine, and bench measures the CUDA decoder");
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
