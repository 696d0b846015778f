// Compares the functions that assign tokens to tiers with the definition of the rule, for all small
// caches: all numbers of slots per tier, and all ways to distribute the tokens. Token i is the i-th
// victim.
#include "policies/rule/tier_assignment.hpp"

#include <numeric>
#include <vector>

#include "policies/tiers/tier_counts.hpp"
#include "tests/catch.hpp"

using namespace kvlab;

namespace {

struct SmallCache {
  std::vector<std::uint32_t> slots;  // [tier]
  std::vector<int> tiers;            // [token]: its tier; slots.size(): evicted

  int count() const { return static_cast<int>(slots.size()); }
  std::uint32_t live() const { return static_cast<std::uint32_t>(tiers.size()); }
  std::uint32_t budget() const { return std::accumulate(slots.begin(), slots.end(), 0u); }
  std::vector<TierLoad> loads() const {
    std::vector<TierLoad> loads;
    for (int tier = 0; tier < count(); ++tier)
      loads.push_back({static_cast<std::uint32_t>(std::count(tiers.begin(), tiers.end(), tier)),
                       slots[static_cast<std::size_t>(tier)]});
    return loads;
  }
  std::vector<EvictionCandidate> firsts() const {
    std::vector<EvictionCandidate> firsts(slots.size(), EvictionCandidate::none());
    for (int token = static_cast<int>(tiers.size()) - 1; token >= 0; --token)
      firsts[static_cast<std::size_t>(tiers[static_cast<std::size_t>(token)])] = {
          {0, static_cast<std::uint64_t>(token), 0}, token};
    return firsts;
  }
};

/// The definition: the tokens are assigned from the last victim to the first. Each gets a slot of
/// the highest tier that has a free slot and is not higher than the token's present tier.
/// `waiting`: extra slots of the first tier, which keeps one slot for the next token.
std::vector<int> assigned(const SmallCache& cache, std::uint32_t waiting) {
  std::vector<std::uint32_t> free = cache.slots;
  free[0] += waiting;
  --free[0];
  std::vector<int> to = cache.tiers;
  for (std::size_t token = to.size(); token-- > 0;) {
    while (to[token] < cache.count() && free[static_cast<std::size_t>(to[token])] == 0) ++to[token];
    if (to[token] < cache.count()) --free[static_cast<std::size_t>(to[token])];
  }
  return to;
}

/// Calls each(cache) for all caches of `count` tiers with at most `max_slots` slots each and
/// `tokens` tokens.
template <class Each>
void each_cache(int count, std::uint32_t max_slots, int tokens, Each each) {
  const auto next = [](auto& digits, auto first, auto end) {
    for (auto& digit : digits) {
      if (++digit < end) return true;
      digit = first;
    }
    return false;
  };
  SmallCache cache;
  cache.slots.assign(static_cast<std::size_t>(count), 0);
  do {
    if (cache.slots[0] == 0) continue;
    cache.tiers.assign(static_cast<std::size_t>(tokens), 0);
    do each(cache);
    while (next(cache.tiers, 0, count));
  } while (next(cache.slots, 0u, max_slots + 1));
}

template <class Each>
void each_small_cache(Each each) {
  for (int count = 1; count <= 3; ++count)
    for (int tokens = 1; tokens <= 6; ++tokens) each_cache(count, 3, tokens, each);
  each_cache(4, 2, 5, each);
}

/// The tiers of the tokens after the demotions of demotion_chain().
std::vector<int> after_chain(const SmallCache& cache) {
  const auto loads = cache.loads();
  const auto firsts = cache.firsts();
  std::vector<Demotion> chain(loads.size());
  const int moves = demotion_chain(loads.data(), firsts.data(), cache.count(), chain.data());
  std::vector<int> to = cache.tiers;
  for (int i = 0; i < moves; ++i) {
    const Demotion& move = chain[static_cast<std::size_t>(i)];
    to[static_cast<std::size_t>(firsts[static_cast<std::size_t>(move.from)].slot)] = move.to;
  }
  return to;
}

constexpr TierLoad kLoads[]{{2, 2}, {1, 1}, {0, 1}};
constexpr int evicted_on_two_tiers() {
  TierLoad two[]{kLoads[0], kLoads[1]};
  return static_cast<int>(assign_counts(two, 2, 0));
}
static_assert(evicted_on_two_tiers() == 1 && demotes_at_most_one(kLoads, 3));

}  // namespace

TEST_CASE("Assigning counts of tokens to tiers equals assigning the tokens") {
  std::size_t cases = 0, wrong = 0;
  each_small_cache([&](const SmallCache& cache) {
    for (const bool evicts : {false, true}) {
      const std::uint32_t waiting = waiting_tokens(cache.live(), cache.budget(), evicts);
      SmallCache after{cache.slots, assigned(cache, waiting)};
      auto loads = cache.loads();
      const std::uint32_t evicted = assign_counts(loads.data(), cache.count(), waiting);
      const auto gone = std::count(after.tiers.begin(), after.tiers.end(), cache.count());
      wrong += evicted != static_cast<std::uint32_t>(gone);
      const auto expected = after.loads();
      for (std::size_t tier = 0; tier < loads.size(); ++tier)
        wrong += loads[tier].tokens != expected[tier].tokens;
      ++cases;
    }
  });
  CHECK(wrong == 0);
  CHECK(cases > 100'000);
}

TEST_CASE("Surplus tokens wait in the first tier until an eviction") {
  each_small_cache([&](const SmallCache& cache) {
    const auto to = assigned(cache, waiting_tokens(cache.live(), cache.budget(), false));
    const auto loads = cache.loads();
    bool fits = true;  // a tier below the first never has more tokens than slots
    for (std::size_t tier = 1; tier < loads.size(); ++tier)
      fits &= loads[tier].tokens <= loads[tier].slots;
    if (fits && std::count(to.begin(), to.end(), cache.count()) > 0) FAIL("a token is evicted");
  });
}

TEST_CASE("A chain that demotes at most one token of each tier follows the definition") {
  std::size_t cases = 0, wrong = 0, evictions = 0;
  each_small_cache([&](const SmallCache& cache) {
    if (!demotes_at_most_one(cache.loads().data(), cache.count())) return;
    const std::vector<int> to = after_chain(cache);
    wrong += to != assigned(cache, 0);
    evictions += static_cast<std::size_t>(std::count(to.begin(), to.end(), cache.count()));
    ++cases;
  });
  CHECK(wrong == 0);
  CHECK(cases > 1000);
  CHECK(evictions > 100);
}

TEST_CASE("A chain of demotions reads no tier below the first with a free slot") {
  constexpr std::uint64_t kNone = ~std::uint64_t{0};
  const TierLoad loads[]{{1, 1}, {0, 1}, {1, 1}};
  const EvictionCandidate firsts[]{{{0, 5, 5}, 0}, {{2, kNone, 7}, 1}, {{0, 1, 1}, 2}};
  Demotion chain[3];
  REQUIRE(demotion_chain(loads, firsts, 3, chain) == 1);
  CHECK(chain[0].from == 0);
  CHECK(chain[0].to == 1);
}

TEST_CASE("TierCounts equal the counts of assigned tokens after each append") {
  for (const std::uint32_t every : {1u, 2u, 5u})
    for (std::uint32_t first = 1; first < 4; ++first)
      for (std::uint32_t second = 0; second < 4; ++second) {
        const Modifiers modifiers{.every = every};
        TierCounts counts({{.slots = first}, {.slots = second}, {.slots = 2}});
        SmallCache cache{{first, second, 2}, {}};
        for (int token = 0; token < 30; ++token) {
          CAPTURE(every, first, second, token);
          const bool evicts = modifiers.surplus(cache.live(), cache.budget(), false) > 0;
          const bool demotes = is_first_tier_full(cache.loads()[0], modifiers, false);
          CHECK(counts.needs_eviction(modifiers, cache.budget(), false) == (evicts || demotes));
          if (evicts || demotes)
            cache.tiers = assigned(cache, waiting_tokens(cache.live(), cache.budget(), evicts));
          const auto evicted = std::erase(cache.tiers, cache.count());
          CHECK(counts.evict_to_budget(modifiers, cache.budget(), false) == evicted);
          cache.tiers.push_back(0);  // the youngest token is the last victim
          counts.append(1);
          for (std::size_t tier = 0; tier < 3; ++tier)
            CHECK(counts.on(tier) == cache.loads()[tier].tokens);
        }
      }
}
