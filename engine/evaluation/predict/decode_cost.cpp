#include "engine/evaluation/predict/decode_cost.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "engine/checkpoint/weight_bytes.hpp"

namespace kvlab {

DecodeCost::DecodeCost(ModelConfig config, LinkRates link)
    : config_(std::move(config)),
      link_(std::move(link)),
      element_bytes_(bytes_of(config_.weights_dtype)),
      full_layers_(
          static_cast<std::uint32_t>(std::ranges::count(config_.rows, 0u, &RowSpec::window))) {
  if (full_layers_ == 0)
    throw std::invalid_argument(fmt::format(
        "{}: every layer has a sliding window, so its cache does not grow and nothing is fetched; "
        "give a model with layers that see all tokens",
        config_.name));
}

std::uint32_t DecodeCost::row_bytes() const {
  return static_cast<std::uint32_t>(2 * config_.head_size * element_bytes_);
}

double DecodeCost::token_bytes() const {
  return static_cast<double>(full_layers_) * config_.kv_heads * row_bytes();
}

double DecodeCost::weight_bytes() const { return kvlab::weight_bytes(config_, element_bytes_); }

double DecodeCost::window_bytes(std::uint32_t context) const {
  double tokens = 0;
  for (const RowSpec& row : config_.rows)
    if (row.window > 0) tokens += std::min(context, row.window);
  return tokens * config_.kv_heads * row_bytes();
}

double DecodeCost::index_bytes(const RefetchSetup& setup) const {
  return std::ceil(static_cast<double>(setup.context) / setup.page) * token_bytes();
}

double DecodeCost::full_sequence_bytes(std::uint32_t context) const {
  return context * token_bytes() + window_bytes(context);
}

double DecodeCost::refetch_sequence_bytes(const RefetchSetup& setup, std::uint32_t buffer) const {
  return std::min(buffer, setup.context) * token_bytes() + index_bytes(setup) +
         window_bytes(setup.context);
}

std::uint32_t DecodeCost::largest_batch(double device_bytes, double sequence_bytes) const {
  constexpr double kMaxBatch = 1 << 20;
  const double batch = std::floor((device_bytes - weight_bytes()) / sequence_bytes);
  return static_cast<std::uint32_t>(std::clamp(batch, 0.0, kMaxBatch));
}

double DecodeCost::full_seconds(std::uint32_t batch, std::uint32_t context) const {
  const double bytes =
      step_weight_bytes(config_, element_bytes_, batch) + batch * full_sequence_bytes(context);
  return bytes / link_.read_bytes_per_second;
}

double DecodeCost::refetch_read_bytes(std::uint32_t batch, const RefetchSetup& setup) const {
  const double sequence_bytes =
      setup.selected * token_bytes() + index_bytes(setup) + window_bytes(setup.context);
  return step_weight_bytes(config_, element_bytes_, batch) + batch * sequence_bytes;
}

double DecodeCost::fetched_rows(std::uint32_t batch, const RefetchSetup& setup,
                                double fetch_rate) const {
  return fetch_rate * setup.selected * config_.kv_heads * batch;
}

RefetchTime DecodeCost::refetch(std::uint32_t batch, const RefetchSetup& setup,
                                double fetch_rate) const {
  const double rows = fetched_rows(batch, setup, fetch_rate);
  return {.read_seconds = refetch_read_bytes(batch, setup) / link_.read_bytes_per_second,
          .fetch_seconds = full_layers_ * link_.fetch_seconds(rows, row_bytes()),
          .layer_seconds = full_layers_ * setup.layer_seconds};
}

std::optional<double> DecodeCost::break_even(std::uint32_t batch, const RefetchSetup& setup) const {
  const double full = full_seconds(batch, setup.context);
  const auto is_slower = [&](double rate) { return refetch(batch, setup, rate).serial() > full; };
  if (is_slower(0)) return std::nullopt;
  if (!is_slower(1)) return 1;
  // A higher fetch rate never makes the refetch step faster, so bisection finds the rate at which
  // both steps take the same time.
  double low = 0, high = 1;
  constexpr int kHalvings = 50;
  for (int i = 0; i < kHalvings; ++i) {
    const double middle = (low + high) / 2;
    (is_slower(middle) ? high : low) = middle;
  }
  return low;
}

}  // namespace kvlab
