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
/// Uses one thread block for each pair, which reads a key and a value once per feature. Each norm
/// of a token is summed by one thread over its elements, in order; key_cosine adds the tokens one
/// after another. value_out_norm1 is a separate launch with one thread block for up to eight tokens
/// of a pair, which reads the group's rows of W_o. It supports up to 16 query heads per KV head.
cudaError_t make_features(const FeatureArgs& args, cudaStream_t stream);

}  // namespace kvlab::kernels
