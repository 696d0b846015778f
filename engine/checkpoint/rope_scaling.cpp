#include "engine/checkpoint/rope_scaling.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <vector>
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

constexpr double kMaxFactor = 1e6, kMaxTheta = 1e15;
constexpr double kTiny = 1e-6;

using Frequencies = std::vector<double>;

/// theta^(-2i / head_size) for i in [0, head_size / 2).
Frequencies plain(double theta, std::uint32_t head_size) {
  Frequencies inv_freq(head_size / 2);
  for (std::size_t i = 0; i < inv_freq.size(); ++i)
    inv_freq[i] = std::pow(theta, -2.0 * static_cast<double>(i) / head_size);
  return inv_freq;
}

/// The length for which the model was trained. As in transformers, the key in the config itself
/// takes precedence over the key in the RoPE parameters.
double original_context(const JsonFields& config, const JsonFields& parameters) {
  constexpr std::string_view key = "original_max_position_embeddings";
  if (config.has(key) && parameters.has(key) && config.value(key) != parameters.value(key))
    config.refuse(key, "it must equal the value in the RoPE parameters");
  return (config.has(key) ? config : parameters).number(key, 1, kMaxContext);
}

void scale_linear(const JsonFields& parameters, Frequencies& inv_freq) {
  parameters.allow_only({"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"});
  const double factor = parameters.number("factor", 1, kMaxFactor);
  for (double& f : inv_freq) f /= factor;
}

/// Llama 3: divides low frequencies by the factor, keeps high ones, and interpolates between the
/// two.
void scale_llama3(const JsonFields& config, const JsonFields& parameters, Frequencies& inv_freq) {
  parameters.allow_only({"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor",
                         "low_freq_factor", "high_freq_factor",
                         "original_max_position_embeddings"});
  const double factor = parameters.number("factor", 1, kMaxFactor);
  const double low = parameters.number("low_freq_factor", kTiny, kMaxFactor);
  const double high = parameters.number("high_freq_factor", kTiny, kMaxFactor);
  if (high <= low) parameters.refuse("high_freq_factor", "it must exceed low_freq_factor");
  const double context = original_context(config, parameters);
  for (double& f : inv_freq) {
    const double waves =
        context * f / (2 * std::numbers::pi);  // rotations within the trained length
    const double keep = std::clamp((waves - low) / (high - low), 0.0, 1.0);
    f = (1 - keep) * f / factor + keep * f;
  }
}

/// YaRN's factor on cos and sin.
double yarn_attention_factor(const JsonFields& parameters, double factor) {
  if (parameters.has("attention_factor"))
    return parameters.number("attention_factor", kTiny, kMaxFactor);
  const auto magnitude = [&](double scale) {
    return factor <= 1 ? 1.0 : 0.1 * scale * std::log(factor) + 1.0;
  };
  const auto optional = [&](std::string_view key) {
    return parameters.has(key) ? parameters.number(key, 0, kMaxFactor) : 0.0;
  };
  const double mscale = optional("mscale"), all_dim = optional("mscale_all_dim");
  if (mscale > 0 && all_dim > 0) return magnitude(mscale) / magnitude(all_dim);
  return magnitude(1);
}

/// YaRN: keeps dimensions that rotate more than beta_fast times within the trained length, divides
/// those that rotate less than beta_slow times by the factor, and interpolates linearly between the
/// two. Returns the factor on cos and sin.
double scale_yarn(const JsonFields& config, const JsonFields& parameters, double theta,
                  std::uint32_t head_size, Frequencies& inv_freq) {
  parameters.allow_only({"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor",
                         "original_max_position_embeddings", "attention_factor", "beta_fast",
                         "beta_slow", "mscale", "mscale_all_dim", "truncate"});
  const double factor = parameters.number("factor", 1, kMaxFactor);
  const double context = original_context(config, parameters);
  const auto rotations = [&](std::string_view key, double if_absent) {
    return parameters.has(key) ? parameters.number(key, kTiny, kMaxFactor) : if_absent;
  };
  const double fast = rotations("beta_fast", 32), slow = rotations("beta_slow", 1);
  if (fast < slow) parameters.refuse("beta_fast", "it must be at least beta_slow");

  // The (fractional) dimension that rotates `count` times within the trained length.
  const auto dimension = [&](double count) {
    return head_size * std::log(context / (count * 2 * std::numbers::pi)) / (2 * std::log(theta));
  };
  double first = dimension(fast), last = dimension(slow);
  if (parameters.flag("truncate", true)) {
    first = std::floor(first);
    last = std::ceil(last);
  }
  first = std::max(first, 0.0);
  last = std::min(last, head_size - 1.0);
  if (first == last) last += 0.001;
  for (std::size_t i = 0; i < inv_freq.size(); ++i) {
    const double stretch = std::clamp((static_cast<double>(i) - first) / (last - first), 0.0, 1.0);
    inv_freq[i] = inv_freq[i] / factor * stretch + inv_freq[i] * (1 - stretch);
  }
  return yarn_attention_factor(parameters, factor);
}

/// The object with the RoPE parameters: `rope_parameters` or its entry for this kind of layers,
/// otherwise the older `rope_scaling`, otherwise an empty object.
JsonFields parameters_of(const JsonFields& config, const RopeKeys& keys) {
  static const nlohmann::json kNone = nlohmann::json::object();
  constexpr std::string_view newer = "rope_parameters";
  const bool has_older = !keys.scaling.empty() && config.has(keys.scaling);
  if (!config.has(newer))
    return has_older ? config.object(keys.scaling) : JsonFields(kNone, config.where());
  const JsonFields all = config.object(newer);
  if (!keys.kind.empty()) all.allow_only({"full_attention", "sliding_attention"});
  const JsonFields own = keys.kind.empty()    ? all
                         : all.has(keys.kind) ? all.object(keys.kind)
                                              : JsonFields(kNone, all.where());
  if (has_older && config.value(keys.scaling) != own.json())
    config.refuse(keys.scaling, "it must equal rope_parameters, or be left out");
  return own;
}

std::string rope_type(const JsonFields& parameters) {
  const bool older = parameters.has("type"), newer = parameters.has("rope_type");
  if (older && newer && parameters.value("type") != parameters.value("rope_type"))
    parameters.refuse("type", "it must equal rope_type, or be left out");
  return newer ? parameters.text("rope_type") : older ? parameters.text("type") : "default";
}

double rope_theta(const JsonFields& config, const JsonFields& parameters, const RopeKeys& keys) {
  constexpr std::string_view newer = "rope_theta";
  const bool has_newer = parameters.has(newer), has_older = config.has(keys.theta);
  if (has_older && has_newer && config.value(keys.theta) != parameters.value(newer))
    config.refuse(keys.theta, "it must equal the value in the RoPE parameters");
  if (has_newer) return parameters.number(newer, 1 + kTiny, kMaxTheta);
  return has_older ? config.number(keys.theta, 1 + kTiny, kMaxTheta) : keys.default_theta;
}

/// Number of dimensions of a head that are rotated.
std::uint32_t rotated_of(const JsonFields& reader, std::uint32_t head_size, bool partial) {
  constexpr std::string_view key = "partial_rotary_factor";
  if (!reader.has(key)) return head_size;
  const double share = reader.number(key, 0, 1);
  if (share != 1 && !partial)
    reader.refuse(key, "only heads that are rotated whole (1.0) are supported");
  const auto rotated = static_cast<std::uint32_t>(head_size * share);
  if (rotated < 2 || rotated % 2 != 0)
    reader.refuse(
        key, fmt::format("RoPE must rotate an even number of a head's {} dimensions", head_size));
  return rotated;
}

}  // namespace

ScaledRope read_rope(const JsonFields& config, std::uint32_t head_size, const RopeKeys& keys) {
  const JsonFields parameters = parameters_of(config, keys);
  const std::string type = rope_type(parameters);
  const double theta = rope_theta(config, parameters, keys);
  const std::uint32_t config_rotated = rotated_of(config, head_size, keys.partial),
                      rotated = parameters.has("partial_rotary_factor")
                                    ? rotated_of(parameters, head_size, keys.partial)
                                    : config_rotated;

  Frequencies inv_freq = plain(theta, rotated);
  double factor = 1;
  if (type == "default")
    parameters.allow_only({"rope_type", "type", "rope_theta", "partial_rotary_factor"});
  else if (type == "linear")
    scale_linear(parameters, inv_freq);
  else if (type == "llama3")
    scale_llama3(config, parameters, inv_freq);
  else if (type == "yarn")
    factor = scale_yarn(config, parameters, theta, rotated, inv_freq);
  else
    parameters.refuse(parameters.has("rope_type") ? "rope_type" : "type",
                      "supported types are default, linear, llama3 and yarn");

  ScaledRope scaled;
  scaled.rope.inv_freq.assign(inv_freq.begin(), inv_freq.end());
  scaled.rope.inv_freq.resize(head_size / 2);
  scaled.rotated = rotated;
  scaled.rope.factor = static_cast<float>(factor);
  scaled.config = parameters.json();
  scaled.config.erase("type");
  scaled.config["rope_type"] = type;
  scaled.config["rope_theta"] = theta;
  return scaled;
}

}  // namespace kvlab
