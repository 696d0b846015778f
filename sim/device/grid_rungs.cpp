#include "sim/device/grid_rungs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "kernels/host/transfer.hpp"

namespace kvlab {

using kernels::ReplayRule;

void GridRungs::add(const ResolvedConfig& config, std::uint32_t index, std::uint32_t budget,
                    ReplayRule& rule) {
  ways_.resize(std::max<std::size_t>(ways_.size(), own_ ? index + 1 : 1));
  const auto found = config.rungs.find(budget);
  if (found == config.rungs.end()) return;
  const std::vector<RungSlots>& ladder = found->second;
  if (ladder.size() > kernels::kMostReplayRungs)
    throw std::invalid_argument(fmt::format("ladder {}: on a device at most {} rungs",
                                            config.policy.ladder.text(),
                                            kernels::kMostReplayRungs));
  const auto [first, is_new] =
      first_.try_emplace(&ladder, static_cast<std::uint32_t>(rungs_.size()));
  rule.first_rung = first->second;
  rule.rungs = static_cast<std::uint32_t>(ladder.size());
  const bool staged = std::ranges::any_of(
      config.admissions, [](const Admission& admission) { return admission.tokens > 1; });
  rule.copies = staged ? 1 : 0;
  for (std::size_t r = 0; r < ladder.size(); ++r) {
    const std::uint32_t copy = copy_of(index, way_down(ladder, -1, static_cast<int>(r)));
    rule.copies |= 1u << copy;
    if (is_new) rungs_.push_back({ladder[r].slots, copy});
  }
}

std::uint32_t GridRungs::copy_of(std::uint32_t config, const Way& way) {
  if (way.empty()) return 0;
  std::vector<Way>& known = ways_[own_ ? config : 0];
  const auto found = std::ranges::find(known, way);
  const auto copy = static_cast<std::uint32_t>(found - known.begin() + 1);
  if (found == known.end()) known.push_back(way);
  if (copy > kernels::kMostReplayCopies)
    throw std::invalid_argument(
        fmt::format("ladders: {} ways down at once on a device; fewer ladders would fit", copy));
  return copy;
}

std::size_t GridRungs::copies() const {
  std::size_t most = 0;
  for (const auto& ways : ways_) most = std::max(most, ways.size());
  return most;
}

void GridRungs::send() {
  rungs_on_device_ = cuda::upload(rungs_, "the replay's grid");
  std::vector<kernels::ReplayWay> table(ways_.size() * copies());
  for (std::size_t c = 0; c < ways_.size(); ++c)
    for (std::size_t w = 0; w < ways_[c].size(); ++w)
      for (const KvForm* const form : ways_[c][w]) {
        kernels::ReplayWay& way = table[c * copies() + w];
        way.form[way.forms++] = {static_cast<std::uint8_t>(form->key_bits),
                                 static_cast<std::uint8_t>(form->value_bits), form->floating};
      }
  ways_on_device_ = cuda::upload(table, "the replay's grid");
}

}  // namespace kvlab
