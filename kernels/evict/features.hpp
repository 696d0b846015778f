// The features that are computed from keys and values (docs/reference/configurations.md), on the
// device, in the bits of the host's FeatureMaker.
#pragma once

#include <algorithm>

#include "kernels/types.hpp"

namespace kvlab::kernels {

struct FeatureArgs : kvlab_columns_args {
  const void* values = nullptr;  // [pair, dim]: those of one new token each; null: in the cache
};

inline bool has(const kvlab_columns_args& args, kvlab_column feature) {
  return std::find(args.features, args.features + args.count, feature) !=
         args.features + args.count;
}
/// A block for each pair, which reads a key and a value once for each feature. The norms of one
/// token take a thread's sum over its elements, in order; key_cosine adds up the tokens one after
/// another. value_out_norm1 takes a launch of its own, a block for up to eight tokens of a pair,
/// which reads the group's rows of W_o, and at most 16 query heads for a KV head.
cudaError_t make_features(const FeatureArgs& args, cudaStream_t stream);

}  // namespace kvlab::kernels
