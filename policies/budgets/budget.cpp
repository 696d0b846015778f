#include "policies/budgets/budget.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "policies/catalogue.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kPyramidBeta = 20;

}  // namespace

std::string Budget::text() const {
  if (all) return "all";
  if (!heads.empty() || !file.empty()) return file.empty() ? "by head" : "@" + file;
  switch (split) {
    case Split::even:
      break;
    case Split::pyramid:
      return fmt::format("pyramid({})", text_of(extent));
    case Split::ada:
      return fmt::format("ada({})", text_of(extent));
  }
  return text_of(extent);
}

std::uint32_t Budget::resolve(std::uint32_t length) const {
  return all ? length : std::max(1u, extent.resolve(length));
}

std::uint32_t mean_budget(const HeadBudgets& heads) {
  std::uint64_t sum = 0, count = 0;
  for (const auto& layer : heads) {
    for (const std::uint32_t own : layer) sum += own;
    count += layer.size();
  }
  return count == 0 ? 0 : static_cast<std::uint32_t>((2 * sum + count) / (2 * count));
}

Budget budget_of_heads(HeadBudgets heads, std::string file) {
  if (heads.empty()) throw std::invalid_argument(" holds no layers");
  for (std::size_t l = 0; l < heads.size(); ++l) {
    if (heads[l].empty() || heads[l].size() != heads.front().size())
      throw std::invalid_argument(
          fmt::format("[{}]: {} numbers; layer 0 has {}, and all layers should have as many", l,
                      heads[l].size(), heads.front().size()));
    if (const auto zero = std::ranges::find(heads[l], 0u); zero != heads[l].end())
      throw std::invalid_argument(fmt::format("[{}][{}]: should be a number of tokens, at least 1",
                                              l, zero - heads[l].begin()));
  }
  const std::uint32_t mean = mean_budget(heads);
  return {.extent = tokens(mean), .heads = std::move(heads), .file = std::move(file)};
}

void check_shape(const HeadBudgets& heads, HeadCounts model, const std::string& what) {
  const std::size_t own = heads.empty() ? 0 : heads.front().size();
  const bool fits = heads.size() == model.layers && (own == 1 || own == model.kv_heads);
  if (!fits || std::ranges::any_of(heads, [&](const auto& layer) { return layer.size() != own; }))
    throw std::invalid_argument(
        fmt::format("{}: budgets for {} layers x {} KV heads; the model has {} x {}", what,
                    heads.size(), own, model.layers, model.kv_heads));
}

std::vector<std::uint32_t> pyramid_budgets(std::uint32_t mean, std::uint32_t length,
                                           std::uint32_t least, std::uint32_t layers) {
  std::uint32_t last = std::min(mean, std::max(mean / kPyramidBeta, std::max(1u, least)));
  if (2 * std::uint64_t{mean} - last > length) last = 2 * mean - std::max(mean, length);
  // Layers as far from either end have twice the mean together.
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
