#include "sim/device/sweep.hpp"

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

/// Maximum number of tokens that a KV head's cache holds at one time.
std::uint32_t max_live(const ResolvedConfig& config) {
  std::set<std::uint32_t> budgets{config.budget_tokens};
  for (const auto& layer : config.head_budgets) budgets.insert(layer.begin(), layer.end());
  std::uint32_t max_live = 0;
  for (const std::uint32_t budget : budgets)
    max_live = std::max(max_live, live_counts(config, 0, budget).max_live);
  return max_live;
}

bool looks_back(const Modifiers& modifiers) { return modifiers.once || modifiers.smooth > 0; }

/// The size class of a number of slots. There are four classes per power of two. Caches of very
/// different sizes should not share a launch, because the launch is sized for the largest of them.
int size_class_of(std::uint32_t slots) {
  const int width = std::bit_width(std::max(slots, 8u) - 1);
  return 4 * width + static_cast<int>((slots - 1) >> (width - 3) & 3);
}

}  // namespace

Type type_of(const std::optional<Dtype>& rounding) {
  if (!rounding || *rounding == Dtype::f32) return KVLAB_F32;
  return *rounding == Dtype::bf16 ? KVLAB_BF16 : KVLAB_F16;
}

DeviceSweep::DeviceSweep(std::span<const ResolvedConfig* const> configurations,
                         std::uint32_t tokens, bool walks_all, bool wants_fp16_copies,
                         int config_tasks)
    : configs(configurations.size()),
      fp16_copy(configurations.size(), -1),
      tiers(config_tasks > 0),
      config_tasks_(config_tasks) {
  for (const ResolvedConfig* resolved : configurations) {
    const ResolvedConfig& config = *resolved;
    const bool is_walked = walks_all || !is_window(config.policy);
    const auto index = static_cast<std::int32_t>(rules_.size());
    rules_.push_back(add_rule(config, is_walked));
    tiers.add(config, static_cast<std::uint32_t>(index), config.budget_tokens, rules_.back());
    if (is_walked) {
      add_member(config, index, rules_.back());
    } else {
      windows.push_back(index);
      window_configs[index] = resolved;
    }
  }
  std::stable_sort(members.begin(), members.end(),
                   [](const Members& a, const Members& b) { return a.max_slots > b.max_slots; });
  send(configurations, tokens);
  if (wants_fp16_copies) add_fp16_copies();
  send_sets();
  add_heads(configurations);
  tiers.send();
}

ReplayRule DeviceSweep::add_rule(const ResolvedConfig& config, bool is_walked) {
  const PolicyEntry& policy = *config.policy.entry;
  const std::uint32_t slots = is_walked ? max_live(config) : 0;
  const ReplayRule rule{
      .rule = {config.budget_tokens, config.protected_tokens.sinks, config.protected_tokens.recent},
      .modifiers = config.policy.modifiers,
      .evict_at = config.policy.modifiers.evict_at(config.budget_tokens),
      .looks_back = looks_back(config.policy.modifiers),
      .cache_positions = config.positions == Positions::cache,
      .seed = config.seed,
      .first_slot = config_tasks_ ? 0 : task_slots,
      .slots = slots,
      .num_appends = static_cast<std::uint32_t>(config.appends.size()),
      .fp16_copy = -1};
  cache_positions |= rule.cache_positions;
  task_slots = config_tasks_ ? std::max<std::int64_t>(task_slots, slots) : task_slots + slots;
  state_stride = std::max(state_stride, static_cast<int>((policy.slot_bytes + 7) / 8 * 8));
  first_features_.push_back(add_features(config));
  return rule;
}

/// Sends the data to which the rules point (appends and parameters) and the indices of
/// configurations.
void DeviceSweep::send(std::span<const ResolvedConfig* const> configurations,
                       std::uint32_t tokens) {
  std::vector<kernels::ReplayAppend> appends;
  std::vector<std::byte> params;
  std::vector<std::size_t> first_appends, first_params;
  for (const ResolvedConfig* config : configurations) {
    const PolicyEntry& policy = *config->policy.entry;
    first_appends.push_back(appends.size());
    for (const Append& append : config->appends)
      appends.push_back({append.first, append.tokens, append.ends_prompt});
    appends.push_back({tokens, 0});
    first_params.push_back(params.size());
    params.resize(params.size() + (policy.params_bytes + 15) / 16 * 16);
    if (policy.params_bytes)
      policy.write_params(config->policy.params, &params[first_params.back()]);
  }
  params.resize(params.size() + 16);  // so that params_ is never empty
  appends_ = cuda::upload(appends, "the replay's sweep");
  params_ = cuda::upload(params, "the replay's sweep");
  for (std::size_t c = 0; c < configurations.size(); ++c) {
    rules_[c].appends = appends_.as<kernels::ReplayAppend>() + first_appends[c];
    rules_[c].params = params_.data() + first_params[c];
  }
  windows_on_device = cuda::upload(windows, "the replay's sweep");
  for (Members& m : members) m.on_device = cuda::upload(m.configs, "the replay's sweep");
}

void DeviceSweep::add_fp16_copies() {
  for (std::size_t c = 0; c < fp16_copy.size(); ++c) {
    if (rules_[c].copies <= 1) continue;
    rules_[c].fp16_copy = fp16_copy[c] = static_cast<std::int32_t>(rules_.size());
    rules_.push_back(rules_[c]);
    rules_.back().copies = 0;
    first_features_.push_back(0);
  }
  configs = rules_.size();
}

/// If budgets differ by head, makes separate rules for each KV head of each layer, with the budget
/// of this head.
void DeviceSweep::add_heads(std::span<const ResolvedConfig* const> configurations) {
  const auto uneven = std::ranges::find_if(
      configurations, [](const ResolvedConfig* config) { return !config->head_budgets.empty(); });
  if (uneven == configurations.end()) return;
  const HeadBudgets& shape = (*uneven)->head_budgets;
  by_head_ = shape.front().size();
  const std::vector<ReplayRule> even = std::exchange(rules_, {});
  for (std::uint32_t layer = 0; layer < shape.size(); ++layer)
    for (std::uint32_t head = 0; head < by_head_; ++head)
      for (std::size_t c = 0; c < even.size(); ++c) {
        ReplayRule& own = rules_.emplace_back(even[c]);
        if (c >= configurations.size() || configurations[c]->head_budgets.empty() ||
            !configurations[c]->evicts())
          continue;
        const ResolvedConfig& config = *configurations[c];
        const std::uint32_t budget = config.budget_of(layer, head);
        const ProtectedTokens protected_tokens = resolve_protected_tokens(config.policy, budget);
        own.rule = {budget, protected_tokens.sinks, protected_tokens.recent};
        own.evict_at = config.policy.modifiers.evict_at(budget);
        tiers.add(config, static_cast<std::uint32_t>(c), budget, own);
      }
}

std::vector<ReplayRule> DeviceSweep::rules_of(const ModelShape& shape, std::uint32_t sequence,
                                              std::span<const HeadTask> tasks, std::size_t count,
                                              const float* features_on_device,
                                              std::size_t tokens) const {
  std::vector<ReplayRule> all;
  for (std::size_t u = 0; u < tasks.size(); ++u) {
    const std::size_t head = tasks[u].layer * by_head_ + tasks[u].kv_head,
                      first =
                          config_tasks_ ? u % count / static_cast<std::size_t>(config_tasks_) : 0;
    for (std::size_t c = first; c < (config_tasks_ ? first + 1 : configs); ++c) {
      ReplayRule& rule = all.emplace_back(rules_[(by_head_ ? head * configs : 0) + c]);
      rule.sequence = sequence;
      rule.layer = shape.number(tasks[u].layer);
      rule.kv_head = tasks[u].kv_head;
      rule.features =
          features_on_device + (u % count * feature_count + first_features_[c]) * tokens;
    }
  }
  return all;
}

/// Divides the configurations of each kind of positions into tiles of kReplayTile, padded with -1.
/// The tiles of configurations with quantization come last.
void DeviceSweep::send_sets() {
  std::vector<std::int32_t> sets;
  const auto add = [&](bool at_cache_positions, bool quantized) {
    for (std::size_t c = 0; c < rules_.size(); ++c)
      if (rules_[c].cache_positions == at_cache_positions && (rules_[c].copies > 1) == quantized)
        sets.push_back(static_cast<std::int32_t>(c));
    while (sets.size() % kernels::kReplayTile != 0) sets.push_back(-1);
    return static_cast<int>(sets.size()) / kernels::kReplayTile;
  };
  add(false, false);
  tiles_ = add(true, false);
  quantized_tiles_ = add(false, true) - tiles_;
  sets_ = cuda::upload(sets, "the replay's sweep");
}

void DeviceSweep::add_member(const ResolvedConfig& config, std::int32_t index,
                             const ReplayRule& rule) {
  using kernels::ReplayTokens;
  const PolicySpec& policy = config.policy;
  const Members::Kind kind{
      .policy = policy.entry,
      .tokens = rule.cache_positions ? ReplayTokens::cache_positions
                : rule.tiers > 0     ? ReplayTokens::tiered
                                     : ReplayTokens::exact,
      .largest =
          policy.modifiers.group == Modifiers::Group::max && needs_mass(policy.entry->info.needs),
      .by_layer = config.evicts() && policy.modifiers.scope == Modifiers::Scope::layer,
      .size_class = config_tasks_ ? 0 : size_class_of(rule.slots)};
  uses_tiers |= rule.tiers > 0;
  by_layer |= kind.by_layer;
  auto found = std::ranges::find(members, kind, &Members::kind);
  if (found == members.end()) found = members.insert(found, Members{kind});
  found->configs.push_back(index);
  found->max_slots = std::max(found->max_slots, rule.slots);
  found->max_tiers = std::max(found->max_tiers, rule.tiers);
}

std::uint32_t DeviceSweep::add_features(const ResolvedConfig& config) {
  const auto count = static_cast<std::uint32_t>(config.policy.features.size());
  if (config_tasks_) feature_count = std::max(feature_count, count);
  if (config_tasks_ || count == 0) return 0;
  for (const Features& known : features)
    if (known.like->policy.features == config.policy.features &&
        known.like->prefill.chunk == config.prefill.chunk)
      return known.first;
  features.push_back({&config, feature_count});
  return std::exchange(feature_count, feature_count + count);
}

}  // namespace kvlab
