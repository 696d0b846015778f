// Converts config.json's description of RoPE to inverse frequencies and a factor.
#pragma once

#include <cstdint>

#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/base/numeric/rope.hpp"

namespace kvlab {

/// The largest context length that a config.json may state.
inline constexpr std::uint32_t kMaxContext = 1 << 28;

struct ScaledRope {
  Rope rope;  ///< inv_freq [head_size / 2], zeros for dimensions that are not rotated; factor on
              ///< cos and sin
  std::uint32_t rotated;  ///< rotated dimensions, the first ones of a checkpoint's heads
  nlohmann::json config;  ///< rope_type, rope_theta and the type's parameters, for people to read
};

/// The keys of config.json that describe the RoPE of one kind of layers.
struct RopeKeys {
  std::string_view theta = "rope_theta", scaling = "rope_scaling";  ///< keys of transformers 4
  std::string_view kind =
      {};  ///< kind of layers in `rope_parameters` of transformers 5; empty: all layers
  double default_theta = 10000;
  bool partial =
      false;  ///< whether partial_rotary_factor may say that only a part of a head is rotated
};

/// Reads a RoPE of type default, linear, llama3 or yarn from the keys `rope_theta` and
/// `rope_scaling` or from `rope_parameters`. Uses the formulas of transformers, computes in float64
/// and rounds once at the end. Throws std::runtime_error that names the file and the key for
/// another type, for a missing, superfluous or contradictory parameter, and for a number out of
/// range.
ScaledRope read_rope(const JsonFields& config, std::uint32_t head_size, const RopeKeys& keys = {});

}  // namespace kvlab
