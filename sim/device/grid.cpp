#include "sim/device/grid.hpp"

#include <algorithm>
#include <bit>
#include <set>
#include <utility>

#include "kernels/host/transfer.hpp"
#include "policies/aged_set.hpp"

namespace kvlab {

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
  if (!rounding || *rounding == Dtype::f32) return KVLAB_F32;
  return *rounding == Dtype::bf16 ? KVLAB_BF16 : KVLAB_F16;
}

Grid::Grid(std::span<const ResolvedConfig* const> of, std::uint32_t tokens, bool walks_all,
           bool wants_twins, int config_units)
    : configs(of.size()),
      twin(of.size(), -1),
      rungs(config_units > 0),
      config_units_(config_units) {
  for (const ResolvedConfig* resolved : of) {
    const ResolvedConfig& config = *resolved;
    const bool is_walked = walks_all || !is_window(config.policy);
    const auto index = static_cast<std::int32_t>(rules_.size());
    rules_.push_back(add_rule(config, is_walked));
    rungs.add(config, static_cast<std::uint32_t>(index), config.budget_tokens, rules_.back());
    if (is_walked) {
      add_member(config, index, rules_.back());
    } else {
      windows.push_back(index);
      window_configs[index] = resolved;
    }
  }
  std::stable_sort(members.begin(), members.end(),
                   [](const Members& a, const Members& b) { return a.most_slots > b.most_slots; });
  send(of, tokens);
  if (wants_twins) add_twins();
  send_sets();
  add_heads(of);
  rungs.send();
}

ReplayRule Grid::add_rule(const ResolvedConfig& config, bool is_walked) {
  const PolicyEntry& policy = *config.policy.entry;
  const std::uint32_t slots = is_walked ? most_live(config) : 0;
  const ReplayRule rule{.rule = {config.budget_tokens, config.guards.sinks, config.guards.recent},
                        .modifiers = config.policy.modifiers,
                        .room_at = config.policy.modifiers.room_at(config.budget_tokens),
                        .looks_back = looks_back(config.policy.modifiers),
                        .squeezed = config.positions == Positions::cache,
                        .seed = config.seed,
                        .first_slot = config_units_ ? 0 : unit_slots,
                        .slots = slots,
                        .admission_count = static_cast<std::uint32_t>(config.admissions.size()),
                        .twin = -1};
  squeezed |= rule.squeezed;
  unit_slots = config_units_ ? std::max<std::int64_t>(unit_slots, slots) : unit_slots + slots;
  state_stride = std::max(state_stride, static_cast<int>((policy.slot_bytes + 7) / 8 * 8));
  first_columns_.push_back(add_columns(config));
  return rule;
}

/// What rules point to.
void Grid::send(std::span<const ResolvedConfig* const> of, std::uint32_t tokens) {
  std::vector<kernels::ReplayAdmission> admissions;
  std::vector<std::byte> params;
  std::vector<std::size_t> first_admissions, first_params;
  for (const ResolvedConfig* config : of) {
    const PolicyEntry& policy = *config->policy.entry;
    first_admissions.push_back(admissions.size());
    for (const Admission& admission : config->admissions)
      admissions.push_back({admission.first, admission.tokens, admission.ends_prompt});
    admissions.push_back({tokens, 0});
    first_params.push_back(params.size());
    params.resize(params.size() + (policy.params_bytes + 15) / 16 * 16);
    if (policy.params_bytes)
      policy.write_params(config->policy.params, &params[first_params.back()]);
  }
  params.resize(params.size() + 16);  // never empty
  admissions_ = cuda::upload(admissions, "the replay's grid");
  params_ = cuda::upload(params, "the replay's grid");
  for (std::size_t c = 0; c < of.size(); ++c) {
    rules_[c].admissions = admissions_.as<kernels::ReplayAdmission>() + first_admissions[c];
    rules_[c].params = params_.data() + first_params[c];
  }
  windows_on_device = cuda::upload(windows, "the replay's grid");
  for (Members& m : members) m.on_device = cuda::upload(m.configs, "the replay's grid");
}

void Grid::add_twins() {
  for (std::size_t c = 0; c < twin.size(); ++c) {
    if (rules_[c].copies <= 1) continue;
    rules_[c].twin = twin[c] = static_cast<std::int32_t>(rules_.size());
    rules_.push_back(rules_[c]);
    rules_.back().copies = 0;
    first_columns_.push_back(0);
  }
  configs = rules_.size();
}

/// The rules of each KV head of each layer with its own budget, where budgets are uneven.
void Grid::add_heads(std::span<const ResolvedConfig* const> of) {
  const auto uneven = std::ranges::find_if(
      of, [](const ResolvedConfig* config) { return !config->head_budgets.empty(); });
  if (uneven == of.end()) return;
  const HeadBudgets& shape = (*uneven)->head_budgets;
  by_head_ = shape.front().size();
  const std::vector<ReplayRule> even = std::exchange(rules_, {});
  for (std::uint32_t layer = 0; layer < shape.size(); ++layer)
    for (std::uint32_t head = 0; head < by_head_; ++head)
      for (std::size_t c = 0; c < even.size(); ++c) {
        ReplayRule& own = rules_.emplace_back(even[c]);
        if (c >= of.size() || of[c]->head_budgets.empty() || !of[c]->evicts()) continue;
        const ResolvedConfig& config = *of[c];
        const std::uint32_t budget = config.budget_of(layer, head);
        const Guards guards = resolve_guards(config.policy, budget);
        own.rule = {budget, guards.sinks, guards.recent};
        own.room_at = config.policy.modifiers.room_at(budget);
        rungs.add(config, static_cast<std::uint32_t>(c), budget, own);
      }
}

std::vector<ReplayRule> Grid::rules_of(const ModelShape& shape, std::uint32_t sequence,
                                       std::span<const ReplayUnit> units, std::size_t count,
                                       const float* columns_on_device, std::size_t tokens) const {
  std::vector<ReplayRule> all;
  for (std::size_t u = 0; u < units.size(); ++u) {
    const std::size_t head = units[u].layer * by_head_ + units[u].kv_head,
                      first =
                          config_units_ ? u % count / static_cast<std::size_t>(config_units_) : 0;
    for (std::size_t c = first; c < (config_units_ ? first + 1 : configs); ++c) {
      ReplayRule& rule = all.emplace_back(rules_[(by_head_ ? head * configs : 0) + c]);
      rule.sequence = sequence;
      rule.layer = shape.number(units[u].layer);
      rule.kv_head = units[u].kv_head;
      rule.columns = columns_on_device + (u % count * column_count + first_columns_[c]) * tokens;
    }
  }
  return all;
}

/// By kReplayTile of one kind, -1 where there are no more: those with codes last.
void Grid::send_sets() {
  std::vector<std::int32_t> sets;
  const auto add = [&](bool are_squeezed, bool coded) {
    for (std::size_t c = 0; c < rules_.size(); ++c)
      if (rules_[c].squeezed == are_squeezed && (rules_[c].copies > 1) == coded)
        sets.push_back(static_cast<std::int32_t>(c));
    while (sets.size() % kernels::kReplayTile != 0) sets.push_back(-1);
    return static_cast<int>(sets.size()) / kernels::kReplayTile;
  };
  add(false, false);
  tiles_ = add(true, false);
  coded_tiles_ = add(false, true) - tiles_;
  sets_ = cuda::upload(sets, "the replay's grid");
}

void Grid::add_member(const ResolvedConfig& config, std::int32_t index, const ReplayRule& rule) {
  using kernels::ReplayTokens;
  const PolicySpec& policy = config.policy;
  const Members::Kind kind{
      .policy = policy.entry,
      .tokens = rule.squeezed    ? ReplayTokens::squeezed
                : rule.rungs > 0 ? ReplayTokens::ladder
                                 : ReplayTokens::exact,
      .largest =
          policy.modifiers.group == Modifiers::Group::max && needs_mass(policy.entry->info.needs),
      .by_layer = config.evicts() && policy.modifiers.scope == Modifiers::Scope::layer,
      .size_class = config_units_ ? 0 : size_class_of(rule.slots)};
  on_rungs |= rule.rungs > 0;
  by_layer |= kind.by_layer;
  auto found = std::ranges::find(members, kind, &Members::kind);
  if (found == members.end()) found = members.insert(found, Members{kind});
  found->configs.push_back(index);
  found->most_slots = std::max(found->most_slots, rule.slots);
  found->most_rungs = std::max(found->most_rungs, rule.rungs);
}

std::uint32_t Grid::add_columns(const ResolvedConfig& config) {
  const auto count = static_cast<std::uint32_t>(config.policy.columns.size());
  if (config_units_) column_count = std::max(column_count, count);
  if (config_units_ || count == 0) return 0;
  for (const Columns& known : columns)
    if (known.like->policy.columns == config.policy.columns &&
        known.like->prefill.chunk == config.prefill.chunk)
      return known.first;
  columns.push_back({&config, column_count});
  return std::exchange(column_count, column_count + count);
}

}  // namespace kvlab
