#include "sim/device/sweep_tiers.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "kernels/host/transfer.hpp"

namespace kvlab {

using kernels::ReplayRule;

void SweepTiers::add(const ResolvedConfig& config, std::uint32_t index, std::uint32_t budget,
                     ReplayRule& rule) {
  paths_.resize(std::max<std::size_t>(paths_.size(), own_ ? index + 1 : 1));
  const auto found = config.tiers.find(budget);
  if (found == config.tiers.end()) return;
  const std::vector<TierSlots>& tier_plan = found->second;
  if (tier_plan.size() > kernels::kMaxReplayTiers)
    throw std::invalid_argument(
        fmt::format("tiers {}: a CUDA device supports at most {} tiers; use --device cpu",
                    config.policy.tier_plan.text(), kernels::kMaxReplayTiers));
  const auto [first, is_new] =
      first_.try_emplace(&tier_plan, static_cast<std::uint32_t>(tiers_.size()));
  rule.first_tier = first->second;
  rule.tiers = static_cast<std::uint32_t>(tier_plan.size());
  const bool staged =
      std::ranges::any_of(config.appends, [](const Append& append) { return append.tokens > 1; });
  rule.copies = staged ? 1 : 0;
  for (std::size_t r = 0; r < tier_plan.size(); ++r) {
    const std::uint32_t copy = copy_of(index, demotion_path(tier_plan, -1, static_cast<int>(r)));
    rule.copies |= 1u << copy;
    if (is_new) tiers_.push_back({tier_plan[r].slots, copy});
  }
}

std::uint32_t SweepTiers::copy_of(std::uint32_t config, const Path& path) {
  if (path.empty()) return 0;
  std::vector<Path>& known = paths_[own_ ? config : 0];
  const auto found = std::ranges::find(known, path);
  const auto copy = static_cast<std::uint32_t>(found - known.begin() + 1);
  if (found == known.end()) known.push_back(path);
  if (copy > kernels::kMaxReplayCopies)
    throw std::invalid_argument(fmt::format(
        "tiers: a CUDA device supports at most {} demotion paths at once; use fewer tier plans, or "
        "--device cpu",
        kernels::kMaxReplayCopies));
  return copy;
}

std::size_t SweepTiers::copies() const {
  std::size_t max_paths = 0;
  for (const auto& paths : paths_) max_paths = std::max(max_paths, paths.size());
  return max_paths;
}

void SweepTiers::send() {
  tiers_on_device_ = cuda::upload(tiers_, "the replay's sweep");
  std::vector<kernels::ReplayDemotionPath> table(paths_.size() * copies());
  for (std::size_t c = 0; c < paths_.size(); ++c)
    for (std::size_t w = 0; w < paths_[c].size(); ++w)
      for (const KvFormat& format : paths_[c][w]) {
        kernels::ReplayDemotionPath& path = table[c * copies() + w];
        path.format[path.formats++] = {static_cast<std::uint8_t>(format.key->bits),
                                       static_cast<std::uint8_t>(format.value->bits),
                                       format.key->encoding == Encoding::e4m3_block};
      }
  paths_on_device_ = cuda::upload(table, "the replay's sweep");
}

}  // namespace kvlab
