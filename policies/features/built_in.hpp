// The built-in features: computed from keys and values, and for one of them also from W_o.
//
// CUDA code includes this file, so it may not allocate, throw or call host-only library functions.
#pragma once

namespace kvlab {

/// Computed from a token's key before RoPE, or from its value.
enum class BuiltInFeature {
  key_norm,         ///< Euclidean norm of the key
  value_norm,       ///< Euclidean norm of the value
  value_norm1,      ///< sum of the absolute values of the value's elements
  key_cosine,       ///< cosine of the key with the mean unit key up to the end of its append
  value_out_norm1,  ///< sum of |W_o times the value| over outputs and the group's query heads
};

}  // namespace kvlab
