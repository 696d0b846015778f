// Compares replays with refetch with a second simulator. It is written from docs/guides/refetch.md
// and computes in float64.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <list>
#include <map>
#include <numeric>
#include <set>

#include "sim/head_replayer.hpp"
#include "sim/refetch/lru_curve.hpp"
#include "sim/refetch/selection.hpp"
#include "sim/run/run.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/sim/brute_force.hpp"
#include "tests/sim/random_trace.hpp"

namespace kvlab {
namespace {

using test::error_of;

using Tokens = std::set<std::uint32_t>;

constexpr std::uint32_t kPrompt = 40, kTokens = 120;

/// The probabilities of the query heads of one KV head: [query head][query][token].
using Rows = std::vector<brute::Matrix>;

Rows rows_of(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head) {
  const brute::Simulator exact(brute::load(trace));
  const std::uint32_t group = exact.sequence().group();
  Rows rows;
  for (std::uint32_t head = 0; head < group; ++head)
    rows.push_back(exact.probabilities(layer, kv_head * group + head));
  return rows;
}

/// The `count` tokens before `query` with the largest probabilities. A token counts with its
/// largest probability under any query head.
Tokens top(const Rows& rows, std::uint32_t query, std::size_t count) {
  std::vector<std::pair<double, std::uint32_t>> order;
  for (std::uint32_t token = 0; token < query; ++token) {
    double max_share = 0;
    for (const auto& row : rows) max_share = std::max(max_share, row[query][token]);
    order.emplace_back(-max_share, token);
  }
  std::ranges::sort(order);
  Tokens selected;
  for (std::size_t i = 0; i < std::min(count, order.size()); ++i) selected.insert(order[i].second);
  return selected;
}

/// What a policy knows about a token.
struct State {
  std::uint32_t position = 0, used = 0;
  double mass = 0;
};
/// A policy of this test: the token with the smallest number is the first victim.
using Rank = std::function<double(const State&, std::uint32_t now)>;

struct Counts {
  std::uint64_t fetched = 0, selected = 0;
  std::vector<Tokens> resident = {};  // [decoded query], before its attention
  double recall = 0;                  // mean over queries and heads
};

/// Replays one KV head. `sinks` are protected.
Counts simulate(const Rows& rows, std::size_t count, std::size_t budget, std::uint32_t sinks,
                const Rank& rank) {
  std::map<std::uint32_t, State> live;
  const auto append = [&](std::uint32_t token) { live[token] = {token, token, 0}; };
  // The prompt: every query sees all tokens.
  for (std::uint32_t token = 0; token < kPrompt; ++token) append(token);
  for (std::uint32_t query = 0; query < kPrompt; ++query)
    for (std::uint32_t token = 0; token <= query; ++token)
      for (const auto& row : rows) {
        const double p = row[query][token], max_share = *std::ranges::max_element(row[query]);
        live[token].mass += p;
        if (p >= 0.01 * max_share) live[token].used = query;
      }
  Counts counts;
  for (std::uint32_t query = kPrompt; query < kTokens; ++query) {
    const Tokens selected = top(rows, query, count);
    const auto evict_one = [&] {
      const State* victim = nullptr;
      for (const auto& [token, state] : live) {
        if (selected.contains(token) || token < sinks) continue;
        if (!victim || rank(state, query) < rank(*victim, query)) victim = &state;
      }
      REQUIRE(victim);
      live.erase(victim->position);
    };
    for (const std::uint32_t token : selected) {
      if (live.contains(token)) continue;
      ++counts.fetched;
      while (live.size() + 1 > budget) evict_one();
      append(token);
    }
    while (live.size() + 1 > budget) evict_one();
    append(query);
    counts.selected += selected.size();
    counts.resident.emplace_back();
    for (const auto& [token, state] : live) counts.resident.back().insert(token);
    Tokens attended = selected;
    attended.insert(query);
    for (std::uint32_t token = 0; token < sinks; ++token) attended.insert(token);
    for (const auto& row : rows) {
      double kept = 0;
      for (const std::uint32_t token : attended) kept += row[query][token];
      counts.recall += kept / static_cast<double>(rows.size() * (kTokens - kPrompt));
      for (const std::uint32_t token : attended) live[token].mass += row[query][token] / kept;
    }
    for (const std::uint32_t token : selected) live[token].used = query;
  }
  return counts;
}

double by_age(const State& state, std::uint32_t) { return state.position; }
double by_use(const State& state, std::uint32_t) { return state.used; }
double by_mass(const State& state, std::uint32_t) { return state.mass; }
/// Belady's order for a selection of `count` tokens.
Rank by_next_use(const Rows& rows, std::size_t count) {
  std::vector<Tokens> selected(kTokens);
  for (std::uint32_t query = kPrompt; query < kTokens; ++query)
    selected[query] = top(rows, query, count);
  return [selected](const State& state, std::uint32_t now) {
    for (std::uint32_t query = now; query < kTokens; ++query)
      if (selected[query].contains(state.position)) return -static_cast<double>(query);
    return -1e9;
  };
}

CacheConfig config_of(const std::string& policy, std::uint32_t budget) {
  return {.policy = parse_policy(policy, replay_oracles()), .budget = {.extent = tokens(budget)}};
}

ReplayOptions refetching(const std::string& selector) {
  return {.refetch = parse_selector(selector)};
}

/// The value of a metric in the part of one KV head.
double value_of(const ReplayResult& result, const std::string& metric, std::size_t config,
                std::int32_t layer, std::int32_t head) {
  for (const Measurement& row : result.measurements)
    if (row.config == config && row.layer == layer && row.head == head && row.metric == metric)
      return row.value;
  FAIL("no " << metric);
  return 0;
}

TEST_CASE("residency, fetches and recall under refetch equal a simulation in float64") {
  const Traced traced({.seed = 5});
  struct Case {
    std::string policy;
    std::uint32_t sinks;
    Rank rank;
  };
  const Rows rows = rows_of(traced.trace, 1, 1);
  for (const std::uint32_t budget : {14u, 20u, 33u, 70u}) {
    const std::vector<Case> cases{{"window", 0, by_age},
                                  {"lru", 0, by_use},
                                  {"lru:sinks=3", 3, by_use},
                                  {"h2o:recent=0", 0, by_mass},
                                  {"h2o:sinks=4:recent=0", 4, by_mass},
                                  {"belady", 0, by_next_use(rows, 9)}};
    for (const Case& one : cases) DYNAMIC_SECTION(one.policy << ", budget " << budget) {
        const CacheConfig config = config_of(one.policy, budget);
        const ReplayOptions options = refetching("top:9");
        const Counts wanted = simulate(rows, 9, budget, one.sinks, one.rank);
        const ReplayResult result = replay(traced.trace, 0, {&config, 1}, options);
        CHECK(value_of(result, "fetch_rate", 0, 1, 1) ==
              Approx(static_cast<double>(wanted.fetched) / static_cast<double>(wanted.selected)));
        CHECK(value_of(result, "fetch_bytes", 0, 1, 1) ==
              Approx(static_cast<double>(wanted.fetched) / (kTokens - kPrompt) * 2 * 16 * 2));
        CHECK(value_of(result, "recall", 0, 1, 1) == Approx(wanted.recall).epsilon(1e-5));
        const Sets kept = every_set(traced.trace, 0, config, options, 1, 1);
        for (std::uint32_t query = kPrompt; query < kTokens; ++query) {
          const Tokens& own = wanted.resident[query - kPrompt];
          REQUIRE(kept[query] == std::vector<std::uint32_t>(own.begin(), own.end()));
        }
      }
  }
}

// CLOCK, SIEVE and HiSparse as lists that move tokens around, as their authors describe them.

struct Entry {
  std::uint32_t token;
  bool marked = false;
};

/// A cache that is a list, with the tokens of a step. `requested` are never evicted.
class ListCache {
 public:
  virtual ~ListCache() = default;
  virtual void evict_one(const Tokens& requested) = 0;
  virtual void insert(std::uint32_t token) = 0;
  /// After a step: `found` were requested and resident, `fetched` were not resident.
  virtual void end_step(const Tokens& found, const Tokens& fetched) = 0;
  Tokens resident() const {
    Tokens tokens;
    for (const Entry& entry : list_) tokens.insert(entry.token);
    return tokens;
  }

 protected:
  void mark(const Tokens& found) {
    for (Entry& entry : list_) entry.marked = entry.marked || found.contains(entry.token);
  }
  std::list<Entry> list_;  // the oldest first
};

class ListClock final : public ListCache {
  void evict_one(const Tokens& requested) override {
    while (list_.front().marked || requested.contains(list_.front().token)) {
      list_.front().marked = false;
      list_.splice(list_.end(), list_, list_.begin());
    }
    list_.pop_front();
  }
  void insert(std::uint32_t token) override { list_.push_back({token}); }
  void end_step(const Tokens& found, const Tokens&) override { mark(found); }
};

class ListSieve final : public ListCache {
  void evict_one(const Tokens& requested) override {
    if (hand_ == list_.end()) hand_ = list_.begin();
    while (hand_->marked || requested.contains(hand_->token)) {
      hand_->marked = false;
      if (++hand_ == list_.end()) hand_ = list_.begin();
    }
    hand_ = list_.erase(hand_);
  }
  void insert(std::uint32_t token) override { list_.push_back({token}); }
  void end_step(const Tokens& found, const Tokens&) override { mark(found); }

  std::list<Entry>::iterator hand_ = list_.end();  // end() means the oldest token
};

class ListHiSparse final : public ListCache {
  void evict_one(const Tokens& requested) override {
    list_.erase(std::ranges::find_if(
        list_, [&](const Entry& entry) { return !requested.contains(entry.token); }));
  }
  void insert(std::uint32_t token) override { list_.push_back({token}); }
  void end_step(const Tokens& found, const Tokens& fetched) override {
    std::list<Entry> stale, new_ones, hits;
    for (const Entry& entry : list_)
      (found.contains(entry.token)     ? hits
       : fetched.contains(entry.token) ? new_ones
                                       : stale)
          .push_back(entry);
    list_ = std::move(stale);
    list_.splice(list_.end(), new_ones);
    list_.splice(list_.end(), hits);
  }
};

/// The resident tokens at each decoded query.
std::vector<Tokens> simulate(ListCache& cache, const Rows& rows, std::size_t count,
                             std::size_t budget) {
  for (std::uint32_t token = 0; token < kPrompt; ++token) cache.insert(token);
  std::vector<Tokens> resident;
  for (std::uint32_t query = kPrompt; query < kTokens; ++query) {
    const Tokens selected = top(rows, query, count), before = cache.resident();
    Tokens found, fetched;
    for (const std::uint32_t token : selected)
      (before.contains(token) ? found : fetched).insert(token);
    fetched.insert(query);  // the query's own token comes last
    for (const std::uint32_t token : fetched) {
      while (cache.resident().size() + 1 > budget) cache.evict_one(selected);
      cache.insert(token);
    }
    cache.end_step(found, fetched);
    resident.push_back(cache.resident());
  }
  return resident;
}

TEST_CASE("clock, sieve and hisparse keep what lists keep that move tokens around") {
  std::size_t differ = 0;
  for (const std::uint32_t seed : {6u, 7u, 8u}) {
    const Traced traced({.seed = seed});
    for (const std::uint32_t head : {0u, 1u}) {
      const Rows rows = rows_of(traced.trace, 0, head);
      for (const std::uint32_t budget : {10u, 12u, 17u, 26u, 41u, 70u}) {
        std::map<std::string, Sets> kept;
        for (const std::string policy : {"lru", "clock", "sieve", "lru:preset=hisparse"})
          kept[policy] =
              every_set(traced.trace, 0, config_of(policy, budget), refetching("top:9"), 0, head);
        const auto check = [&](const std::string& policy, ListCache&& list) {
          const std::vector<Tokens> wanted = simulate(list, rows, 9, budget);
          INFO(policy << ", seed " << seed << ", head " << head << ", budget " << budget);
          for (std::uint32_t query = kPrompt; query < kTokens; ++query) {
            INFO("query " << query);
            const Tokens& own = wanted[query - kPrompt];
            REQUIRE(kept[policy][query] == std::vector<std::uint32_t>(own.begin(), own.end()));
          }
          differ += kept[policy] != kept["lru"];
        };
        check("clock", ListClock());
        check("sieve", ListSieve());
        check("lru:preset=hisparse", ListHiSparse());
      }
    }
  }
  CHECK(differ > 50);  // they are not LRU
}

TEST_CASE("the curve of lru equals lru at each budget") {
  for (const std::string selector : {"top:7", "page:4:8"})
    for (const bool streams : {false, true}) {
      const Traced traced({.seed = 9});
      ReplayOptions options = refetching(selector);
      options.queries = streams ? Queries::all : Queries::decode;
      std::vector<CacheConfig> sweep;
      for (std::uint32_t budget = options.refetch->tokens + 1; budget <= kTokens; ++budget) {
        sweep.push_back(config_of("lru", budget));
        sweep.back().prefill = parse_prefill(streams ? "stream" : "dense");
      }
      const ReplayResult result = replay(traced.trace, 0, sweep, options);
      REQUIRE(result.lru_fetches.size() == kTokens + 1);
      const auto selected = static_cast<double>(result.lru_fetches[0]);
      for (std::size_t c = 0; c < sweep.size(); ++c) {
        const std::uint64_t fetched = result.lru_fetches[sweep[c].budget.extent.tokens];
        INFO(selector << ", budget " << sweep[c].budget.text());
        CHECK(value_of(result, "fetch_rate", c, -1, -1) ==
              Approx(static_cast<double>(fetched) / selected));
      }
      CHECK(result.lru_fetches[sweep.front().budget.extent.tokens] > 0);
    }
}

TEST_CASE("the mean curve of lru has the sizes that all traces have") {
  const std::vector<LruPoint> curve{{"a", 8, 0.5, 80},   {"a", 16, 0.25, 40}, {"a", 32, 0.04, 8},
                                    {"b", 16, 0.15, 60}, {"b", 32, 0.06, 12}, {"b", 64, 0.001, 1}};
  const std::vector<LruPoint> means = mean_lru_curve(curve);
  REQUIRE(means.size() == 2);
  CHECK(means[0].budget_tokens == 16);
  CHECK(std::abs(means[0].fetch_rate - 0.2) < 1e-15);
  CHECK(means[0].fetch_bytes == 50);
  CHECK(means[1].budget_tokens == 32);
  CHECK(std::abs(means[1].fetch_rate - 0.05) < 1e-15);
  CHECK(buffer_sizes_text(curve) ==
        "Smallest buffers with which lru fetches at most a given share of the selected tokens: 16 "
        "tokens for 20%, 32 tokens for 10%, 32 tokens for 5%.");
  CHECK(buffer_sizes_text(std::span(curve).first(2)).empty());
  CHECK(mean_lru_curve({}).empty());
}

TEST_CASE("pages have the bounds of Quest, and the newest page is selected") {
  const Traced traced({.seed = 11});
  const brute::Sequence s = brute::load(traced.trace);
  const brute::RopeAngles angles = brute::exact_angles(s);
  constexpr std::uint32_t kPage = 4, kCount = 12;
  const CacheConfig config = config_of("full", 1);
  const ReplayResult result = replay(traced.trace, 0, {&config, 1}, refetching("page:4:12"));
  double recall = 0, agreed = 0, all = 0;
  const Rows rows = rows_of(traced.trace, 0, 1);
  for (std::uint32_t query = kPrompt; query < kTokens; ++query) {
    brute::Vector best(query / kPage, 0);
    for (std::uint32_t head = 2; head < 4; ++head) {
      const brute::Vector q = brute::rotate(angles, s.q[0][head][query], query);
      brute::Vector bounds;
      for (std::uint32_t page = 0; page < query / kPage; ++page) {
        double bound = 0;
        for (std::size_t d = 0; d < q.size(); ++d) {
          double max_product = -1e300;
          for (std::uint32_t i = 0; i < kPage; ++i) {
            const std::uint32_t token = page * kPage + i;
            max_product =
                std::max(max_product, q[d] * brute::rotate(angles, s.k[0][1][token], token)[d]);
          }
          bound += max_product;
        }
        bounds.push_back(s.score(0, bound));
      }
      const brute::Vector p = brute::softmax(bounds, brute::kNoSink);
      for (std::size_t page = 0; page < best.size(); ++page)
        best[page] = std::max(best[page], p[page]);
    }
    std::vector<std::pair<double, std::uint32_t>> order;
    for (std::uint32_t page = 0; page < best.size(); ++page) order.emplace_back(-best[page], page);
    std::ranges::sort(order);
    Tokens selected;
    for (std::size_t i = 0; i < std::min<std::size_t>(kCount / kPage - 1, order.size()); ++i)
      for (std::uint32_t j = 0; j < kPage; ++j) selected.insert(order[i].second * kPage + j);
    for (std::uint32_t token = query / kPage * kPage; token < query; ++token)
      selected.insert(token);
    const Tokens exact = top(rows, query, selected.size());
    all += static_cast<double>(selected.size());
    for (const std::uint32_t token : selected) agreed += exact.contains(token);
    selected.insert(query);
    for (const auto& row : rows)
      for (const std::uint32_t token : selected)
        recall += row[query][token] / static_cast<double>(rows.size() * (kTokens - kPrompt));
  }
  CHECK(value_of(result, "selection_recall", 0, 0, 1) == Approx(agreed / all));
  CHECK(value_of(result, "recall", 0, 0, 1) == Approx(recall).epsilon(1e-5));
  CHECK(agreed < all);
}

/// A device that supports every configuration.
class Elsewhere final : public HeadReplayer {
 public:
  bool takes(const TraceReader&, const CacheConfig&) const override { return true; }
  std::vector<std::vector<HeadOutcome>> run(const ReplayPlan&, std::span<const HeadTask>) override {
    return {};
  }
  double reading_seconds() const override { return 0; }
};

TEST_CASE("refetch refuses what it cannot replay, and says what to do") {
  const Traced traced({});
  const auto refused = [&](const std::string& policy, std::uint32_t budget,
                           const std::string& selector) {
    const CacheConfig config = config_of(policy, budget);
    return error_of<std::invalid_argument>([&] {
      replay(traced.trace, 0, {&config, 1}, refetching(selector));
    });
  };
  CHECK(
      refused("lru:sinks=4", 13, "top:9") ==
      "policy lru: budget 13 is 13 tokens, but --refetch top:9 needs at least 14, for the selected "
      "tokens, the protected tokens and the query's own token");
  CHECK(refused("oracle_attention", 20, "top:9") ==
        "policy oracle_attention: with --refetch, evicted tokens return, but this oracle evicts "
        "for good; use belady, or leave the oracle out");
  CHECK(refused("h2o:every=4:recent=0", 20, "top:9") ==
        "policy h2o: --refetch evicts whenever it needs a slot; leave every= and once out");
  CHECK(refused("h2o:scope=layer:recent=0", 20, "top:9") ==
        "policy h2o: --refetch chooses victims by KV head; leave scope=layer and ada() out");
  CHECK(refused("h2o:tiers=4:recent=0", 20, "top:9") ==
        "policy h2o: --refetch fetches 16-bit tokens; leave --tiers out");
  CHECK(refused("lru", 20, "top:0").starts_with("--refetch: 'top:0' has '0', which should be"));
  CHECK(
      refused("lru", 20, "page:4:9").starts_with("--refetch: 'page:4:9' would select a part of a"));
  CHECK(
      refused("lru", 20, "topp:4").starts_with("--refetch: 'topp:4' is not a selector; give top"));
  const CacheConfig belady = config_of("belady", 20), lru = config_of("lru", 20);
  Elsewhere cuda;
  ReplayOptions on_cuda = refetching("top:9");
  on_cuda.elsewhere = &cuda;
  CHECK(error_of<std::invalid_argument>([&] {
          replay(traced.trace, 0, {&lru, 1}, on_cuda);
        }) == "--refetch: runs on the CPU only; use --device cpu");
  CHECK(error_of<std::invalid_argument>([&] {
          replay(traced.trace, 0, {&belady, 1}, {});
        }) == "policy belady: this oracle requires --refetch, such as --refetch top:64");
  ReplayOptions all = refetching("top:9");
  all.queries = Queries::all;
  CHECK(error_of<std::invalid_argument>([&] {
          replay(traced.trace, 0, {&lru, 1}, all);
        })
            .starts_with(
                "--queries all: with --refetch, every measured query has to be a separate step"));
}

TEST_CASE("a selection of the whole context reproduces the full cache") {
  const Traced traced({.seed = 2});
  const std::string all = fmt::format("top:{}", kTokens - 1);
  const std::vector<CacheConfig> sweep{config_of("lru", kTokens), config_of("full", kTokens)};
  const ReplayResult result = replay(traced.trace, 0, sweep, refetching(all));
  for (const Measurement& row : result.measurements) {
    const bool loss = row.metric == "fetch_rate" || row.metric == "fetch_bytes" ||
                      row.metric == "output_error" || row.metric == "residual_error" ||
                      row.metric == "kl_estimate_joint" || row.metric == "miss_rate";
    INFO(row.metric);
    if (loss) CHECK(row.value == 0);
    if (row.metric == "recall") CHECK(row.value == 1);
  }
}

TEST_CASE("no policy fetches less than belady") {
  for (const std::string selector : {"top:8", "page:4:8"})
    for (const std::uint32_t seed : {3u, 4u}) {
      const Traced traced({.seed = seed});
      std::vector<CacheConfig> sweep;
      std::vector<std::size_t> belady;  // for each configuration: the index of belady at its budget
      const auto add = [&](const std::string& policy, std::uint32_t budget) {
        belady.push_back(policy == "belady" ? sweep.size() : belady.back());
        sweep.push_back(config_of(policy, budget));
      };
      for (const std::uint32_t budget : {9u, 13u, 18u, 30u, 60u}) {
        for (const std::string policy : {"belady", "window", "lru", "lru:preset=hisparse", "clock",
                                         "sieve", "lfu:recent=0", "tova", "h2o:recent=0", "random"})
          add(policy, budget);
        if (budget < 13) continue;  // too small for the selected and the protected tokens
        for (const std::string policy : {"lru:sinks=4", "lfu:recent=3", "h2o:sinks=2:recent=2"})
          add(policy, budget);
      }
      const ReplayResult result = replay(traced.trace, 0, sweep, refetching(selector));
      for (std::size_t c = 0; c < sweep.size(); ++c)
        for (std::int32_t layer = 0; layer < 2; ++layer)
          for (std::int32_t head = 0; head < 2; ++head) {
            INFO(selector << ", " << sweep[c].policy.text() << ", " << sweep[c].budget.text());
            const double own = value_of(result, "fetch_rate", c, layer, head);
            CHECK(own >= value_of(result, "fetch_rate", belady[c], layer, head));
          }
    }
}

}  // namespace
}  // namespace kvlab
