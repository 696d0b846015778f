#include "policies/rule/live_tokens.hpp"

#include "policies/budgets/budget.hpp"
#include "policies/modifiers/modifiers.hpp"
#include "tests/catch.hpp"

using namespace kvlab;

namespace {

constexpr std::uint32_t kMax = ~0u;

/// The number of live tokens after evicting one by one.
std::uint32_t evicted_one_by_one(const Modifiers& modifiers, std::uint32_t live,
                                 std::uint32_t budget, bool after_prompt) {
  if (modifiers.once && !after_prompt) return live;
  if (live < budget - 1 + modifiers.every) return live;
  while (live > budget - 1) --live;
  return live;
}

constexpr LiveTokenCount appended_twice() {
  LiveTokenCount tokens;
  tokens.append(5);
  tokens.live -= tokens_to_evict(tokens.live, 4, 4);
  tokens.append(1);
  return tokens;
}
static_assert(appended_twice().live == 4 && appended_twice().before == 3 &&
              appended_twice().max_live == 5);

}  // namespace

TEST_CASE("The number of tokens to evict equals the number from evicting one by one") {
  for (std::uint32_t budget = 1; budget < 9; ++budget)
    for (std::uint32_t live = 0; live < 40; ++live)
      for (const std::uint32_t every : {1u, 2u, 3u, 16u, kMax})
        for (const bool once : {false, true})
          for (const bool after_prompt : {false, true}) {
            const Modifiers modifiers{.every = every, .once = once};
            CAPTURE(budget, live, every, once, after_prompt);
            const std::uint32_t left =
                every == kMax ? live : evicted_one_by_one(modifiers, live, budget, after_prompt);
            CHECK(live - modifiers.surplus(live, budget, after_prompt) == left);
            if (!once)
              CHECK(live - tokens_to_evict(live, budget, modifiers.evict_at(budget)) == left);
          }
}

TEST_CASE("Nothing is evicted without a budget") {
  for (const std::uint32_t live : {0u, 1u, 1u << 31, kNoBudget - 1}) {
    CHECK(Modifiers{}.surplus(live, kNoBudget, true) == 0);
    CHECK(tokens_to_evict(live, kNoBudget, Modifiers{.every = 7}.evict_at(kNoBudget)) == 0);
    CHECK(tokens_to_evict(live, 16, kMax) == 0);
    CHECK(live_before_append(live, kNoBudget) == live);
    CHECK(live_after_append(live, kNoBudget) == live);
  }
}

TEST_CASE("Eviction may start above the budget, but always leaves budget - 1 tokens") {
  CHECK(tokens_to_evict(10, 8, 11) == 0);
  CHECK(tokens_to_evict(11, 8, 11) == 4);
  CHECK(tokens_to_evict(7, 8, 3) == 0);  // fewer tokens than the budget are never evicted
}

TEST_CASE("The number of live tokens before an append equals the number from single appends") {
  for (std::uint32_t budget = 1; budget < 9; ++budget) {
    LiveTokenCount tokens;
    for (std::uint32_t fed = 0; fed < 40; ++fed) {
      CAPTURE(budget, fed);
      tokens.live -= Modifiers{}.surplus(tokens.live, budget, false);
      tokens.append(1);
      CHECK(live_before_append(fed, budget) == tokens.before);
      CHECK(live_after_append(fed + 1, budget) == tokens.live);
      CHECK(tokens.max_live == std::min(fed + 1, budget));
    }
  }
}
