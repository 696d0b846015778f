// The syntax of modifiers, and their effect on ranks.
#include <algorithm>
#include <limits>
#include <random>

#include "policies/cache_config.hpp"
#include "policies/modifiers/pooled_rank.hpp"
#include "policies/modifiers/ranks.hpp"
#include "policies/modifiers/text.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"

using namespace kvlab;
using kvlab::test::error_of;
using Pool = Modifiers::Pool;

namespace {

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

std::string refusal(const std::string& text) {
  return error_of<std::invalid_argument>([&] { parse_policy(text); });
}

std::vector<std::uint64_t> smoothed(std::vector<std::uint64_t> keys, std::uint32_t radius,
                                    Pool pool, RankType type = RankType::whole) {
  Ranks ranks{std::move(keys), type};
  smooth_ranks(ranks, radius, pool);
  return ranks.keys;
}

}  // namespace

TEST_CASE("modifiers are written like protected tokens, and shown only if present") {
  CHECK(parse_policy("h2o").text() == "h2o:sinks=0:recent=50%");
  CHECK(parse_policy("h2o:group=max:scope=layer:pool=max:smooth=3:every=64").text() ==
        "h2o:sinks=0:recent=50%:every=64:smooth=3:pool=max:scope=layer:group=max");
  CHECK(parse_policy("lru:once:sinks=2").text() == "lru:sinks=2:recent=0:once");
  for (const std::string text : {"h2o:every=64:scope=layer", "lru:once=yes:smooth=2",
                                 "window:smooth=5:pool=max", "h2o:group=max"}) {
    const PolicySpec spec = parse_policy(text);
    CHECK(parse_policy(spec.text()).modifiers == spec.modifiers);
    CHECK(spec.modifiers != Modifiers{});
  }
  CHECK(parse_policy("h2o:every=1:once=no:smooth=0:pool=mean:scope=head:group=sum").modifiers ==
        Modifiers{});
}

TEST_CASE("a policy's default modifiers are shown, and so is a removed default") {
  const Modifiers standard{.once = true, .smooth = 3, .pool = Pool::max};
  const auto texts = [&](const Modifiers& modifiers) {
    std::string all;
    for (const std::string& text : modifier_texts(modifiers, standard)) all += text + " ";
    return all;
  };
  CHECK(texts(standard) == "once smooth=3 pool=max ");
  CHECK(texts({}) == "once=no smooth=0 pool=mean ");
  CHECK(texts({.every = 8}) == "every=8 once=no smooth=0 pool=mean ");
}

TEST_CASE("a modifier that is invalid or has no effect is refused by name") {
  CHECK(refusal("h2o:every=0") ==
        "policy h2o: every: '0' should be a whole number of tokens, at least 1 and below 2^31");
  CHECK(refusal("h2o:every=2147483648").starts_with("policy h2o: every: '2147483648'"));
  CHECK(refusal("h2o:every=20%").starts_with("policy h2o: every: '20%'"));
  CHECK(refusal("h2o:smooth=-1").starts_with("policy h2o: smooth: '-1' should be a whole"));
  CHECK(refusal("h2o:once=1") == "policy h2o: once: '1' should be no or yes");
  CHECK(refusal("h2o:pool=min") == "policy h2o: pool: 'min' should be mean or max");
  CHECK(refusal("h2o:scope=model") == "policy h2o: scope: 'model' should be head or layer");
  CHECK(refusal("h2o:group=mean") == "policy h2o: group: 'mean' should be sum or max");
  CHECK(refusal("h2o:evry=4") == "policy h2o: unknown parameter 'evry'; did you mean 'every'?");
  CHECK(refusal("h2o:once:once") == "policy h2o: once is given twice; give it once");
  CHECK(refusal("h2o:once:every=64") ==
        "policy h2o: under once tokens are evicted only after a prompt, so every=64 has no effect; "
        "use every=1 or once=no");
  CHECK(refusal("h2o:pool=max") ==
        "policy h2o: pool=max has no effect without smooth; give smooth=R, the number of positions "
        "on either side");
  CHECK(refusal("lru:group=max") ==
        "policy lru: group=max applies to accumulated attention, which lru does not observe; leave "
        "it out");
  CHECK(refusal("full:every=2").starts_with("policy full never evicts"));
}

TEST_CASE("tokens are evicted in bursts, or only after a prompt") {
  CHECK(Modifiers{}.surplus(7, 8, false) == 0);
  CHECK(Modifiers{}.surplus(8, 8, false) == 1);
  CHECK(Modifiers{}.surplus(20, 8, true) == 13);
  const Modifiers every{.every = 64};
  CHECK(every.surplus(70, 8, true) == 0);
  CHECK(every.surplus(71, 8, true) == 64);
  CHECK(every.surplus(71, 8, false) == 64);
  CHECK(every.capacity(8, 5) == 8 - 2 + 64 + 5);
  const Modifiers largest{.every = (1u << 31) - 1};
  CHECK(largest.surplus(kNoBudget - 1, (1u << 31) - 1, false) > 0);
  CHECK(largest.surplus(1u << 31, (1u << 31) - 1, false) == 0);
  const Modifiers once{.once = true};
  CHECK(once.surplus(100, 8, false) == 0);
  CHECK(once.surplus(100, 8, true) == 93);
}

TEST_CASE("ranks are smoothed by age, rounded down, and do not overflow") {
  CHECK(smoothed({1, 2, 4, 9}, 1, Pool::mean) == std::vector<std::uint64_t>{1, 2, 5, 6});
  CHECK(smoothed({5, 0, 0, 9}, 1, Pool::max) == std::vector<std::uint64_t>{5, 5, 9, 9});
  CHECK(smoothed({3, 1, 2}, 900, Pool::mean) == std::vector<std::uint64_t>{2, 2, 2});
  CHECK(smoothed({3, 1, 2}, 0, Pool::mean) == std::vector<std::uint64_t>{3, 1, 2});
  CHECK(smoothed({kMax, kMax, kMax - 3}, 2, Pool::mean) ==
        std::vector<std::uint64_t>{kMax - 1, kMax - 1, kMax - 1});
  CHECK(smoothed({}, 3, Pool::max).empty());
  std::mt19937_64 rng(5);
  for (const std::uint32_t radius : {1u, 4u, 33u}) {
    std::vector<std::uint64_t> ranks(80);
    for (auto& rank : ranks) rank = rng() % 16;
    const auto pooled = smoothed(ranks, radius, Pool::max);
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const auto begin =
          ranks.begin() + static_cast<std::ptrdiff_t>(i - std::min<std::size_t>(i, radius));
      const auto end = ranks.begin() + static_cast<std::ptrdiff_t>(
                                           std::min(ranks.size(), i + std::size_t{radius} + 1));
      REQUIRE(pooled[i] == *std::max_element(begin, end));
    }
  }
}

TEST_CASE("one kept set for a layer's KV heads requires one budget") {
  CacheConfig config{.policy = parse_policy("h2o:scope=layer"),
                     .budget = budget_of_heads({{8, 8}, {9, 9}})};
  CHECK(resolve(config, 100, 0, {2, 2}).budget_of(1, 0) == 9);
  config.budget = budget_of_heads({{8, 8}, {9, 7}});
  CHECK(error_of<std::invalid_argument>([&] {
          resolve(config, 100, 0, {2, 2});
        }) ==
        "policy h2o: under scope=layer the KV heads of a layer keep one set, and layer 1 has "
        "budgets of 9 and 7 tokens; give the same to all heads of a layer");
}

TEST_CASE("smoothing a single rank (device) equals smoothing all ranks (host)") {
  std::mt19937_64 rng(6);
  for (const RankType type : {RankType::whole, RankType::real})
    for (const Pool pool : {Pool::mean, Pool::max})
      for (const std::uint32_t radius : {1u, 3u, 900u}) {
        std::vector<std::uint64_t> ranks(40);
        for (auto& rank : ranks)
          rank = type == RankType::real ? rank_key(static_cast<double>(rng() % 999) / 7 - 60)
                                        : kMax - rng() % 5 * (rng() % 3) * (rng() >> 4);
        const auto wanted = smoothed(ranks, radius, pool, type);
        for (std::size_t i = 0; i < ranks.size(); ++i) {
          PooledRank pooled(pool, type);
          for (std::size_t j = i - std::min<std::size_t>(i, radius);
               j < std::min(ranks.size(), i + radius + 1); ++j)
            pooled.take(ranks[j]);
          REQUIRE(pooled.value() == wanted[i]);
        }
      }
}

TEST_CASE("with scope=layer, a layer's ranks are summed and its caches keep one set") {
  const PolicySpec spec = parse_policy("h2o:recent=0:scope=layer");
  std::vector<LiveSet> heads;
  for (std::uint32_t h = 0; h < 2; ++h) heads.emplace_back(spec, 3, AgedSet::Identity{0, 0, 0, h});
  CHECK(error_of<std::logic_error>([&] {
          LiveSet alone(spec, 2, {});
          alone.append(0, 4);
          alone.evict_to_budget(4);
        }) ==
        "scope=layer: a KV head cannot evict to its budget without the other heads of its layer");
  AgedSet* const both[] = {&heads[0], &heads[1]};
  share_ranks(both);
  for (LiveSet& head : heads) head.append(0, 4);
  // If each head evicted by its own ranks, the first head would keep tokens 0 and 1, and the second
  // head tokens 2 and 3.
  heads[0].observe(std::vector<Observation>{{.mass = 9}, {.mass = 8}, {.mass = 1}, {.mass = 2}});
  heads[1].observe(std::vector<Observation>{{.mass = 1}, {.mass = 0}, {.mass = 5}, {.mass = 9}});
  for (LiveSet& head : heads) {
    head.evict_to_budget(4);
    CHECK(std::ranges::equal(head.positions(), std::vector<std::uint32_t>{0, 3}));
  }
}
