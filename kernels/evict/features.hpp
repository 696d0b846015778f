// Computes on the device the token features that depend on keys and values
// (docs/reference/configurations.md). The results equal those of the host's FeatureMaker bit for
// bit.
#pragma once

#include <algorithm>

#include "kernels/types.hpp"

namespace kvlab::kernels {

struct FeatureArgs : kvlab_feature_args {
  // [pair, dim]: the value of each pair's one new token; null: values are in the cache
  const void* values = nullptr;
};

inline bool has(const kvlab_feature_args& args, kvlab_feature feature) {
  return std::find(args.features, args.features + args.count, feature) !=
         args.features + args.count;
}
/// Uses one thread block for each pair. For each feature, the block reads each new token's key or
/// value once. One thread computes each norm of a token, a sum over the elements in index order;
/// key_cosine adds the tokens' unit keys one after another. value_out_norm1 is a separate launch.
/// Each of its thread blocks handles up to eight tokens of a pair, and reads the group's part of
/// W_o. It supports up to 16 query heads per KV head.
cudaError_t make_features(const FeatureArgs& args, cudaStream_t stream);

}  // namespace kvlab::kernels
