// RoPE as config.json describes it, made data: inverse frequencies and a factor.
#pragma once

#include <cstdint>

#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/base/numeric/rope.hpp"

namespace kvlab {

/// Of positions that a config.json may speak of.
inline constexpr std::uint32_t kMaxContext = 1 << 28;

struct ScaledRope {
  Rope rope;              ///< inv_freq [head_size / 2], 0 behind what turns; factor on cos and sin
  std::uint32_t rotated;  ///< dimensions that turn, the first ones of a checkpoint's heads
  nlohmann::json config;  ///< rope_type, rope_theta and the type's parameters, for people
};

/// Where config.json says how layers of one kind turn.
struct RopeKeys {
  std::string_view theta = "rope_theta", scaling = "rope_scaling";  ///< of transformers 4
  std::string_view kind = {};  ///< whose parameters `rope_parameters` has; empty: all layers'
  double default_theta = 10000;
  bool partial = false;  ///< heads may turn in part, by partial_rotary_factor
};

/// Types default, linear, llama3 and yarn, by the formulas of transformers, in the layout with
/// `rope_theta` and `rope_scaling` or with `rope_parameters`. Computed in float64, rounded once.
/// Throws std::runtime_error that names the file and key: another type, a missing, extra or
/// contradictory parameter, a number out of range.
ScaledRope read_rope(const JsonFields& config, std::uint32_t head_size, const RopeKeys& keys = {});

}  // namespace kvlab
