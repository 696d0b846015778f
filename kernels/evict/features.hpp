// The token features that are computed from keys and values (docs/reference/configurations.md), on
// the device. Their bits equal those of the host's FeatureMaker.
#pragma once

#include <algorithm>

#include "kernels/types.hpp"

namespace kvlab::kernels {

struct FeatureArgs : kvlab_feature_args {
  // [pair, dim]: values of one new token each; null: they are in the cache
  const void* values = nullptr;
};

inline bool has(const kvlab_feature_args& args, kvlab_feature feature) {
  return std::find(args.features, args.features + args.count, feature) !=
         args.features + args.count;
}
/// A block for each pair reads a key and a value once per feature. Each norm of a token is one
/// thread's sum over its elements, in order; key_cosine adds the tokens one after another.
/// value_out_norm1 is a separate launch with a block for up to eight tokens of a pair, which reads
/// the group's rows of W_o; it supports at most 16 query heads per KV head.
cudaError_t make_features(const FeatureArgs& args, cudaStream_t stream);

}  // namespace kvlab::kernels
