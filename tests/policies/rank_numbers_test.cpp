// Tests how scope=layer and smooth= change the ranks of every policy of the registry. The ranks are
// compared with sums, means and maxima of the numbers that the policy's hooks return.
#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <tuple>

#include "policies/aged_set.hpp"
#include "policies/registry.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/policies/sample.hpp"
#include "tests/policies/unmodified.hpp"

using namespace kvlab;

namespace {

__extension__ using Wide = unsigned __int128;

constexpr std::uint32_t kHeads = 3, kBudget = 16, kPrompt = 40, kRanked = 90, kSeed = 3;

/// How the KV heads of a layer evict to the budget.
struct Request {
  bool by_layer = true;
  std::uint32_t every = 1, smooth = 0;
  bool largest = false;

  std::string text(const std::string& policy) const {
    std::string all = ":sinks=1:recent=2";
    if (by_layer) all += ":scope=layer";
    if (every > 1) all += ":every=" + std::to_string(every);
    if (smooth > 0) all += ":smooth=" + std::to_string(smooth);
    if (largest) all += ":pool=max";
    return test::unmodified(policy, all);
  }
};

std::vector<Request> all_requests() {
  std::vector<Request> all{{}, {.every = 7}};
  for (const bool by_layer : {true, false})
    for (const bool largest : {true, false})
      for (const std::uint32_t smooth : {2u, 500u})
        all.push_back({.by_layer = by_layer, .every = 7, .smooth = smooth, .largest = largest});
  return all;
}

Observation draw_for(std::uint32_t head, std::uint32_t position, std::uint32_t first,
                     std::uint32_t count) {
  const std::uint64_t bits = split_mix(std::uint64_t{position} << 40 | first << 4 | head);
  Observation seen = sample_observation(position, first, count);
  seen.mass = bits % 5 ? bits >> (28 + bits % 8) : bits % 3;
  if (bits % 2) seen.requests = 0;
  return seen;
}

std::vector<float> features_for(std::uint32_t head, std::uint32_t first, std::uint32_t count,
                                std::size_t features) {
  return sample_features(first + 1000 * head, count, features);
}

Step step_of(std::uint32_t head, std::uint32_t now, std::uint32_t live, std::uint32_t queries) {
  return {.now = now,
          .budget = kBudget,
          .live = live,
          .queries = queries,
          .seed = kSeed,
          .layer = 2,
          .kv_head = head};
}

/// A simple implementation of one layer's caches, which calls P's hooks for one token at a time.
template <class P>
class NaiveLayer {
 public:
  using Number =
      std::conditional_t<std::is_same_v<decltype(P::rank({}, {}, {}, {})), double>, double, Wide>;

  explicit NaiveLayer(const Request& requested) : requested_(requested) {}

  std::vector<std::uint32_t> live(std::uint32_t head) const {
    std::vector<std::uint32_t> positions;
    for (const One& one : heads_[head]) positions.push_back(one.token.position);
    return positions;
  }

  void evict_to_budget(std::uint32_t now, bool after_prompt) {
    const auto size = static_cast<std::uint32_t>(heads_[0].size());
    if (size < kBudget - 1 + requested_.every) return;
    std::array<std::vector<Number>, kHeads> ranks;
    for (std::uint32_t h = 0; h < kHeads; ++h)
      for (const One& one : heads_[h])
        ranks[h].push_back(P::rank(one.slot, one.token, params_, step_of(h, now, size, 0)));
    if (requested_.by_layer) {
      std::vector<Number> sums = ranks[0];
      for (std::uint32_t h = 1; h < kHeads; ++h)
        for (std::size_t i = 0; i < size; ++i) sums[i] += ranks[h][i];
      ranks.fill(sums);
    }
    for (std::uint32_t h = 0; h < kHeads; ++h)
      evict(h,
            requested_.smooth > 0 && (requested_.every > 1 || after_prompt) ? smoothed(ranks[h])
                                                                            : ranks[h],
            now);
  }

  void append(std::uint32_t first, std::uint32_t count) {
    constexpr std::uint32_t kFeatures = P::kInfo.feature_count();
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      auto& own = heads_[h];
      const auto features = features_for(h, first, count, kFeatures);
      const auto size = static_cast<std::uint32_t>(own.size()) + count;
      const Step step = step_of(h, first, size, count);
      for (std::uint32_t i = 0; i < count; ++i) {
        One& one = own.emplace_back();
        one.token.position = first + i;
        for (std::uint32_t c = 0; c < kFeatures; ++c)
          one.token.feature[c] = features[i * kFeatures + c];
        P::append(one.slot, one.token, params_, step);
        if constexpr (hooks::HasEvicted<P>)
          if (evictions_[h]) {
            evictions_[h]->is_new = true;
            P::evicted(one.slot, *evictions_[h], params_);
          }
      }
      evictions_[h].reset();
      if constexpr (hooks::HasReorder<P>) reorder(own, step);
      if constexpr (P::kInfo.needs != Needs::nothing)
        for (One& one : own)
          P::observe(one.slot, draw_for(h, one.token.position, first, count), params_, step);
    }
  }

 private:
  struct One {
    Token token;
    typename P::Slot slot;
  };

  std::vector<Number> smoothed(const std::vector<Number>& ranks) const {
    std::vector<Number> all;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      Number sum = 0, count = 0, highest = ranks[i];
      for (std::size_t j = 0; j < ranks.size(); ++j) {
        if ((i > j ? i - j : j - i) > requested_.smooth) continue;
        sum += ranks[j];
        count += 1;
        highest = std::max(highest, ranks[j]);
      }
      all.push_back(requested_.largest ? highest : sum / count);
    }
    return all;
  }

  void reorder(std::vector<One>& own, const Step& step) const {
    std::vector<std::uint64_t> ranks;
    for (const One& one : own)
      ranks.push_back(static_cast<std::uint64_t>(P::rank(one.slot, one.token, params_, step)));
    for (std::size_t i = 0; i < own.size(); ++i) {
      std::uint32_t order = 0;
      for (std::size_t j = 0; j < own.size(); ++j)
        order += ranks[j] < ranks[i] || (ranks[j] == ranks[i] && j < i);
      if constexpr (hooks::HasReorder<P>) P::reorder(own[i].slot, order, params_, step);
    }
  }

  void evict(std::uint32_t head, const std::vector<Number>& ranks, std::uint32_t now) {
    std::vector<One>& own = heads_[head];
    std::vector<std::tuple<int, Number, std::uint32_t>> order;
    for (std::size_t i = 0; i < own.size(); ++i) {
      const std::uint32_t position = own[i].token.position;
      order.emplace_back(position < 1 ? 2 : position + 2 > now ? 1 : 0, ranks[i], position);
    }
    std::ranges::sort(order);
    order.resize(own.size() - (kBudget - 1));
    if (order.empty()) return;
    if constexpr (hooks::HasEvicted<P>) {
      const std::uint32_t last = std::get<2>(order.back());
      const auto victim =
          std::ranges::find(own, last, [](const One& one) { return one.token.position; });
      const std::uint64_t rank =
          P::rank(victim->slot, victim->token, params_, step_of(head, now, 0, 0));
      evictions_[head] = Eviction{.rank = rank, .was_newest = last + 1 == now};
    }
    std::erase_if(own, [&](const One& one) {
      return std::ranges::any_of(
          order, [&](const auto& gone) { return std::get<2>(gone) == one.token.position; });
    });
    if constexpr (hooks::HasEvicted<P>)
      for (One& one : own) P::evicted(one.slot, *evictions_[head], params_);
  }

  Request requested_;
  typename P::Params params_ = standard_params<P>();
  std::array<std::vector<One>, kHeads> heads_;
  std::array<std::optional<Eviction>, kHeads> evictions_ = {};  // since the last append
};

/// Runs the same appends with live sets. Calls each(heads, first, count) before every append.
template <class Each>
void run_sets(const PolicySpec& spec, Each each) {
  std::vector<LiveSet> heads;
  std::vector<AgedSet*> all;
  for (std::uint32_t h = 0; h < kHeads; ++h)
    heads.emplace_back(spec, kBudget, AgedSet::Identity{kSeed, 0, 2, h});
  for (LiveSet& head : heads) all.push_back(&head);
  share_ranks(all);
  for (std::uint32_t first = 0; first < kRanked;) {
    const std::uint32_t count = first == 0 ? kPrompt : 1;
    for (LiveSet& head : heads) head.evict_to_budget(first);
    each(heads, first, count);
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      const auto features = features_for(h, first, count, heads[h].features().size());
      heads[h].append(first, count, features.data());
      std::vector<Observation> seen;
      for (const std::uint32_t position : heads[h].positions())
        seen.push_back(draw_for(h, position, first, count));
      heads[h].observe(seen);
      if (first == 0) heads[h].end_prompt();
    }
    first += count;
  }
}

/// The positions that the first head keeps, append by append.
std::vector<std::vector<std::uint32_t>> kept_by(const PolicySpec& spec) {
  std::vector<std::vector<std::uint32_t>> kept;
  run_sets(spec, [&](const std::vector<LiveSet>& heads, std::uint32_t, std::uint32_t) {
    kept.emplace_back(heads[0].positions().begin(), heads[0].positions().end());
  });
  return kept;
}

template <class P>
void compare_with_numbers() {
  if (!P::kInfo.evicts) return;
  for (const Request& requested : all_requests()) DYNAMIC_SECTION(requested.text(P::kInfo.name)) {
      NaiveLayer<P> naive(requested);
      run_sets(parse_policy(requested.text(P::kInfo.name)),
               [&](const std::vector<LiveSet>& heads, std::uint32_t first, std::uint32_t count) {
                 naive.evict_to_budget(first, first == kPrompt);
                 for (std::uint32_t h = 0; h < kHeads; ++h)
                   REQUIRE(std::ranges::equal(heads[h].positions(), naive.live(h)));
                 naive.append(first, count);
               });
    }
}

template <class... P>
void compare_all(PolicyList<P...>) {
  (compare_with_numbers<P>(), ...);
}

}  // namespace

TEST_CASE("every policy's ranks are added, averaged and compared as numbers") {
  compare_all(Registry{});
}

TEST_CASE("under scope=layer, only the policies that evict the oldest token first equal window") {
  const auto window = kept_by(parse_policy(Request{}.text("window")));
  for (const PolicyEntry& entry : policy_catalogue()) {
    if (!entry.info.evicts) continue;
    INFO(entry.info.name);
    CHECK((kept_by(parse_policy(Request{}.text(entry.info.name))) == window) ==
          entry.info.oldest_first);
  }
}

TEST_CASE("rank keys have the order of their numbers, and convert back to them") {
  constexpr double inf = std::numeric_limits<double>::infinity();
  constexpr double tiny = std::numeric_limits<double>::denorm_min();
  std::vector<double> ascending{-inf, -1e308, -2, -1, -tiny, 0, tiny, 1, 1 + 0x1p-52, 1e308, inf};
  for (std::size_t i = 0; i < ascending.size(); ++i) {
    INFO(ascending[i]);
    CHECK(real_rank(rank_key(ascending[i])) == ascending[i]);
    if (i > 0) CHECK(rank_key(ascending[i - 1]) < rank_key(ascending[i]));
  }
  CHECK(rank_key(-0.0) == rank_key(0.0));
  // The sign of a NaN differs between machines. A NaN of either sign is evicted last.
  CHECK(rank_key(inf - inf) == rank_key(-(inf - inf)));
  CHECK(rank_key(inf) < rank_key(inf - inf));
  CHECK(rank_sum(RankType::real, rank_key(inf), rank_key(-inf)) == rank_key(inf - inf));
}

TEST_CASE("sums of double ranks equal the sums of numbers; integer sums saturate") {
  constexpr std::uint64_t max_rank = std::numeric_limits<std::uint64_t>::max();
  CHECK(rank_sum(RankType::real, rank_key(1.5), rank_key(2.25)) == rank_key(3.75));
  CHECK(rank_sum(RankType::real, rank_key(-1.5), rank_key(1.5)) == rank_key(0.0));
  CHECK(rank_sum(RankType::whole, max_rank - 1, 1) == max_rank);
  CHECK(rank_sum(RankType::whole, max_rank, 5) == max_rank);
}

TEST_CASE("no policy's integer ranks overflow over 256 KV heads") {
  // Every token receives the largest observation that is possible with 64 queries of 32 query
  // heads.
  for (const PolicyEntry& entry : policy_catalogue()) {
    LiveSet live(parse_policy(entry.info.name), kNoBudget, {});
    live.append(0, 64, features_for(0, 0, 64, live.features().size()).data());
    live.observe(std::vector<Observation>(
        64, {.mass = std::uint64_t{1} << 43, .requests = 64, .last_request = 63, .queries = 64}));
    const Ranks ranks = live.ranks(64);
    INFO(entry.info.name);
    if (ranks.type == RankType::whole)
      CHECK(*std::ranges::max_element(ranks.keys) <=
            std::numeric_limits<std::uint64_t>::max() / 256);
  }
}

TEST_CASE("lazy_eviction: equal importances give equal ranks") {
  // The importance of a token whose longest interval is i, and whose last request was s tokens ago,
  // is (i * i + i + s) / (i * (i + s)). The test compares these fractions exactly, in integers.
  struct State {
    std::uint64_t interval, silent;
  };
  std::vector<State> states;
  for (std::uint32_t i = 1; i <= 40; ++i)
    for (std::uint32_t s = 0; s <= 60; ++s) states.push_back({i, s});
  const auto rank = [](const State& state) {
    const LazyEviction::Slot slot{.last_request = 100 - static_cast<std::uint32_t>(state.silent),
                                  .interval = static_cast<std::uint32_t>(state.interval)};
    return LazyEviction::rank(slot, {}, {}, {.now = 101});
  };
  std::size_t equal = 0;
  for (const State& a : states)
    for (const State& b : states) {
      const auto over = [](const State& x) {
        return x.interval * x.interval + x.interval + x.silent;
      };
      const auto under = [](const State& x) { return x.interval * (x.interval + x.silent); };
      const auto one = over(a) * under(b), two = over(b) * under(a);
      REQUIRE((rank(a) < rank(b)) == (one < two));
      equal += one == two && (a.interval != b.interval);
    }
  CHECK(equal > 20);
}
