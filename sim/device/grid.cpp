#include "sim/device/grid.hpp"

#include <algorithm>
#include <bit>
#include <set>
#include <utility>

#include "kernels/host/transfer.hpp"
#include "policies/aged_set.hpp"

namespace kvlab {

using kernels::ReplayArgs;
using kernels::ReplayRule;
using kernels::Type;

namespace {

/// The most tokens that a KV head's cache holds at once.
std::uint32_t most_live(const ResolvedConfig& config) {
  std::set<std::uint32_t> budgets{config.budget_tokens};
  for (const auto& layer : config.head_budgets) budgets.insert(layer.begin(), layer.end());
  std::uint32_t most = 0;
  for (const std::uint32_t budget : budgets)
    most = std::max(most, live_counts(config, budget).most);
  return most;
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

Grid::Grid(std::span<const ResolvedConfig* const> of, std::uint32_t tokens, bool walks_all,
           bool wants_twins, int own_units)
    : configs(of.size()), twin(of.size(), -1), rungs(own_units > 0), own_units_(own_units) {
  std::vector<ReplayRule> rules;
  std::vector<kernels::ReplayAdmission> admissions;
  std::vector<std::byte> params;
  for (const ResolvedConfig* resolved : of) {
    const ResolvedConfig& config = *resolved;
    const PolicyEntry& policy = *config.policy.entry;
    const bool is_walked = walks_all || !is_window(config.policy);
    const std::uint32_t slots = is_walked ? most_live(config) : 0;
    rules.push_back({.rule = {config.budget_tokens, config.guards.sinks, config.guards.recent},
                     .modifiers = config.policy.modifiers,
                     .room_at = config.policy.modifiers.room_at(config.budget_tokens),
                     .looks_back = looks_back(config.policy.modifiers),
                     .squeezed = config.positions == Positions::cache,
                     .seed = config.seed,
                     .first_slot = own_units ? 0 : unit_slots,
                     .slots = slots,
                     .params = static_cast<std::uint32_t>(params.size()),
                     .columns = add_columns(config),
                     .admissions = static_cast<std::uint32_t>(admissions.size()),
                     .admission_count = static_cast<std::uint32_t>(config.admissions.size()),
                     .rungs = 0,
                     .first_rung = 0,
                     .copies = 0,
                     .twin = -1});
    const auto index = static_cast<std::int32_t>(rules.size() - 1);
    rungs.add(config, static_cast<std::uint32_t>(index), config.budget_tokens, rules.back());
    squeezed |= rules.back().squeezed;
    unit_slots = own_units ? std::max<std::int64_t>(unit_slots, slots) : unit_slots + slots;
    slot_stride = std::max(slot_stride, static_cast<int>((policy.slot_bytes + 7) / 8 * 8));
    params.resize(params.size() + (policy.params_bytes + 15) / 16 * 16);
    if (policy.params_bytes)
      policy.write_params(config.policy.params, &params[rules.back().params]);
    for (const Admission& admission : config.admissions)
      admissions.push_back({admission.first, admission.tokens, admission.ends_prompt});
    admissions.push_back({tokens, 0});
    if (is_walked) {
      add_member(config, index, rules.back());
    } else {
      windows.push_back(index);
      window_configs[index] = resolved;
    }
  }
  if (wants_twins) add_twins(rules);
  send_sets(rules);
  params.resize(params.size() + 16);  // never empty
  std::stable_sort(members.begin(), members.end(),
                   [](const Members& a, const Members& b) { return a.most_slots > b.most_slots; });
  windows_on_device = cuda::upload(windows, "the replay's grid");
  for (Members& m : members) m.on_device = cuda::upload(m.configs, "the replay's grid");
  rules_ = cuda::upload(rules_by_head(rules, of), "the replay's grid");
  rungs.send();
  admissions_ = cuda::upload(admissions, "the replay's grid");
  params_ = cuda::upload(params, "the replay's grid");
}

void Grid::add_twins(std::vector<ReplayRule>& rules) {
  for (std::size_t c = 0; c < twin.size(); ++c) {
    if (rules[c].copies <= 1) continue;
    rules[c].twin = twin[c] = static_cast<std::int32_t>(rules.size());
    rules.push_back(rules[c]);
    rules.back().copies = 0;
  }
  configs = rules.size();
}

/// `rules`, of `of` and twins, for each KV head of each layer with its own budget; those themselves
/// where budgets are even.
std::vector<ReplayRule> Grid::rules_by_head(std::span<const ReplayRule> rules,
                                            std::span<const ResolvedConfig* const> of) {
  const auto uneven = std::ranges::find_if(
      of, [](const ResolvedConfig* config) { return !config->head_budgets.empty(); });
  if (uneven == of.end()) return {rules.begin(), rules.end()};
  const HeadBudgets& shape = (*uneven)->head_budgets;
  rule_heads_ = static_cast<int>(shape.front().size());
  std::vector<ReplayRule> all;
  const std::vector<std::uint32_t>& numbers = (*uneven)->layer_numbers;
  for (std::uint32_t layer = 0; layer < shape.size(); ++layer) {
    // By the layers' numbers, as units have them; nothing asks for those between.
    const std::size_t before = numbers.empty() ? layer : numbers[layer];
    all.resize(before * shape.front().size() * rules.size(), rules.front());
    for (std::uint32_t head = 0; head < shape[layer].size(); ++head)
      for (std::size_t c = 0; c < rules.size(); ++c) {
        ReplayRule& own = all.emplace_back(rules[c]);
        if (c >= of.size() || of[c]->head_budgets.empty() || !of[c]->evicts()) continue;
        const ResolvedConfig& config = *of[c];
        const std::uint32_t budget = config.budget_of(layer, head);
        const Guards guards = resolve_guards(config.policy, budget);
        own.rule = {budget, guards.sinks, guards.recent};
        own.room_at = config.policy.modifiers.room_at(budget);
        rungs.add(config, static_cast<std::uint32_t>(c), budget, own);
      }
  }
  return all;
}

/// By kReplayTile of one kind, -1 where there are no more: those with codes last.
void Grid::send_sets(std::span<const ReplayRule> rules) {
  std::vector<std::int32_t> sets;
  const auto add = [&](bool are_squeezed, bool coded) {
    for (std::size_t c = 0; c < rules.size(); ++c)
      if (rules[c].squeezed == are_squeezed && (rules[c].copies > 1) == coded)
        sets.push_back(static_cast<std::int32_t>(c));
    while (sets.size() % kernels::kReplayTile != 0) sets.push_back(-1);
    return static_cast<int>(sets.size()) / kernels::kReplayTile;
  };
  add(false, false);
  tiles_ = add(true, false);
  coded_tiles_ = add(false, true) - tiles_;
  sets_ = cuda::upload(sets, "the replay's grid");
}

void Grid::describe(ReplayArgs& args) const {
  args.rules = rules_.as<ReplayRule>();
  args.admissions = admissions_.as<kernels::ReplayAdmission>();
  args.params = params_.data();
  args.samples.sets = sets_.as<std::int32_t>();
  args.rule_configs = static_cast<int>(configs);
  args.rule_heads = rule_heads_;
  args.samples.tiles = tiles_;
  args.samples.coded_tiles = coded_tiles_;
  rungs.describe(args);
  args.own_units = own_units_;
}

void Grid::add_member(const ResolvedConfig& config, std::int32_t index, const ReplayRule& rule) {
  const PolicySpec& policy = config.policy;
  const Members::Kind kind{
      .policy = policy.entry,
      .squeezed = config.positions == Positions::cache,
      .largest =
          policy.modifiers.group == Modifiers::Group::max && needs_mass(policy.entry->info.needs),
      .by_layer = config.evicts() && policy.modifiers.scope == Modifiers::Scope::layer,
      .rungs = rule.rungs > 0,
      .size_class = own_units_ ? 0 : size_class_of(rule.slots)};
  on_rungs |= kind.rungs;
  by_layer |= kind.by_layer;
  auto found = std::ranges::find(members, kind, &Members::kind);
  if (found == members.end()) found = members.insert(found, Members{kind});
  found->configs.push_back(index);
  found->most_slots = std::max(found->most_slots, rule.slots);
  found->most_rungs = std::max(found->most_rungs, rule.rungs);
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
