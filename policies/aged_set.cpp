#include "policies/aged_set.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "policies/budgets/layer_budgets.hpp"

namespace kvlab {
AgedSet::AgedSet(const PolicySpec& spec, std::uint32_t budget, ProtectedTokens protected_tokens,
                 Identity identity)
    : AgedSet(*spec.entry, spec.packed_params(), spec.entry->info.evicts ? budget : kNoBudget,
              protected_tokens, identity, spec.features) {
  modifiers_ = spec.modifiers;
}

AgedSet::AgedSet(const PolicyOps& ops, std::vector<std::byte> params, std::uint32_t budget,
                 ProtectedTokens protected_tokens, Identity identity,
                 std::vector<std::string> features)
    : ops_(ops),
      params_(std::move(params)),
      budget_(budget),
      protected_tokens_(protected_tokens),
      identity_(identity),
      features_(std::move(features)) {
  const PolicyInfo& info = ops_.info;
  if (features_.empty()) features_.assign(info.features, info.features + info.feature_count());
}

Step AgedSet::step(std::uint32_t now, std::uint32_t queries) const {
  return {.now = now,
          .budget = budget_,
          .live = size_,
          .queries = queries,
          .seed = identity_.seed,
          .sequence = identity_.sequence,
          .layer = identity_.layer,
          .kv_head = identity_.kv_head};
}

bool AgedSet::has_state(std::size_t age, std::span<const std::byte> other) const {
  if (other.size() != ops_.slot_bytes) return false;
  if (other.empty()) return true;
  const auto own = state(age);
  std::vector<std::byte> one(own.begin(), own.end()), two(other.begin(), other.end());
  ops_.clear_padding(one.data());
  ops_.clear_padding(two.data());
  return one == two;
}

Ranks AgedSet::ranks(std::uint32_t now) const {
  Ranks ranks{.keys = std::vector<std::uint64_t>(size_)};
  ranks.type =
      ops_.rank(states_.data(), tokens(), size_, params_.data(), step(now, 0), ranks.keys.data());
  return ranks;
}

/// Applies the modifiers in order: scope, then smooth.
Ranks AgedSet::modified_ranks(std::uint32_t now) const {
  Ranks all;
  if (modifiers_.scope == Modifiers::Scope::head) {
    all = ranks(now);
  } else {
    if (!layer_)
      throw std::logic_error(
          "scope=layer: a KV head cannot evict to its budget without the other heads of its layer");
    all = layer_->at(now);
  }
  if (modifiers_.smooths(after_prompt_)) smooth_ranks(all, modifiers_.smooth, modifiers_.pool);
  return all;
}

void AgedSet::fill_keys(std::uint32_t now, std::vector<EvictionKey>& keys) const {
  const Ranks ranks = modified_ranks(now);
  keys.resize(size_);
  for (std::uint32_t i = 0; i < size_; ++i)
    keys[i] = protected_tokens_.key(ranks.keys[i], positions_[i], now);
}

std::vector<EvictionKey> AgedSet::eviction_keys(std::uint32_t now) const {
  std::vector<EvictionKey> keys;
  fill_keys(now, keys);
  return keys;
}

/// Range of ages of the unprotected tokens. By age, the sinks come before it and the recent tokens
/// after it.
std::pair<std::size_t, std::size_t> AgedSet::unprotected_range(std::uint32_t now) const {
  const auto protection_at = [&](std::size_t i) {
    return protected_tokens_.protection(positions_[i], now);
  };
  std::size_t first = std::min(protected_tokens_.sinks, size_);
  while (first > 0 && protection_at(first - 1) != 2) --first;  // some sinks may have been evicted
  // The search for the recent tokens starts here. Fewer than `recent` of them may be live, because
  // some are still to be appended and others may have been evicted.
  std::size_t last =
      std::max<std::size_t>(first, size_ - std::min(protected_tokens_.recent, size_));
  while (last < size_ && protection_at(last) == 0) ++last;
  while (last > first && protection_at(last - 1) != 0) --last;
  return {first, last};
}

/// If ranks are equal, chooses the oldest token.
std::span<const std::uint32_t> AgedSet::find_victim(std::uint32_t now) {
  auto [first, last] = unprotected_range(now);
  if (first == last && last < size_)
    last = size_;  // all tokens are protected: evict recent ones first
  else if (first == last)
    first = 0;
  const std::size_t victim =
      ops_.info.oldest_first  // tokens are sorted by position, which is the rank
          ? first
          : ops_.find_min_rank(states_.data(), tokens(), first, last, params_.data(), step(now, 0));
  victims_.assign(1, static_cast<std::uint32_t>(victim));
  return victims_;
}

std::span<const std::uint32_t> AgedSet::find_victims(std::uint32_t now) {
  if (shares_slots_ && after_prompt_) {
    if (!layer_budgets_)
      throw std::logic_error(
          "ada(): a KV head cannot evict to its budget without the other heads of its layer");
    budget_ = layer_budgets_->budget(*this, now);
  }
  const std::uint32_t num_evicted = surplus();
  victims_.clear();
  if (num_evicted == 0 && !needs_demotion()) return victims_;
  if (tier_plan_.size() > 1 && assign_one(now)) return victims_;
  fill_keys(now, keys_);
  victims_.resize(size_);
  std::iota(victims_.begin(), victims_.end(), 0u);
  if (tier_plan_.size() > 1) {
    assign_tiers(num_evicted > 0);
    return victims_;
  }
  const auto first = [&](std::uint32_t a, std::uint32_t b) { return keys_[a] < keys_[b]; };
  if (num_evicted == 1)
    victims_[0] = *std::min_element(victims_.begin(), victims_.end(), first);
  else
    std::nth_element(victims_.begin(), victims_.begin() + (num_evicted - 1), victims_.end(), first);
  victims_.resize(num_evicted);
  std::sort(victims_.begin(), victims_.end());
  return victims_;
}

/// Moves the token to a lower tier. If `tier` is one more than the last tier, the token is evicted.
void AgedSet::demote(std::uint32_t age, int tier) {
  --tier_loads_[tiers_[age]].tokens;
  tiers_[age] = static_cast<std::uint8_t>(tier);
  ++tier_loads_[tiers_[age]].tokens;
}

bool AgedSet::needs_demotion() const {
  return tier_plan_.size() > 1 && is_first_tier_full(tier_loads_[0], modifiers_, after_prompt_);
}

/// For each tier, the token that would be evicted from it first; none for an empty tier. The
/// candidate's `slot` is the token's age.
std::vector<EvictionCandidate> AgedSet::firsts(std::uint32_t now) const {
  std::vector<EvictionCandidate> firsts(tier_plan_.size(), EvictionCandidate::none());
  const Ranks ranks = modified_ranks(now);
  const auto [begin, end] = unprotected_range(now);
  for (auto age = static_cast<std::uint32_t>(begin); age < end; ++age) {
    EvictionCandidate& own = firsts[tiers_[age]];
    if (ranks.keys[age] < own.key.rank || own.slot < 0)
      own = {{0, ranks.keys[age], positions_[age]}, static_cast<int>(age)};
  }
  // If a tier has only protected tokens, its first victim is one of them. Then the loop below
  // compares all tokens by their complete keys, which include protection.
  bool held = false;
  for (std::size_t tier = 0; tier < firsts.size(); ++tier)
    held |= firsts[tier].slot < 0 && tier_loads_[tier].tokens > 0;
  for (std::uint32_t age = 0; held && age < size_; ++age) {
    EvictionCandidate& own = firsts[tiers_[age]];
    own = first_victim(
        own, {protected_tokens_.key(ranks.keys[age], positions_[age], now), static_cast<int>(age)});
  }
  return firsts;
}

/// A fast path of assign_tiers(): demotes at most one token from each tier. If a tier has to demote
/// more tokens, returns false and changes nothing.
bool AgedSet::assign_one(std::uint32_t now) {
  const int count = tier_count();
  if (!demotes_at_most_one(tier_loads_.data(), count)) return false;
  const std::vector<EvictionCandidate> first = firsts(now);
  std::array<Demotion, kMaxTiers> chain;
  const int moves = demotion_chain(tier_loads_.data(), first.data(), count, chain.data());
  for (const auto& [from, to] : std::span(chain).first(static_cast<std::size_t>(moves))) {
    const auto age = static_cast<std::uint32_t>(first[static_cast<std::size_t>(from)].slot);
    if (to == count)
      victims_.assign(1, age);
    else
      demote(age, to);
  }
  return true;
}

/// Assigns the tokens of victims_ to tiers, starting with the token that would be evicted last. The
/// tokens that get no slot remain in victims_.
void AgedSet::assign_tiers(bool evicts) {
  const std::uint32_t waiting = waiting_tokens(size_, budget_, evicts);
  std::vector<std::uint32_t> free_slots(static_cast<std::size_t>(tier_count()));
  for (int tier = 0; tier < tier_count(); ++tier) {
    const auto index = static_cast<std::size_t>(tier);
    free_slots[index] = tier_capacity(tier, tier_plan_[index].slots, waiting);
  }
  std::ranges::sort(victims_,
                    [&](std::uint32_t a, std::uint32_t b) { return keys_[b] < keys_[a]; });
  std::erase_if(victims_, [&](std::uint32_t age) {
    while (tiers_[age] < free_slots.size() && free_slots[tiers_[age]] == 0)
      demote(age, tiers_[age] + 1);
    if (tiers_[age] == free_slots.size()) return false;
    --free_slots[tiers_[age]];
    return true;
  });
  std::ranges::sort(victims_);
}

/// Describes the victim that comes last in the eviction order.
Eviction AgedSet::last_of(std::span<const std::uint32_t> victims) const {
  const std::uint32_t now = appended_first_ + appended_count_;
  const std::vector<EvictionKey> keys = eviction_keys(now);
  const std::uint32_t last = *std::ranges::max_element(
      victims, [&](std::uint32_t a, std::uint32_t b) { return keys[a] < keys[b]; });
  return {.rank = ranks(now).keys[last], .was_newest = positions_[last] == newest_};
}

/// If a token has been evicted since the last append, calls the hook evicted() for the `count`
/// tokens from `age` on. These tokens were appended in the place of the evicted token.
void AgedSet::take_place(std::size_t age, std::size_t count) {
  if (!eviction_) return;
  eviction_->is_new = true;
  ops_.evicted(slot(age), count, *eviction_, params_.data());
  eviction_.reset();
}

/// Calls the hook reorder() for every token, with the number of tokens that come before it in the
/// order of the policy's ranks.
void AgedSet::reorder(const Step& step) {
  const Ranks now = ranks(step.now);
  std::vector<std::uint32_t> ages(size_), order(size_);
  std::iota(ages.begin(), ages.end(), 0u);
  std::ranges::stable_sort(ages, {}, [&](std::uint32_t age) { return now.keys[age]; });
  for (std::uint32_t i = 0; i < size_; ++i) order[ages[i]] = i;
  ops_.reorder(states_.data(), order.data(), size_, params_.data(), step);
}

void AgedSet::evict(std::span<const std::uint32_t> ages) {
  if (ages.empty()) return;
  if (ops_.evicted) eviction_ = last_of(ages);
  if (!tiers_.empty())
    for (const std::uint32_t age : ages) --tier_loads_[tiers_[age]].tokens;
  std::size_t kept = ages.front();
  // Moves the tokens between two victims to lower ages.
  for (std::size_t v = 0; v < ages.size(); ++v) {
    const std::size_t from = std::size_t{ages[v]} + 1,
                      count = (v + 1 < ages.size() ? ages[v + 1] : size_) - from;
    std::memmove(positions_.data() + kept, positions_.data() + from, count * sizeof(std::uint32_t));
    if (ops_.slot_bytes > 0) std::memmove(slot(kept), slot(from), count * ops_.slot_bytes);
    if (!tiers_.empty()) std::memmove(tiers_.data() + kept, tiers_.data() + from, count);
    if (const std::size_t width = features_.size(); width > 0)
      std::memmove(feature_values_.data() + kept * width, feature_values_.data() + from * width,
                   count * width * sizeof(float));
    kept += count;
  }
  size_ = static_cast<std::uint32_t>(kept);
  evictions_ += ages.size();
  evicted_at_ = appended_first_ + appended_count_;
  if (eviction_) ops_.evicted(states_.data(), size_, *eviction_, params_.data());
}

std::string AgedSet::crop_obstacle(std::uint32_t tokens) const {
  const std::string name = ops_.info.name;
  if (tokens >= appended_first_ + appended_count_) return "";
  if (needs() != Needs::nothing)
    return "policy " + name + " has counted the attention of the tokens that would be removed";
  if (!features_.empty())
    return "policy " + name + " has computed features from the tokens that would be removed";
  if (tier_plan_.size() > 1 || is_quantized()) return "tokens have been quantized since then";
  if (evicted_at_ > tokens) return "tokens have been evicted since then";
  return "";
}

void AgedSet::drop_youngest(std::uint32_t count) {
  size_ -= count;
  appended_first_ = appended_first_ + appended_count_ - count;
  appended_count_ = 0;
}

void AgedSet::reserve(std::size_t count) {
  if (count <= positions_.size()) return;
  positions_.resize(count + count / 4);
  states_.resize(positions_.size() * ops_.slot_bytes);
  feature_values_.resize(positions_.size() * features_.size());
  if (tier_plan_.size() > 1) tiers_.resize(positions_.size());
}

void AgedSet::give_back() {
  positions_.resize(size_);
  states_.resize(size_ * ops_.slot_bytes);
  feature_values_.resize(size_ * features_.size());
  positions_.shrink_to_fit();
  states_.shrink_to_fit();
  feature_values_.shrink_to_fit();
  if (!tiers_.empty()) tiers_.resize(size_);
  victims_ = std::vector<std::uint32_t>();
  keys_ = std::vector<EvictionKey>();  // assigning {} would keep the memory
}

void AgedSet::append(std::uint32_t first, std::uint32_t count, const float* feature_values) {
  if (!features_.empty() && !feature_values)
    throw std::logic_error("a cache: tokens were appended without the features of the policy");
  reserve(std::size_t{size_} + count);
  const std::uint32_t old = size_;
  size_ += count;
  std::iota(positions_.begin() + old, positions_.begin() + size_, first);
  if (!tiers_.empty()) {
    std::fill_n(tiers_.begin() + old, count, std::uint8_t{0});
    tier_loads_[0].tokens += count;
  }
  if (!features_.empty())
    std::copy_n(feature_values, count * features_.size(),
                feature_values_.data() + old * features_.size());
  ops_.append(slot(old), tokens().from(old, features_.size()), count, params_.data(),
              step(first, count));
  take_place(old, count);
  newest_ = first + count - 1;
  live_max_ = std::max(live_max_, size_);
  appended_first_ = first;
  appended_count_ = count;
  after_prompt_ = false;
}

void AgedSet::bring_back(std::uint32_t position, std::uint32_t now, const float* feature_values) {
  if (!features_.empty() && !feature_values)
    throw std::logic_error("a cache: a token was fetched without the features of the policy");
  reserve(std::size_t{size_} + 1);
  const std::size_t width = features_.size(), bytes = ops_.slot_bytes;
  const auto age = static_cast<std::size_t>(std::ranges::lower_bound(positions(), position) -
                                            positions().begin());
  const std::size_t younger = size_ - age;
  std::uint32_t* const at = positions_.data() + age;
  std::memmove(at + 1, at, younger * sizeof(std::uint32_t));
  if (bytes > 0) std::memmove(slot(age + 1), slot(age), younger * bytes);
  if (width > 0) {
    float* const values = feature_values_.data() + age * width;
    std::memmove(values + width, values, younger * width * sizeof(float));
    std::copy_n(feature_values, width, values);
  }
  *at = position;
  ++size_;
  ops_.append(slot(age), tokens().from(age, width), 1, params_.data(), step(now, 1));
  take_place(age, 1);
  newest_ = position;
  live_max_ = std::max(live_max_, size_);
}

void AgedSet::observe(const Seen& seen) {
  if (needs() == Needs::nothing) return;
  const Step now = step(appended_first_, appended_count_);
  if (ops_.reorder) reorder(now);
  ops_.observe(states_.data(), seen, size_, params_.data(), now);
}

void AgedSet::observe(std::span<const Observation> seen, std::span<const std::uint64_t> heads) {
  if (needs() == Needs::nothing) return;
  const Step now = step(appended_first_, appended_count_);
  if (ops_.reorder) reorder(now);
  if (sees_heads())
    ops_.observe_heads(states_.data(), seen.data(), heads, size_, params_.data(), now);
  else
    ops_.observe_each(states_.data(), seen.data(), size_, params_.data(), now);
}

std::uint32_t tokens_before_gaps(std::span<const std::uint32_t> positions) {
  std::size_t old = positions.empty() ? 0 : positions.size() - 1;
  while (old > 0 && positions[old - 1] + 1 == positions[old]) --old;
  return static_cast<std::uint32_t>(old);
}

LiveSet::LiveSet(const PolicySpec& spec, std::uint32_t budget, Identity identity)
    : AgedSet(spec, budget,
              !spec.entry->info.evicts || budget == kNoBudget
                  ? ProtectedTokens{}
                  : resolve_protected_tokens(spec, budget),
              identity) {}

std::span<const std::uint32_t> LiveSet::evict_to_budget(std::uint32_t now) {
  const auto victims = find_victims(now);
  if (victims.empty()) return victims;
  std::size_t kept = victims.front(), next = 0;
  for (std::size_t age = kept; age < slots_.size(); ++age) {
    if (next < victims.size() && age == victims[next]) {
      free_.push_back(slots_[age]);
      ++next;
    } else {
      slots_[kept++] = slots_[age];
    }
  }
  slots_.resize(kept);
  evict(victims);
  return victims;
}

void LiveSet::append(std::uint32_t first, std::uint32_t count, const float* feature_values) {
  for (std::uint32_t i = 0; i < count; ++i) {
    if (free_.empty()) {
      slots_.push_back(slot_count_++);
    } else {
      slots_.push_back(free_.back());
      free_.pop_back();
    }
  }
  AgedSet::append(first, count, feature_values);
}

void LiveSet::crop(std::uint32_t tokens) {
  if (const std::string why = crop_obstacle(tokens); !why.empty())
    throw std::logic_error("crop: " + why);
  const auto youngest = std::ranges::lower_bound(positions(), tokens);
  const auto count = static_cast<std::uint32_t>(positions().end() - youngest);
  for (std::uint32_t i = 0; i < count; ++i) {
    free_.push_back(slots_.back());
    slots_.pop_back();
  }
  drop_youngest(count);
}

std::vector<std::uint32_t> LiveSet::renumber() {
  std::vector<std::uint32_t> before(slots_.size());
  std::iota(before.begin(), before.end(), 0u);
  before.swap(slots_);
  slot_count_ = size();
  free_ = std::vector<std::uint32_t>();
  give_back();
  return before;
}

}  // namespace kvlab
