// Which tensors a model has, and where each lies in the block of device memory.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "engine/cuda/model/device_model.hpp"

namespace kvlab {

enum class Initial { normal, ones, zeros };  ///< of random weights

/// Where a row's elements lie in a checkpoint's tensor: the first, and how far to the next.
struct RowSource {
  std::size_t first, step;
};

struct WeightPart {
  std::string name;  // as in the checkpoint
  std::vector<std::size_t> shape;
  Initial initial;
  std::size_t offset;  ///< bytes
  /// Rows that lie otherwise in the checkpoint; null: all is as it lies there.
  std::function<RowSource(std::size_t row)> source = {};
  std::size_t columns = 0;  ///< of such a row

  std::size_t elements() const;
};

struct WeightPlan {
  std::vector<WeightPart> parts;
  std::size_t bytes = 0;
  DeviceWeights weights;  ///< pointers into the block; null where `base` is
};

/// The plan of a model's weights; with a null `base` it says how many bytes they need.
WeightPlan plan_weights(const ModelConfig& config, Dtype dtype, std::byte* base);

}  // namespace kvlab
