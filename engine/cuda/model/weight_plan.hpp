// Plans which tensors a model has, and where each is in the block of device memory.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "engine/cuda/model/device_model.hpp"

namespace kvlab {

enum class Initial { normal, ones, zeros };  ///< how random weights are initialized

/// Where a row's elements are in a checkpoint's tensor: the index of the first element, and the
/// distance between elements.
struct RowSource {
  std::size_t first, step;
};

struct WeightPart {
  std::string name;  // name in the checkpoint
  std::vector<std::size_t> shape;
  Initial initial;
  std::size_t offset;  ///< in bytes
  /// Where each row of the plan is in the checkpoint's tensor, if that tensor has another order or
  /// layout. Null: the rows follow one another as in the plan.
  std::function<RowSource(std::size_t row)> source = {};
  std::size_t columns = 0;  ///< columns of such a row

  std::size_t elements() const;
};

struct WeightPlan {
  std::vector<WeightPart> parts;
  std::size_t bytes = 0;
  DeviceWeights weights;  ///< pointers into the block; null if `base` is
};

/// Plans a model's weights. If `base` is null, only computes how many bytes they need.
WeightPlan plan_weights(const ModelConfig& config, Dtype dtype, std::byte* base);

}  // namespace kvlab
