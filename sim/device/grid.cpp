#include "sim/device/grid.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "kernels/host/transfer.hpp"
#include "policies/live_set.hpp"

namespace kvlab {

using kernels::ReplayArgs;
using kernels::ReplayRule;
using kernels::Type;

namespace {

/// Who is live depends on what is observed, how many are does not.
Grid::Counts counts_of(const ResolvedConfig& config) {
  const std::uint32_t budget = config.budget_tokens;
  Grid::Counts counts{};
  bool after_prompt = false;
  for (const Admission& admission : config.admissions) {
    const std::uint32_t leaving =
        budget == kNoBudget ? 0
                            : config.policy.modifiers.surplus(counts.live, budget, after_prompt);
    counts.evictions += leaving;
    counts.live += admission.tokens - leaving;
    counts.most_live = std::max(counts.most_live, counts.live);
    after_prompt = admission.ends_prompt;
  }
  return counts;
}

}  // namespace

std::uint32_t most_live(const ResolvedConfig& config) { return counts_of(config).most_live; }

namespace {

/// Configurations of one kind of positions by kReplayTile, -1 where there are no more.
std::vector<std::int32_t> sets_of(const std::vector<ReplayRule>& rules) {
  std::vector<std::int32_t> sets;
  for (const bool squeezed : {false, true}) {
    for (std::size_t c = 0; c < rules.size(); ++c)
      if (rules[c].squeezed == squeezed) sets.push_back(static_cast<std::int32_t>(c));
    while (sets.size() % kernels::kReplayTile != 0) sets.push_back(-1);
  }
  return sets;
}

std::uint32_t room_at(const ResolvedConfig& config) {
  const std::uint64_t live =
      std::uint64_t{config.budget_tokens} - 1 + config.policy.modifiers.every;
  return config.budget_tokens == kNoBudget || live >= kernels::kUnlimited
             ? kernels::kUnlimited
             : static_cast<std::uint32_t>(live);
}

bool looks_back(const Modifiers& modifiers) { return modifiers.once || modifiers.smooth > 0; }

/// Four classes for each doubling: a launch is laid out for its largest cache.
int size_class_of(std::uint32_t slots) {
  const int width = std::bit_width(std::max(slots, 8u) - 1);
  return 4 * width + static_cast<int>((slots - 1) >> (width - 3) & 3);
}

}  // namespace

Type type_of(const std::optional<Dtype>& rounding) {
  if (!rounding || *rounding == Dtype::f32) return Type::f32;
  return *rounding == Dtype::bf16 ? Type::bf16 : Type::f16;
}

Grid::Grid(std::span<const ResolvedConfig* const> configs, std::uint32_t tokens, bool walks_all,
           int own_units)
    : own_units_(own_units) {
  std::vector<ReplayRule> rules;
  std::vector<kernels::ReplayAdmission> admissions;
  std::vector<std::byte> params;
  for (const ResolvedConfig* resolved : configs) {
    const ResolvedConfig& config = *resolved;
    const PolicyEntry& policy = *config.policy.entry;
    const Counts counts = counts_of(config);
    const bool is_walked = walks_all || !is_window(config.policy);
    const std::uint32_t slots = is_walked ? counts.most_live : 0;
    rules.push_back({.rule = {config.budget_tokens, config.guards.sinks, config.guards.recent},
                     .modifiers = config.policy.modifiers,
                     .room_at = room_at(config),
                     .looks_back = looks_back(config.policy.modifiers),
                     .squeezed = config.positions == Positions::cache,
                     .seed = config.seed,
                     .first_slot = own_units ? 0 : unit_slots,
                     .slots = slots,
                     .params = static_cast<std::uint32_t>(params.size()),
                     .columns = add_columns(config),
                     .admissions = static_cast<std::uint32_t>(admissions.size()),
                     .admission_count = static_cast<std::uint32_t>(config.admissions.size())});
    squeezed |= rules.back().squeezed;
    unit_slots = own_units ? std::max<std::int64_t>(unit_slots, slots) : unit_slots + slots;
    slot_stride = std::max(slot_stride, static_cast<int>((policy.slot_bytes + 7) / 8 * 8));
    params.resize(params.size() + (policy.params_bytes + 15) / 16 * 16);
    if (policy.params_bytes)
      policy.write_params(config.policy.params, &params[rules.back().params]);
    for (const Admission& admission : config.admissions)
      admissions.push_back({admission.first, admission.tokens, admission.ends_prompt});
    admissions.push_back({tokens, 0});
    const auto index = static_cast<std::int32_t>(rules.size() - 1);
    if (is_walked) {
      add_member(config.policy.entry, rules.back().squeezed, index, slots);
    } else {
      windows.push_back(index);
      window_counts[index] = counts;
    }
  }
  const std::vector<std::int32_t> sets = sets_of(rules);
  tiles_ = static_cast<int>(sets.size()) / kernels::kReplayTile;
  sets_ = cuda::upload(sets, "the replay's grid");
  params.resize(params.size() + 16);  // never empty
  std::stable_sort(members.begin(), members.end(),
                   [](const Members& a, const Members& b) { return a.most_slots > b.most_slots; });
  windows_on_device = cuda::upload(windows, "the replay's grid");
  for (Members& m : members) m.on_device = cuda::upload(m.configs, "the replay's grid");
  rules_ = cuda::upload(rules, "the replay's grid");
  admissions_ = cuda::upload(admissions, "the replay's grid");
  params_ = cuda::upload(params, "the replay's grid");
}

void Grid::describe(ReplayArgs& args) const {
  args.rules = rules_.as<ReplayRule>();
  args.admissions = admissions_.as<kernels::ReplayAdmission>();
  args.params = params_.data();
  args.samples.sets = sets_.as<std::int32_t>();
  args.samples.tiles = tiles_;
  args.own_units = own_units_;
}

void Grid::add_member(const std::shared_ptr<const PolicyEntry>& policy, bool is_squeezed,
                      std::int32_t config, std::uint32_t slots) {
  const int size_class = own_units_ ? 0 : size_class_of(slots);
  auto found = std::find_if(members.begin(), members.end(), [&](const Members& m) {
    return m.policy == policy && m.squeezed == is_squeezed && m.size_class == size_class;
  });
  if (found == members.end())
    found = members.insert(found, Members{policy, is_squeezed, size_class, {}});
  found->configs.push_back(config);
  found->most_slots = std::max(found->most_slots, slots);
}

std::uint32_t Grid::add_columns(const ResolvedConfig& config) {
  const auto count = static_cast<std::uint32_t>(config.policy.columns.size());
  if (own_units_) column_count = std::max(column_count, count);
  if (own_units_ || count == 0) return 0;
  for (const Columns& known : columns)
    if (known.like->policy.columns == config.policy.columns &&
        known.like->prefill.chunk == config.prefill.chunk)
      return known.first;
  columns.push_back({&config, column_count});
  return std::exchange(column_count, column_count + count);
}

}  // namespace kvlab
