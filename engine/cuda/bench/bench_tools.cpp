#include "engine/cuda/bench/bench_tools.hpp"

#include <stdexcept>

#include "engine/backend.hpp"

namespace kvlab {

DeviceModel bench_model(const BenchModel& model) {
  if (!has_cuda_device())
    throw std::runtime_error("no CUDA device on this machine; bench measures the CUDA decoder");
  return model.random_weights.empty() ? DeviceModel::load(model.directory)
                                      : DeviceModel::random(model.random_weights);
}

std::vector<std::int32_t> bench_ids(std::size_t count, std::uint32_t vocab) {
  std::vector<std::int32_t> ids(count);
  for (std::size_t i = 0; i < count; ++i)
    ids[i] = static_cast<std::int32_t>((i * 2654435761u + 7) % vocab);
  return ids;
}

}  // namespace kvlab
