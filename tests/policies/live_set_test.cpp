#include "policies/aged_set.hpp"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "tests/catch.hpp"

using namespace kvlab;

namespace {

/// A second implementation of the eviction rule, for a policy that ranks by accumulated mass. It
/// evicts one victim at a time.
class NaiveCache {
 public:
  NaiveCache(std::int64_t budget, std::int64_t sinks, std::int64_t recent)
      : budget_(budget), sinks_(sinks), recent_(recent) {}

  /// Returns the evicted positions.
  std::set<std::int64_t> evict_to_budget(std::int64_t now) {
    std::set<std::int64_t> left;
    while (static_cast<std::int64_t>(mass_.size()) > budget_ - 1) {
      auto victim = mass_.begin();
      for (auto it = mass_.begin(); it != mass_.end(); ++it)
        if (is_evicted_before(*it, *victim, now)) victim = it;
      left.insert(victim->first);
      mass_.erase(victim);
    }
    return left;
  }
  void append(std::int64_t first, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) mass_[first + i] = 0;
  }
  void observe(const std::vector<Observation>& seen) {
    std::size_t i = 0;
    for (auto& [position, mass] : mass_) mass += seen[i++].mass;
  }
  std::vector<std::uint32_t> positions() const {
    std::vector<std::uint32_t> result;
    for (const auto& [position, mass] : mass_)
      result.push_back(static_cast<std::uint32_t>(position));
    return result;
  }

 private:
  using Entry = std::pair<const std::int64_t, std::uint64_t>;  // position, mass

  bool is_evicted_before(const Entry& a, const Entry& b, std::int64_t now) const {
    const auto is_sink = [&](const Entry& e) { return e.first < sinks_; };
    const auto is_recent = [&](const Entry& e) { return e.first > now - recent_; };
    if (is_sink(a) != is_sink(b)) return is_sink(b);
    if (!is_sink(a) && is_recent(a) != is_recent(b)) return is_recent(b);
    if (a.second != b.second) return a.second < b.second;
    return a.first < b.first;
  }

  std::int64_t budget_, sinks_, recent_;
  std::map<std::int64_t, std::uint64_t> mass_;
};

/// Random observations with few different masses, so that ties are common.
std::vector<Observation> sample(std::size_t count, std::mt19937& random) {
  std::vector<Observation> seen(count);
  for (Observation& o : seen) o = {.mass = random() % 4, .queries = 1};
  return seen;
}

void check_slots(const LiveSet& live, std::uint32_t capacity) {
  REQUIRE(live.slots().size() == live.positions().size());
  const std::set<std::uint32_t> distinct(live.slots().begin(), live.slots().end());
  REQUIRE(distinct.size() == live.size());
  REQUIRE((distinct.empty() || *distinct.rbegin() < live.slot_count()));
  REQUIRE(live.slot_count() <= capacity);
}

std::set<std::int64_t> positions_at(std::span<const std::uint32_t> indices,
                                    const std::vector<std::uint32_t>& positions) {
  std::set<std::int64_t> result;
  for (const std::uint32_t i : indices) result.insert(positions[i]);
  return result;
}

struct Setting {
  std::uint32_t budget, sinks, recent;
};

LiveSet live_set(const Setting& s) {
  const auto spec =
      parse_policy("h2o:sinks=" + std::to_string(s.sinks) + ":recent=" + std::to_string(s.recent));
  return LiveSet(spec, s.budget, {});
}

/// Runs random appends of up to `max_append` tokens, and compares with the naive cache after each.
void compare(const Setting& setting, std::uint32_t max_append, std::uint32_t seed) {
  INFO("budget " << setting.budget << ", sinks " << setting.sinks << ", recent " << setting.recent
                 << ", appends of up to " << max_append << ", seed " << seed);
  std::mt19937 random(seed);
  LiveSet live = live_set(setting);
  NaiveCache naive(setting.budget, setting.sinks, setting.recent);
  std::uint64_t evictions = 0;
  std::uint32_t live_max = 0;
  for (std::uint32_t now = 0; now < 120;) {
    const auto before = naive.positions();
    const auto left = naive.evict_to_budget(now);
    REQUIRE(positions_at(live.evict_to_budget(now), before) == left);
    evictions += left.size();
    REQUIRE(live.evict_to_budget(now).empty());  // nothing is over budget

    const std::uint32_t count = 1 + random() % max_append;
    live.append(now, count);
    naive.append(now, count);
    now += count;
    const auto expected = naive.positions();
    REQUIRE(std::ranges::equal(live.positions(), expected));
    check_slots(live, setting.budget - 1 + max_append);
    live_max = std::max(live_max, live.size());

    const auto seen = sample(live.size(), random);
    live.observe(seen);
    naive.observe(seen);
  }
  CHECK(live.evictions() == evictions);
  CHECK(live.live_max() == live_max);
}

}  // namespace

TEST_CASE("the live set follows the rule of eviction through random appends") {
  constexpr Setting settings[] = {{1, 0, 0},   {1, 0, 1},   {2, 0, 0},     {2, 1, 0}, {2, 1, 1},
                                  {2, 0, 2},   {8, 0, 0},   {8, 4, 0},     {8, 7, 0}, {8, 0, 3},
                                  {8, 0, 8},   {8, 3, 2},   {8, 4, 4},     {8, 7, 1}, {119, 4, 60},
                                  {120, 4, 8}, {121, 0, 0}, {1000, 4, 500}};
  for (const Setting& setting : settings)
    for (const std::uint32_t max_append : {1u, 2u, 7u, 40u})
      for (std::uint32_t seed = 0; seed < 3; ++seed) compare(setting, max_append, seed);
}

TEST_CASE("a budget that is never reached evicts nothing") {
  LiveSet live = live_set({.budget = 10, .sinks = 0, .recent = 0});
  live.append(0, 9);
  CHECK(live.evict_to_budget(9).empty());
  live.append(9, 1);
  CHECK(live.size() == 10);
  CHECK(live.evict_to_budget(10).size() == 1);
}

TEST_CASE("a budget of one keeps only the query's token") {
  LiveSet live = live_set({.budget = 1, .sinks = 0, .recent = 0});
  live.append(0, 5);
  CHECK(live.evict_to_budget(5).size() == 5);
  live.append(5, 1);
  CHECK(live.size() == 1);
  CHECK(live.positions()[0] == 5);
}

TEST_CASE("at equal rank the older tokens are evicted") {
  LiveSet live = live_set({.budget = 4, .sinks = 0, .recent = 0});
  live.append(0, 8);
  live.observe(std::vector<Observation>(8, {.mass = 7, .queries = 8}));
  live.evict_to_budget(8);
  CHECK(std::ranges::equal(live.positions(), std::vector{5, 6, 7}));
}

TEST_CASE("sinks and recent tokens are kept, and may fill the budget") {
  // The next token to be appended counts as one of the two recent tokens.
  LiveSet live = live_set({.budget = 4, .sinks = 2, .recent = 2});
  live.append(0, 8);
  live.evict_to_budget(8);
  CHECK(std::ranges::equal(live.positions(), std::vector{0, 1, 7}));
}

TEST_CASE("evict_to_budget() returns the victims' indices by age before the eviction") {
  LiveSet live = live_set({.budget = 4, .sinks = 1, .recent = 1});
  live.append(0, 6);
  std::vector<Observation> seen(6, {.mass = 9, .queries = 6});
  seen[2].mass = seen[4].mass = 1;
  seen[5].mass = 2;
  live.observe(seen);
  CHECK(std::ranges::equal(live.evict_to_budget(6), std::vector{2, 4, 5}));
  CHECK(std::ranges::equal(live.positions(), std::vector{0, 1, 3}));
}

TEST_CASE("slots are renumbered by age, and states stay with their tokens") {
  LiveSet live = live_set({.budget = 4, .sinks = 0, .recent = 0});
  live.append(0, 6);
  std::vector<Observation> seen(6, {.mass = 9, .queries = 6});
  seen[0].mass = seen[2].mass = seen[4].mass = 1;
  live.observe(seen);
  live.evict_to_budget(6);  // 0, 2 and 4 are evicted
  CHECK(std::ranges::equal(live.renumber(), std::vector{1, 3, 5}));
  CHECK(std::ranges::equal(live.slots(), std::vector{0, 1, 2}));
  CHECK(live.slot_count() == 3);
  live.append(6, 1);
  CHECK(std::ranges::equal(live.slots(), std::vector{0, 1, 2, 3}));
  live.observe(std::vector<Observation>{{.mass = 0}, {.mass = 5}, {.mass = 5}, {.mass = 99}});
  // The masses are 9, 14, 14 and 99.
  CHECK(std::ranges::equal(live.evict_to_budget(7), std::vector{0}));
  CHECK(std::ranges::equal(live.positions(), std::vector{3, 5, 6}));
}

TEST_CASE("a freed slot is reused with a new state") {
  LiveSet live = live_set({.budget = 2, .sinks = 0, .recent = 0});
  live.append(0, 1);
  live.observe(std::vector<Observation>{{.mass = 5, .queries = 1}});
  live.evict_to_budget(1);
  live.append(1, 1);
  live.observe(std::vector<Observation>{{.mass = 1}, {.mass = 2}});
  CHECK(live.slot_count() == 2);
  live.evict_to_budget(2);  // the masses are 6 and 2, so position 1 is evicted
  CHECK(std::ranges::equal(live.positions(), std::vector{0}));
  live.append(2, 1);
  CHECK(live.slot_count() == 2);
  live.observe(std::vector<Observation>{{.mass = 0}, {.mass = 1}});
  live.evict_to_budget(3);  // the masses are 6 and 1, so position 2 is evicted
  CHECK(std::ranges::equal(live.positions(), std::vector{0}));
}

TEST_CASE("full keeps all tokens for every budget") {
  LiveSet live(parse_policy("full"), 2, {});
  live.append(0, 100);
  CHECK(live.evict_to_budget(100).empty());
  CHECK(live.size() == 100);
  CHECK(live.evictions() == 0);
}

TEST_CASE("random differs by seed, sequence, layer and head, and is sampled again at each step") {
  const PolicySpec spec = parse_policy("random");
  const auto kept = [&](LiveSet::Identity identity, std::uint32_t steps) {
    LiveSet live(spec, 32, identity);
    live.append(0, 64);
    for (std::uint32_t now = 64; now < 64 + steps; ++now) {
      live.evict_to_budget(now);
      live.append(now, 1);
    }
    return std::vector<std::uint32_t>(live.positions().begin(), live.positions().end());
  };
  CHECK(kept({}, 1) == kept({}, 1));
  CHECK(kept({}, 1) != kept({.seed = 1}, 1));
  CHECK(kept({}, 1) != kept({.sequence = 1}, 1));
  CHECK(kept({}, 1) != kept({.layer = 1}, 1));
  CHECK(kept({}, 1) != kept({.kv_head = 1}, 1));
  CHECK(kept({.layer = 1}, 1) != kept({.kv_head = 1}, 1));
  // The random numbers are new at each step, so old tokens are evicted sooner or later, and more
  // than half of the live tokens are among the newest 64. If each position kept one number, tokens
  // with low numbers would be evicted at once, and those with high numbers would stay forever.
  const auto late = kept({}, 200);
  CHECK(std::ranges::count_if(late, [](std::uint32_t p) { return p >= 200; }) > 16);
}
