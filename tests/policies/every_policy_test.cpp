// Invariants of every policy in the registry.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "policies/aged_set.hpp"
#include "tests/catch.hpp"
#include "tests/policies/sample.hpp"
#include "tests/policies/unmodified.hpp"

using namespace kvlab;

namespace {

struct Appended {
  std::uint32_t first, count;
};

/// A prompt, decoding, a second turn, decoding.
std::vector<Appended> conversation(std::uint32_t chunk) {
  std::vector<Appended> result;
  std::uint32_t next = 0;
  const auto append = [&](std::uint32_t total, std::uint32_t append_tokens) {
    for (std::uint32_t done = 0; done < total;) {
      const std::uint32_t count = std::min(append_tokens, total - done);
      result.push_back({next, count});
      next += count;
      done += count;
    }
  };
  append(70, chunk);
  append(60, 1);
  append(25, chunk);
  append(30, 1);
  return result;
}

struct Replayed {
  /// [append]: the positions that are live while the queries of the append attend
  std::vector<std::vector<std::uint32_t>> kept;
  LiveSet live;  ///< at the end
};

std::vector<Observation> sample_all(const LiveSet& live, const Appended& append) {
  std::vector<Observation> seen;
  for (const std::uint32_t position : live.positions())
    seen.push_back(sample_observation(position, append.first, append.count));
  return seen;
}

Replayed replay(const PolicySpec& spec, std::uint32_t budget, std::uint32_t chunk) {
  Replayed result{.kept = {},
                  .live{spec, budget, {.seed = 3, .sequence = 1, .layer = 2, .kv_head = 1}}};
  LiveSet& live = result.live;
  for (const Appended& append : conversation(chunk)) {
    live.evict_to_budget(append.first);
    live.append(append.first, append.count,
                sample_features(append.first, append.count, live.features().size()).data());
    result.kept.emplace_back(live.positions().begin(), live.positions().end());
    live.observe(sample_all(live, append));
  }
  return result;
}

/// Whether the protected tokens fit this budget.
bool fits(const PolicySpec& spec, std::uint32_t budget) {
  const std::uint32_t sinks = spec.sinks.resolve(budget), recent = spec.recent.resolve(budget);
  return sinks < budget && sinks + recent <= budget;
}

/// Calls `check(spec)` for each policy of the registry, without modifiers, with its default
/// protected tokens and with others.
template <class Check>
void for_every_policy(Check check) {
  for (const PolicyEntry& entry : policy_catalogue()) {
    std::vector<std::string> requested{test::unmodified(entry.info.name)};
    if (entry.info.evicts)
      for (const std::string protected_tokens :
           {":sinks=0:recent=0", ":sinks=3:recent=25%", ":sinks=1"})
        requested.push_back(requested.front() + protected_tokens);
    for (const std::string& text : requested) DYNAMIC_SECTION(text) {
        check(parse_policy(text));
      }
  }
}

constexpr std::uint32_t kBudgets[] = {8, 9, 16, 64, 200};
constexpr std::uint32_t kChunks[] = {1, 7, 70};

/// The budgets into which the protected tokens fit.
std::vector<std::uint32_t> budgets_for(const PolicySpec& spec) {
  std::vector<std::uint32_t> fitting;
  for (const std::uint32_t budget : kBudgets)
    if (!spec.entry->info.evicts || fits(spec, budget)) fitting.push_back(budget);
  CHECK(fitting.size() >= 2);
  return fitting;
}

}  // namespace

TEST_CASE("every policy respects its budget and evicts no more than needed") {
  for_every_policy([](const PolicySpec& spec) {
    for (const std::uint32_t budget : budgets_for(spec))
      for (const std::uint32_t chunk : kChunks) {
        const Replayed replayed = replay(spec, budget, chunk);
        std::uint32_t live = 0;
        std::size_t i = 0;
        for (const Appended& append : conversation(chunk)) {
          live = (spec.entry->info.evicts ? std::min(live, budget - 1) : live) + append.count;
          REQUIRE(replayed.kept[i].size() == live);
          REQUIRE(std::ranges::is_sorted(replayed.kept[i]));
          REQUIRE(std::ranges::adjacent_find(replayed.kept[i]) == replayed.kept[i].end());
          REQUIRE(replayed.kept[i].back() == append.first + append.count - 1);
          ++i;
        }
      }
  });
}

TEST_CASE("no policy evicts a protected token") {
  for_every_policy([](const PolicySpec& spec) {
    for (const std::uint32_t budget : budgets_for(spec))
      for (const std::uint32_t chunk : kChunks) {
        const ProtectedTokens protected_tokens = spec.entry->info.evicts
                                                     ? resolve_protected_tokens(spec, budget)
                                                     : ProtectedTokens{0, 0};
        const Replayed replayed = replay(spec, budget, chunk);
        std::size_t i = 0;
        for (const Appended& append : conversation(chunk)) {
          const auto& kept = replayed.kept[i++];
          const auto is_live = [&](std::uint32_t p) { return std::ranges::binary_search(kept, p); };
          // sinks + recent <= budget, and `now` is one of the recent tokens.
          for (std::uint32_t p = 0; p < std::min(protected_tokens.sinks, append.first); ++p)
            REQUIRE(is_live(p));
          for (std::uint32_t back = 0; back < std::min(protected_tokens.recent, append.first + 1);
               ++back)
            REQUIRE(is_live(append.first - back));
        }
      }
  });
}

TEST_CASE("every policy is deterministic, to the bit") {
  for_every_policy([](const PolicySpec& spec) {
    const Replayed once = replay(spec, 64, 7), again = replay(spec, 64, 7);
    CHECK(once.kept == again.kept);
    REQUIRE(once.live.size() == again.live.size());
    for (std::size_t age = 0; age < once.live.size(); ++age)
      CHECK(once.live.has_state(age, again.live.state(age)));
  });
}

TEST_CASE("a nested policy keeps at a budget all tokens that it keeps at a smaller one") {
  // The protected tokens are given as numbers, because shares of the budget would protect other
  // tokens at each budget.
  for (const PolicyEntry& entry : policy_catalogue()) {
    if (entry.info.order != Order::nested || !entry.info.evicts) continue;
    for (const std::string protected_tokens : {":sinks=0:recent=0", ":sinks=4:recent=4"})
      for (const std::uint32_t chunk : kChunks)
        DYNAMIC_SECTION(entry.info.name << protected_tokens << ", chunk " << chunk) {
          const PolicySpec spec =
              parse_policy(test::unmodified(entry.info.name) + protected_tokens);
          for (std::size_t b = 1; b < std::size(kBudgets); ++b) {
            const Replayed small = replay(spec, kBudgets[b - 1], chunk);
            const Replayed large = replay(spec, kBudgets[b], chunk);
            for (std::size_t i = 0; i < small.kept.size(); ++i)
              REQUIRE(std::ranges::includes(large.kept[i], small.kept[i]));
          }
        }
  }
}

TEST_CASE("an oldest_first policy keeps the sinks and a run of the newest tokens") {
  for_every_policy([](const PolicySpec& spec) {
    if (!spec.entry->info.oldest_first) return;
    for (const std::uint32_t budget : kBudgets)
      for (const std::uint32_t chunk : kChunks) {
        const std::uint32_t sinks = resolve_protected_tokens(spec, budget).sinks;
        for (const auto& kept : replay(spec, budget, chunk).kept)
          for (std::size_t age = 0; age < kept.size(); ++age)
            REQUIRE((age < sinks ? kept[age] == age
                                 : kept.back() - kept[age] == kept.size() - 1 - age));
      }
  });
}

TEST_CASE("every policy has a complete description") {
  for (const PolicyEntry& entry : policy_catalogue()) DYNAMIC_SECTION(entry.info.name) {
      const std::string name = entry.info.name;
      CHECK(name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == std::string::npos);
      CHECK(std::string(entry.info.summary).size() > 10);
      CHECK(std::string(entry.info.citation).size() > 10);
      for (const ParamInfo& param : entry.params) {
        INFO(param.name);
        CHECK(param.min_value <= param.standard);
        CHECK(param.standard <= param.max_value);
        CHECK_FALSE(param.help.empty());
      }
      const auto params = parse_policy(name).packed_params();
      const std::uint32_t tail = entry.tail(params.data());
      CHECK(tail > 0);
      for (const std::uint32_t age : {0u, 1u, 2u, 100u, 100'000u}) {
        const float weight = entry.weight(age, params.data());
        CHECK(std::isfinite(weight));
        CHECK(weight >= 0.0f);
        CHECK((age < tail || weight == 0.0f));
      }
    }
}

TEST_CASE("a policy's loops give the same bits for every instruction set") {
  constexpr std::uint32_t kMany = 203;
  std::vector<std::uint32_t> positions(kMany);
  std::iota(positions.begin(), positions.end(), 0u);
  std::vector<std::uint64_t> mass;
  std::vector<std::uint32_t> requests, last;
  for (const std::uint32_t position : positions) {
    const Observation seen = sample_observation(position, 300, 3);
    mass.push_back(seen.mass);
    requests.push_back(seen.requests);
    last.push_back(seen.last_request);
  }
  const Seen seen{mass.data(), requests.data(), last.data(), 302, 3};
  const Step step{.now = 300, .budget = 64, .live = kMany, .queries = 3, .seed = 5, .layer = 1};
  const std::span base = registry_ops_base();
  for (const std::span other : {registry_ops_avx2(), registry_ops_avx512()})
    for (std::size_t p = 0; p < other.size(); ++p) {
      INFO(base[p].info.name);
      const auto run = [&](const PolicyOps& ops) {
        const auto params = parse_policy(ops.info.name).packed_params();
        std::vector<std::byte> states(kMany * ops.slot_bytes);
        const auto features = sample_features(0, kMany, ops.info.feature_count());
        const Tokens tokens{positions.data(), features.data()};
        ops.append(states.data(), tokens, kMany, params.data(), step);
        ops.observe(states.data(), seen, kMany, params.data(), step);
        std::vector<std::uint64_t> ranks(kMany);
        ops.rank(states.data(), tokens, kMany, params.data(), step, ranks.data());
        ranks.push_back(ops.find_min_rank(states.data(), tokens, 3, 200, params.data(), step));
        CHECK(ranks[ranks.back()] == *std::min_element(ranks.begin() + 3, ranks.begin() + 200));
        return std::pair(states, ranks);
      };
      CHECK(run(base[p]) == run(other[p]));
    }
}
