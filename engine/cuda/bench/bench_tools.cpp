#include "engine/cuda/bench/bench_tools.hpp"

#include <stdexcept>

#include "engine/backend.hpp"

namespace kvlab {

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

}  // namespace kvlab
