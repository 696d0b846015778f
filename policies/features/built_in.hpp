// The features that are computed: from keys and values, and of the model no more than W_o.
//
// Included by CUDA code: nothing here may allocate, throw or use the host's library.
#pragma once

namespace kvlab {

/// What is computed from a token's key, before RoPE, or its value.
enum class BuiltInFeature {
  key_norm,         ///< Euclidean norm of the key
  value_norm,       ///< of the value
  value_norm1,      ///< sum of the value's magnitudes
  key_cosine,       ///< of the key with the mean of the unit keys up to its own append's end
  value_out_norm1,  ///< sum over the group's query heads of the magnitudes of W_o times the value
};

}  // namespace kvlab
