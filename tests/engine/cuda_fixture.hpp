// The bundled model on both sides, for tests of the CUDA decoder.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "engine/backend.hpp"
#include "engine/checkpoint/model.hpp"
#include "engine/cuda/model/device_model.hpp"
#include "tests/skip.hpp"

namespace kvlab {

using Ids = std::vector<std::int32_t>;

inline const std::string kTiny = KVLAB_SOURCE_DIR "/engine/models/tiny";

inline bool no_device() {
  if (has_cuda_device()) return false;
  skip("no CUDA device");
  return true;
}

inline const Model& cpu_tiny() {
  static const Model model = Model::load(kTiny, 2);
  return model;
}

inline const DeviceModel& tiny(Dtype dtype) {
  static std::map<Dtype, DeviceModel> models;
  auto found = models.find(dtype);
  if (found == models.end()) found = models.emplace(dtype, DeviceModel::load(kTiny, dtype)).first;
  return found->second;
}

inline Ids some_ids(std::size_t count, std::int32_t vocab = 8192, std::int64_t first = 0) {
  Ids ids{0};
  while (ids.size() < count)
    ids.push_back(
        static_cast<std::int32_t>((static_cast<std::int64_t>(ids.size()) + first) * 7919 % vocab));
  return ids;
}

}  // namespace kvlab
