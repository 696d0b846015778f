// Functions for budgets by head. The C library links this file too.
#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "policies/budgets/budget.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kPyramidBeta = 20;

}  // namespace

void check_shape(const HeadBudgets& heads, const CacheShape& model, const std::string& what) {
  const std::size_t own = heads.empty() ? 0 : heads.front().size();
  const bool fits = heads.size() == model.layers && (own == 1 || own == model.kv_heads);
  if (!fits || std::ranges::any_of(heads, [&](const auto& layer) { return layer.size() != own; }))
    throw std::invalid_argument(
        fmt::format("{}: budgets for {} layers x {} KV heads; the model has {} x {}", what,
                    heads.size(), own, model.layers, model.kv_heads));
}

std::vector<std::uint32_t> pyramid_budgets(std::uint32_t mean, std::uint32_t length,
                                           std::uint32_t min_budget, std::uint32_t layers) {
  std::uint32_t last = std::min(mean, std::max(mean / kPyramidBeta, std::max(1u, min_budget)));
  if (2 * std::uint64_t{mean} - last > length) last = 2 * mean - std::max(mean, length);
  // The budgets of two layers at equal distances from the two ends add up to twice the mean.
  const std::uint32_t fall = 2 * (mean - last);
  std::vector<std::uint32_t> budgets(layers, mean);
  for (std::uint32_t l = 0; l < layers / 2; ++l) {
    budgets[l] =
        2 * mean - last - static_cast<std::uint32_t>(std::uint64_t{fall} * l / (layers - 1));
    budgets[layers - 1 - l] = 2 * mean - budgets[l];
  }
  return budgets;
}

}  // namespace kvlab
