#include "sim/access/key_quantization.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "policies/tiers/tier_plan.hpp"
#include "traces/base/numeric/quantize.hpp"
#include "traces/layer_ropes.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kAssessedTokens = 32;  // number of tokens whose keys are examined
// 4-bit keys count as safe up to this standard deviation of the errors of scores, in nats.
constexpr double kMaxMoved = 1;

/// Quantizes `keys` [token, dim], which are after RoPE, to 4 bits. This changes the products of the
/// keys and `query`. Returns the variance of these changes over the keys.
double quantization_variance(std::span<const float> keys, std::span<const float> query) {
  const std::size_t dim = query.size(), count = keys.size() / dim;
  double sum = 0, squares = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto key = keys.subspan(i * dim, dim);
    std::vector<float> quantized(key.begin(), key.end());
    hadamard_rotate(quantized);
    try {
      quantize_row(quantized, 4, false);
    } catch (const std::invalid_argument&) {  // thrown if a number exceeds the range of fp16
      return std::numeric_limits<double>::infinity();
    }
    hadamard_rotate(quantized);
    double change = 0;
    for (std::size_t d = 0; d < dim; ++d)
      change += static_cast<double>(query[d]) * (quantized[d] / kQuantBlock - key[d]);
    sum += change, squares += change * change;
  }
  const auto n = static_cast<double>(count);
  return std::max(0.0, squares / n - sum / n * (sum / n));
}

}  // namespace

std::vector<double> key_quantization_errors(const TraceReader& trace) {
  const ModelShape& shape = trace.shape();
  if (shape.head_size % kQuantBlock != 0 || !trace.has_tensors()) return {};
  const std::uint32_t count = std::min(kAssessedTokens, trace.tokens()),
                      first = trace.tokens() - count;
  const std::size_t dim = shape.head_size;
  const LayerRopes ropes(trace);
  std::vector<float> plain(count * dim), keys(plain.size()), query(dim);
  std::vector<double> errors;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    double variance = 0;
    for (std::uint32_t head = 0; head < shape.query_heads; ++head) {
      if (head % shape.group() == 0) {
        trace.read(Part::k, layer, head / shape.group(), first, count, plain.data());
        for (std::uint32_t i = 0; i < count; ++i)
          ropes[layer].rotate(&plain[i * dim], dim, first + i, &keys[i * dim]);
      }
      trace.read(Part::q, layer, head, first + count - 1, 1, plain.data());
      ropes[layer].rotate(plain.data(), dim, first + count - 1, query.data());
      variance += quantization_variance(keys, query) / shape.query_heads;
    }
    errors.push_back(std::sqrt(variance) * static_cast<double>(trace.row(layer).scale));
  }
  return errors;
}

std::string key_quantization_warning(const TraceReader& trace) {
  const std::vector<double> errors = key_quantization_errors(trace);
  if (errors.empty()) return "";
  std::vector<std::string> layers;
  TierPlan safe;
  for (const std::uint32_t layer : trace.layers_with_window(false)) {
    const bool is_safe = errors[layer] <= kMaxMoved;
    safe.layers.push_back(*find_kv_format(is_safe ? "4" : "8/4"));
    if (!is_safe)
      layers.push_back(fmt::format("{} (by {:.1f})", trace.shape().number(layer), errors[layer]));
  }
  if (layers.empty()) return "";
  return fmt::format(
      "4-bit keys move attention scores by more than {} nat in layers {}, usually because the key "
      "projection has a large bias; use 8 bits for keys in these layers (--tiers {}, on the CPU), "
      "let `kvlab plan` choose, or centre the keys with --centre prompt",
      kMaxMoved, fmt::join(layers, ", "), safe.text());
}

}  // namespace kvlab
