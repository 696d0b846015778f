#include "policies/cache_config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <stdexcept>

namespace kvlab {
namespace {

/// The budgets by head of a pyramid or of a budget file. Empty if all heads start with the same
/// budget, which is also so with ada().
HeadBudgets budgets_by_head(const CacheConfig& config, std::uint32_t length,
                            const CacheShape& model) {
  const Budget& budget = config.budget;
  if (budget.is_even() || budget.split == Budget::Split::ada) return {};
  const std::string what = "budget " + budget.text();
  if (model.layers == 0)
    throw std::invalid_argument(
        what + ": differs by head, but the model is not known here; give one number of tokens");
  HeadBudgets heads = budget.heads;
  if (heads.empty()) {
    const std::uint32_t min_budget_tokens = config.policy.entry ? min_budget(config.policy) : 1;
    for (const std::uint32_t own : pyramid_budgets(budget.resolve(length, model.head_size), length,
                                                   min_budget_tokens, model.layers))
      heads.push_back({own});
  }
  check_shape(heads, model, what);
  for (auto& layer : heads) layer.resize(model.kv_heads, layer.front());
  return heads;
}

void check_protected_tokens(const ResolvedConfig& config) {
  for (std::size_t l = 0; l < config.head_budgets.size(); ++l)
    for (const std::uint32_t own : config.head_budgets[l]) try {
        if (own == kNoBudget) continue;
        resolve_protected_tokens(config.policy, own);
      } catch (const BudgetTooSmall& error) {
        throw BudgetTooSmall(
            fmt::format("budget {}: layer {}: {}", config.budget.text(), l, error.what()),
            error.remedy());
      }
}

/// For scope=layer: throws if heads of one layer have different budgets, because these heads keep
/// the same set of tokens.
void check_layers_even(const ResolvedConfig& config) {
  if (config.shares_slots())
    throw std::invalid_argument(
        fmt::format("budget {}: ada() divides a layer's slots among its heads, and scope=layer "
                    "makes them keep one set; leave out one of the two",
                    config.budget.text()));
  for (std::size_t layer = 0; layer < config.head_budgets.size(); ++layer)
    for (const std::uint32_t budget : config.head_budgets[layer])
      if (budget != config.head_budgets[layer].front())
        throw std::invalid_argument(fmt::format(
            "policy {}: under scope=layer the KV heads of a layer keep one set, and layer {} has "
            "budgets of {} and {} tokens; give the same to all heads of a layer",
            config.policy.name, layer, config.head_budgets[layer].front(), budget));
}

/// Inserts the layers with a sliding window into the budgets by head. The budget of all their heads
/// is the window.
void insert_windows(ResolvedConfig& config, const CacheShape& model) {
  HeadBudgets& heads = config.head_budgets;
  for (std::size_t layer = 0; !heads.empty() && layer < model.windows.size(); ++layer)
    if (model.windows[layer] > 0)
      heads.insert(heads.begin() + static_cast<std::ptrdiff_t>(layer),
                   std::vector(model.kv_heads, model.windows[layer]));
}

/// Refuses configurations that a tier plan does not support.
void check_tier_plan(const CacheConfig& config) {
  const auto refuse = [&](const char* why) {
    throw std::invalid_argument(fmt::format("policy {}: tiers {}: {}", config.policy.name,
                                            config.policy.tier_plan.text(), why));
  };
  if (!config.policy.entry) refuse("an oracle keeps all tokens in 16 bit; leave out the tier plan");
  if (config.positions == Positions::cache && config.policy.tier_plan.is_quantized())
    refuse("quantized keys need original positions; use --positions original");
  if (config.shares_slots()) refuse("ada() supports 16 bit only; give an even budget");
  if (config.evicts() && config.policy.tier_plan.is_kivi())
    refuse("this format keeps every token; use policy full");
  if (!config.evicts() && config.policy.tier_plan.tiers.size() > 1)
    refuse("full keeps every token on one tier; give one format");
  if (config.policy.centre == KeyCentre::none) return;
  if (config.policy.tier_plan.is_kivi())
    refuse("centre: this format has a minimum for each channel already; use centre=none");
  if (config.positions == Positions::cache)
    refuse("centre: cache positions change stored keys; use --positions original");
  if (config.policy.centre == KeyCentre::prompt && config.prefill.chunk > 0 &&
      config.prefill.chunk < kCentreKeys)
    refuse(
        "centre: the prompt's first chunk has fewer tokens than the 128 whose mean is the "
        "centre; use --prefill dense or chunk:128");
}

/// Throws unless the centre file has a vector for every KV head of the layers without a window.
void check_centre_file(const CentreSetting& centre, const CacheShape& model) {
  if (centre.kind != KeyCentre::constants) return;
  if (!centre.constants)
    throw std::invalid_argument(fmt::format(
        "centre {}: this command does not read centre files; use centre=prompt", centre.text()));
  const CentreConstants& own = *centre.constants;
  const bool fits = own.kv_heads == model.kv_heads && own.head_size == model.head_size;
  for (std::uint32_t layer = 0; layer < model.layers; ++layer) {
    if (!model.windows.empty() && model.windows[layer] > 0) continue;
    const std::uint32_t number = model.numbers.empty() ? layer : model.numbers[layer];
    if (fits && own.layers.contains(number)) continue;
    throw std::invalid_argument(fmt::format(
        "centre: {}: layer {} of the model needs vectors of shape [{}, {}], and the file has {}; "
        "make one for this model: `kvlab plan --trace TRACE --centre-out FILE`",
        centre.file, number, model.kv_heads, model.head_size,
        own.layers.contains(number) ? fmt::format("[{}, {}]", own.kv_heads, own.head_size)
                                    : "none"));
  }
}

/// Records the tier slots and returns the budget in tokens that they add up to.
std::uint32_t add_tier_slots(ResolvedConfig& config, const std::vector<TierSlots>& slots) {
  const std::uint32_t budget = tokens_of(slots);
  config.tiers.try_emplace(budget, slots);
  return budget;
}

void check_prompt(const CacheConfig& config) {
  const PolicySpec& policy = config.policy;
  if (!policy.prompt) return;
  const auto refuse = [&](const char* why) {
    throw std::invalid_argument(fmt::format("policy {}: prompt: {}", policy.name, why));
  };
  if (config.shares_slots())
    refuse("ada() does not support it, because every head keeps the prompt");
  if (!policy.tier_plan.is_plain()) refuse("the prompt is kept in 16 bit; leave out the tier plan");
  if (!policy.prompt_tokens) refuse("the prompt's length is not known here; use sinks=N");
}

/// Gives each layer without a window the slots of its format. All these layers hold the same number
/// of tokens, which is the largest number that fits into the bytes of all their budgets together.
void apply_formats_by_layer(ResolvedConfig& config, std::uint32_t length, const CacheShape& model) {
  const std::vector<KvFormat>& layers = config.policy.tier_plan.layers;
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument(fmt::format("policy {}: tiers {}: {}", config.policy.name,
                                            config.policy.tier_plan.text(), why));
  };
  if (model.layers == 0)
    refuse("the plan differs by layer, but the model is not known here; give one format");
  if (const std::uint32_t expected = model.policy_layers().layers; layers.size() != expected)
    refuse(fmt::format("has {} layers, but the model has {} layers without a window", layers.size(),
                       expected));
  if (!config.head_budgets.empty() || !config.budget.is_even())
    refuse("formats by layer need one budget for all heads; give a number, a share or bytes");
  std::uint32_t slots = kNoBudget / 2;
  if (config.evicts()) {
    constexpr std::uint64_t kExact = KvFormat{}.block_bytes();
    std::uint64_t bytes = config.budget_tokens * kExact;  // for one block of channels
    if (config.budget.in_bytes) {
      check_quantized_heads(model.head_size);
      bytes = config.budget.bytes_of(length, model.head_size) / (model.head_size / kQuantBlock);
    }
    const std::uint64_t centre = config.centre_tokens() * kExact;
    slots = config.policy.tier_plan.tokens_by_layer(bytes - std::min(bytes, centre));
    if (slots == 0)
      throw BudgetTooSmall(
          fmt::format("tiers {}: the budget is too small for one token in each layer; give more",
                      config.policy.tier_plan.text()),
          "");
    config.budget_tokens = slots;
  }
  auto format = layers.begin();
  for (std::uint32_t layer = 0; layer < model.layers; ++layer)
    config.layer_tiers.push_back({{config.window_of(layer) > 0 ? KvFormat{} : *format++, slots}});
}

/// Throws std::invalid_argument if the head size is not a multiple of the group size of a quanto
/// format in the plan.
void check_groups(const TierPlan& tier_plan, std::uint32_t head_size) {
  constexpr std::uint32_t kQuantoGroup = 64;
  for (const KvFormat& format : tier_plan.formats())
    for (const RowFormat* own : {format.key, format.value})
      if (own->encoding == Encoding::quanto && head_size % kQuantoGroup != 0)
        throw std::invalid_argument(
            fmt::format("tiers {}: {} has groups of {} elements, so it needs a head size that is a "
                        "multiple of {}, not {}; use another format",
                        tier_plan.text(), own->name, kQuantoGroup, kQuantoGroup, head_size));
}

/// Converts budgets in 16-bit tokens to the number of tokens that the tier plan holds in the same
/// number of bytes.
void apply_tier_plan(ResolvedConfig& config, std::uint32_t length, const CacheShape& model) {
  if (config.policy.tier_plan.is_plain()) return;
  check_tier_plan(config);
  check_centre_file(config.policy.centre, model);
  check_groups(config.policy.tier_plan, model.head_size);
  if (config.policy.tier_plan.is_by_layer()) return apply_formats_by_layer(config, length, model);
  const std::uint32_t head_size = model.head_size;
  if (!config.evicts()) {
    config.tiers[kNoBudget] = {{config.policy.tier_plan.tiers.front().format, kNoBudget / 2}};
    return;
  }
  const std::uint32_t centre_tokens = config.centre_tokens();
  const bool is_in_bytes = config.budget.in_bytes && config.budget.is_even();
  if (is_in_bytes) check_quantized_heads(head_size);
  const TierPlan& tier_plan = config.policy.tier_plan;
  const auto slots_of_tokens = [&](std::uint32_t tokens) {
    return tier_plan.slots_of_tokens(tokens - std::min(tokens, centre_tokens));
  };
  const auto slots_of_bytes = [&](std::uint64_t bytes) {
    const std::uint64_t centre = centre_tokens * kv_bytes_per_token(head_size);
    return tier_plan.slots(bytes - std::min(bytes, centre), head_size / kQuantBlock);
  };
  config.budget_tokens =
      add_tier_slots(config, is_in_bytes ? slots_of_bytes(config.budget.bytes_of(length, head_size))
                                         : slots_of_tokens(config.budget_tokens));
  for (auto& layer : config.head_budgets)
    for (std::uint32_t& own : layer)
      if (own != kNoBudget) own = add_tier_slots(config, slots_of_tokens(own));
}

}  // namespace

std::vector<CacheConfig> configs_that_fit(std::vector<CacheConfig> configs,
                                          const std::function<void(const CacheConfig&)>& check,
                                          const LeaveOut& leave_out) {
  std::exception_ptr first;
  std::vector<std::string> lines;
  const bool evicted = std::ranges::any_of(configs, &CacheConfig::evicts);
  std::erase_if(configs, [&](const CacheConfig& config) {
    try {
      check(config);
      return false;
    } catch (const BudgetTooSmall& error) {
      if (!first) first = std::current_exception();
      lines.push_back(fmt::format("left out at budget {}: {}{}", config.budget_text(), error.what(),
                                  error.remedy().empty() ? "" : "; " + error.remedy()));
      return true;
    }
  });
  const bool evicts = std::ranges::any_of(configs, &CacheConfig::evicts);
  if (first && (!leave_out || (evicted && !evicts))) std::rethrow_exception(first);
  if (leave_out) std::ranges::for_each(lines, leave_out);
  return configs;
}

std::vector<CacheConfig> put_full_first(std::vector<CacheConfig> configs) {
  const auto full = std::ranges::find_if(configs, &CacheConfig::is_full);
  if (full == configs.end())
    configs.insert(configs.begin(), CacheConfig{});
  else
    std::rotate(configs.begin(), full, full + 1);
  return configs;
}

CacheConfig CacheConfig::at_prompt(std::uint32_t tokens) const {
  CacheConfig known = *this;
  known.budget = budget.at_prompt(tokens);
  known.policy.prompt_tokens = tokens;
  return known;
}

ResolvedConfig ResolvedConfig::head_config(std::uint32_t layer, std::uint32_t kv_head) const {
  ResolvedConfig own = *this;
  if (!layer_tiers.empty()) {
    own.policy.tier_plan = {.tiers = {{layer_tiers.at(layer).front().format}}};
    own.layer_tiers.clear();
    own.tiers.clear();
    if (const auto* const slots = tiers_of(layer, budget_tokens)) own.tiers[budget_tokens] = *slots;
    if (own.tiers.empty()) own.policy.centre = {};
  }
  if (head_budgets.empty() || !evicts()) return own;
  own.budget_tokens = budget_of(layer, kv_head);
  if (exempts(layer)) {
    if (policy.entry) own.policy = parse_policy("full");
    own.positions = Positions::original;
    own.protected_tokens = {};
  } else if (policy.entry) {
    own.protected_tokens = resolve_protected_tokens(policy, own.budget_tokens);
  }
  own.head_budgets.clear();
  return own;
}

ResolvedConfig resolve(const CacheConfig& config, std::uint32_t length, std::uint32_t sequence,
                       const CacheShape& model) {
  ResolvedConfig resolved{config};
  resolved.sequence = sequence;
  const CacheShape policy_layers = model.policy_layers();
  if (policy_layers.layers < model.layers) resolved.windows = model.windows;
  if (config.evicts() && model.layers > 0 && policy_layers.layers == 0)
    throw std::invalid_argument(
        fmt::format("policy {}: every layer of the model has a sliding window, so the policy has "
                    "nothing to act on; use full",
                    config.policy.name));
  if (!config.evicts()) {
    apply_tier_plan(resolved, length, model);
    return resolved;
  }
  check_prompt(config);
  const std::uint32_t prompt = config.policy.protected_prompt_tokens();
  resolved.budget_tokens = config.budget_in_tokens(length, model.head_size) + prompt;
  resolved.head_budgets = budgets_by_head(config, length, policy_layers);
  resolved.requested_tokens = resolved.head_budgets.empty() ? resolved.budget_tokens - prompt
                                                            : mean_budget(resolved.head_budgets);
  for (auto& layer : resolved.head_budgets)
    for (std::uint32_t& own : layer)
      if (own != kNoBudget) own += prompt;
  for (const auto& layer : resolved.head_budgets)
    if (layer.front() != kNoBudget)
      resolved.budget_tokens = std::max(resolved.budget_tokens, std::ranges::max(layer));
  apply_tier_plan(resolved, length, model);
  if (!config.policy.entry) return resolved;
  resolved.protected_tokens = resolve_protected_tokens(config.policy, resolved.budget_tokens);
  check_protected_tokens(resolved);
  if (config.policy.modifiers.scope == Modifiers::Scope::layer) check_layers_even(resolved);
  insert_windows(resolved, model);
  return resolved;
}

void find_features(ResolvedConfig& config, std::span<const std::int32_t> prompt,
                   const CacheShape& model) {
  const PolicySpec& policy = config.policy;
  std::vector<std::string> names = policy.features;
  std::erase_if(names, built_in_feature);
  if (names.empty() || !policy.feature_source) return;
  if (!policy.modifiers.once)
    throw std::invalid_argument(
        fmt::format("policy {}: feature {}: decoded tokens have no such feature, so they cannot be "
                    "ranked; use {}:once",
                    policy.name, names.front(), policy.name));
  config.feature_reader = policy.feature_source->reader_of(prompt, std::move(names), model);
}

}  // namespace kvlab
