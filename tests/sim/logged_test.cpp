// Tests replays of logged selections. The fetches must equal those of a plain simulation, and those
// of the selector that made the selections.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <list>
#include <map>
#include <random>
#include <set>

#include "sim/refetch/selection.hpp"
#include "sim/run/replay_run.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/sim/random_trace.hpp"
#include "traces/layer_ropes.hpp"
#include "traces/selections.hpp"

namespace kvlab::logged_test {
namespace {

using Catch::Matchers::ContainsSubstring;
using test::error_of;

using Tokens = std::set<std::uint32_t>;

constexpr std::uint32_t kPrompt = 30, kTokens = 150, kMost = 6;
constexpr std::uint32_t kLayers = 2, kHeads = 3;

CacheConfig config_of(const std::string& policy, std::uint32_t budget) {
  return {.policy = parse_policy(policy, replay_oracles()), .budget = {.extent = tokens(budget)}};
}

/// A trace of random selections: query t selects up to kMost tokens, mostly recent ones and a few
/// that it selects often. Sometimes it lists its own token.
class RandomSelections {
 public:
  RandomSelections(std::uint64_t seed, Queries queries) : queries_(queries) {
    std::mt19937_64 random(seed);
    const std::uint32_t first = queries == Queries::all ? 0 : kPrompt;
    for (auto& layer : rows_)
      for (std::uint32_t row = 0; row < kHeads * (kTokens - first); ++row) {
        const std::uint32_t query = first + row % (kTokens - first);
        Tokens selected;
        for (std::uint64_t i = random() % (kMost + 1); i > 0; --i) {
          const std::uint64_t kind = random() % 4, far = random() % (query + 1);
          selected.insert(static_cast<std::uint32_t>(
              kind < 2 ? query - std::min<std::uint64_t>(far, random() % 12)
                       : far / (1 + kind % 2 * 4)));
        }
        std::vector<std::int32_t> entries(selected.begin(), selected.end());
        entries.resize(kMost, kNoToken);
        std::ranges::shuffle(entries, random);
        layer.insert(layer.end(), entries.begin(), entries.end());
      }
    TraceHeader header;
    header.shape = {.layers = kLayers, .query_heads = kHeads, .kv_heads = kHeads, .head_size = 32};
    header.softmax_scale = 1;
    write_selections_trace(
        folder_ / "trace", header, std::vector<std::int32_t>(kTokens, 1),
        {{0, kPrompt, SegmentKind::prompt}, {kPrompt, kTokens - kPrompt, SegmentKind::decode}},
        {queries, kMost, {rows_[0], rows_[1]}});
  }
  TraceReader open() const { return open_verified_trace(folder_ / "trace", 1); }
  /// The tokens that a query selects, without the query's own token.
  Tokens tokens(std::uint32_t layer, std::uint32_t head, std::uint32_t query) const {
    const std::uint32_t first = queries_ == Queries::all ? 0 : kPrompt;
    Tokens selected;
    for (std::uint32_t i = 0; i < kMost; ++i) {
      const std::int32_t entry =
          rows_[layer][((head * (kTokens - first)) + query - first) * kMost + i];
      if (entry >= 0 && static_cast<std::uint32_t>(entry) != query)
        selected.insert(static_cast<std::uint32_t>(entry));
    }
    return selected;
  }

 private:
  test::TemporaryFolder folder_;
  Queries queries_;
  std::array<std::vector<std::int32_t>, kLayers> rows_;
};

/// What the simulation knows about a resident token.
struct State {
  std::uint32_t appended, used, next_use;
};
/// The token with the smallest number is the first victim; at equal numbers, the older token.
using Rank = std::function<std::int64_t(std::uint32_t token, const State&)>;

struct Counts {
  std::uint64_t fetched = 0, selected = 0;
  bool operator==(const Counts&) const = default;
};

/// Replays the selections `selected` of the queries from `first` on with plain maps.
Counts simulate(const std::vector<Tokens>& selected, std::uint32_t first, std::size_t budget,
                const Rank& rank) {
  // [query, token]: the first query from this one on that selects the token
  std::vector<std::vector<std::uint32_t>> next(kTokens + 1,
                                               std::vector<std::uint32_t>(kTokens, ~0u));
  for (std::uint32_t query = kTokens; query-- > first;) {
    next[query] = next[query + 1];
    for (const std::uint32_t token : selected[query]) next[query][token] = query;
  }
  const auto next_use = [&](std::uint32_t token, std::uint32_t from) { return next[from][token]; };
  std::map<std::uint32_t, State> live;
  std::uint32_t appended = 0;
  const auto append = [&](std::uint32_t token, std::uint32_t now) {
    live[token] = {appended++, token, next_use(token, now)};
  };
  for (std::uint32_t token = 0; token < first; ++token) append(token, first);
  Counts counts;
  for (std::uint32_t query = first; query < kTokens; ++query) {
    const Tokens wanted = selected[query];
    for (auto& [token, state] : live) state.next_use = next_use(token, query);
    const auto make_room = [&] {
      while (live.size() + 1 > budget) {
        auto victim = live.end();
        for (auto it = live.begin(); it != live.end(); ++it)
          if (!wanted.contains(it->first) &&
              (victim == live.end() ||
               rank(it->first, it->second) < rank(victim->first, victim->second)))
            victim = it;
        REQUIRE(victim != live.end());
        live.erase(victim);
      }
    };
    for (const std::uint32_t token : wanted)
      if (!live.contains(token)) {
        ++counts.fetched;
        make_room();
        append(token, query);
      }
    make_room();
    append(query, query);
    counts.selected += wanted.size();
    for (const std::uint32_t token : wanted) live[token].used = query;
  }
  return counts;
}

/// CLOCK as a list of tokens. A token that is marked or selected is not evicted at once, but moved
/// behind the others.
Counts simulate_clock(const std::vector<Tokens>& selected, std::uint32_t first,
                      std::size_t budget) {
  std::list<std::pair<std::uint32_t, bool>> list;  // token, whether it is marked
  for (std::uint32_t token = 0; token < first; ++token) list.emplace_back(token, false);
  Counts counts;
  for (std::uint32_t query = first; query < kTokens; ++query) {
    const Tokens wanted = selected[query];
    Tokens resident, fetched{query};
    for (const auto& [token, marked] : list) resident.insert(token);
    std::ranges::set_difference(wanted, resident, std::inserter(fetched, fetched.end()));
    counts.fetched += fetched.size() - 1;
    counts.selected += wanted.size();
    for (const std::uint32_t token : fetched) {
      while (list.size() + 1 > budget) {
        if (!list.front().second && !wanted.contains(list.front().first)) {
          list.pop_front();
          continue;
        }
        list.front().second = false;
        list.splice(list.end(), list, list.begin());
      }
      list.emplace_back(token, false);
    }
    for (auto& [token, marked] : list)
      marked = marked || (wanted.contains(token) && !fetched.contains(token));
  }
  return counts;
}

std::map<std::string, double> metrics_of(const ReplayResult& result, std::size_t config,
                                         std::int32_t layer, std::int32_t head) {
  std::map<std::string, double> metrics;
  for (const Measurement& row : result.measurements)
    if (row.config == config && row.layer == layer && row.head == head)
      metrics[row.metric] = row.value;
  return metrics;
}

TEST_CASE("fetches of random logged selections equal those of a plain simulation") {
  const std::map<std::string, Rank> ranks{
      {"window", [](std::uint32_t token, const State&) -> std::int64_t { return token; }},
      {"lru", [](std::uint32_t, const State& state) -> std::int64_t { return state.used; }},
      {"belady", [](std::uint32_t, const State& state) { return -std::int64_t{state.next_use}; }}};
  std::uint64_t fetched = 0;
  for (const Queries queries : {Queries::decode, Queries::all})
    for (const std::uint64_t seed : {1u, 2u, 3u}) {
      const RandomSelections selections(seed, queries);
      const TraceReader trace = selections.open();
      const std::uint32_t first = queries == Queries::all ? 0 : kPrompt;
      std::vector<CacheConfig> sweep;
      for (const std::uint32_t budget : {7u, 10u, 16u, 40u, 90u})
        for (const std::string policy : {"window", "lru", "belady", "clock"}) {
          sweep.push_back(config_of(policy, budget));
          if (queries == Queries::all) sweep.back().prefill = parse_prefill("stream");
        }
      const ReplayResult result =
          replay(trace, 0, sweep, {.queries = queries, .refetch = parse_selector("logged")});
      for (std::size_t c = 0; c < sweep.size(); ++c)
        for (std::uint32_t layer = 0; layer < kLayers; ++layer)
          for (std::uint32_t head = 0; head < kHeads; ++head) {
            const std::string& policy = sweep[c].policy.name;
            const std::uint32_t budget = sweep[c].budget.extent.tokens;
            std::vector<Tokens> selected(kTokens);
            for (std::uint32_t query = first; query < kTokens; ++query)
              selected[query] = selections.tokens(layer, head, query);
            const Counts wanted = policy == "clock"
                                      ? simulate_clock(selected, first, budget)
                                      : simulate(selected, first, budget, ranks.at(policy));
            INFO(policy << ", budget " << budget << ", layer " << layer << ", head " << head);
            auto own = metrics_of(result, c, static_cast<std::int32_t>(layer),
                                  static_cast<std::int32_t>(head));
            CHECK(own.at("fetch_rate") == Approx(static_cast<double>(wanted.fetched) /
                                                 static_cast<double>(wanted.selected)));
            CHECK(own.at("fetch_bytes") ==
                  Approx(static_cast<double>(wanted.fetched) / (kTokens - first) * 2 * 32 * 2));
            fetched += wanted.fetched;
          }
    }
  CHECK(fetched > 10'000);
}

/// Writes what a selector selects as the selections of the trace.
void log_selections(const TraceReader& trace, const std::string& text, Queries queries) {
  const Selector selector = parse_selector(text);
  const MeasuredQueries measured(trace.segments(), queries, 1);
  const LayerRopes ropes(trace);
  std::vector<std::vector<std::int32_t>> layers(trace.shape().layers);
  for (std::uint32_t layer = 0; layer < layers.size(); ++layer)
    for (std::uint32_t head = 0; head < trace.shape().kv_heads; ++head) {
      const HeadTensors tensors = read_head(trace, layer, head);
      const HeadArithmetic arithmetic = arithmetic_of(trace, layer, 0.01);
      SharedRows rows(tensors.view, ropes[layer], arithmetic);
      const Selection selection =
          select_tokens(selector, tensors.view, ropes[layer], arithmetic, measured, rows);
      for (const std::uint32_t query : measured.queries()) {
        const auto own = selection.positions(query);
        std::vector<std::int32_t> row(own.rbegin(), own.rend());
        row.resize(selector.tokens, kNoToken);
        layers[layer].insert(layers[layer].end(), row.begin(), row.end());
      }
    }
  write_selections(trace.directory(), {queries, selector.tokens, {layers.begin(), layers.end()}});
}

TEST_CASE("logged selections of a selector are replayed like the selector") {
  for (const std::string selector : {"top:7", "page:4:8"})
    for (const Queries queries : {Queries::decode, Queries::all}) {
      const Traced traced({.seed = 21});
      log_selections(traced.trace, selector, queries);
      const TraceReader logged = open_verified_trace(traced.trace.directory(), 1);
      std::vector<CacheConfig> sweep;
      for (const std::string policy :
           {"lru", "clock", "sieve", "belady", "lru:preset=hisparse", "h2o:recent=0", "full"})
        for (const std::uint32_t budget : {9u, 20u, 50u}) {
          sweep.push_back(config_of(policy, budget));
          if (queries == Queries::all) sweep.back().prefill = parse_prefill("stream");
        }
      const auto result_of = [&](const TraceReader& trace, const std::string& text) {
        return replay(trace, 0, sweep, {.queries = queries, .refetch = parse_selector(text)});
      };
      const ReplayResult wanted = result_of(traced.trace, selector),
                         own = result_of(logged, "logged");
      CHECK(own.lru_fetches == wanted.lru_fetches);
      std::size_t i = 0;
      for (const Measurement& row : own.measurements) {
        INFO(selector << ", " << row.metric);
        // A replay with `top` does not measure selection_recall, but reports 1: it selects the most
        // probable tokens by definition.
        if (selector == "top:7" && row.metric == "selection_recall") {
          CHECK(row.value == 1);
          continue;
        }
        REQUIRE(i < wanted.measurements.size());
        CHECK(row.metric == wanted.measurements[i].metric);
        CHECK(row.value == wanted.measurements[i++].value);
      }
      CHECK(i == wanted.measurements.size());
    }
}

TEST_CASE("a trace that has only selections has no metric of attention, and says so") {
  const RandomSelections selections(5, Queries::decode);
  const TraceReader trace = selections.open();
  const TraceReader* const traces[] = {&trace};
  std::vector<std::string> notices;
  ReplayRequest request{.traces = {"trace"},
                        .sweep = {config_of("lru", 20), config_of("lfu:recent=0", 20)},
                        .options = {.refetch = parse_selector("logged")},
                        .notice = [&](const std::string& line) { notices.push_back(line); }};
  check_budgets(request, traces);
  request.sweep = add_references(std::move(request.sweep), true);
  const Run run = replay_in_memory(request, traces);
  CHECK(notices == std::vector<std::string>{
                       "no recall, miss_rate, output_error or other metric of attention for trace, "
                       "because a trace of selections has no queries, keys and values"});
  std::set<std::string> metrics;
  for (const ResultRow& row : run.rows) {
    metrics.insert(row.metric);
    CHECK(std::isfinite(row.value));
  }
  CHECK(metrics == std::set<std::string>{"fetch_rate", "fetch_bytes", "kv_bytes_mean",
                                         "kv_bytes_peak", "budget_bytes", "evictions", "live_max",
                                         "kv_bytes", "state_bytes"});
  CHECK(run.info.refetch == "logged");
  CHECK(run.info.selected_tokens == kMost);
  CHECK_FALSE(run.kept);
  CHECK(scored_tokens(run.info, run.rows) == kTokens - kPrompt);
  REQUIRE_FALSE(run.lru_curve.empty());
  CHECK(run.lru_curve.front().budget_tokens == kMost + 1);
}

TEST_CASE("replays of selections refuse what they cannot compute, and say what to do") {
  const RandomSelections selections(6, Queries::decode);
  const TraceReader trace = selections.open();
  const std::string path = trace.directory().string();
  const auto refused = [&](const TraceReader& from, const std::string& policy,
                           const std::string& selector, Queries queries = Queries::decode) {
    const CacheConfig config = config_of(policy, 20);
    ReplayOptions options{.queries = queries};
    if (!selector.empty()) options.refetch = parse_selector(selector);
    return error_of<std::invalid_argument>([&] { replay(from, 0, {&config, 1}, options); });
  };
  CHECK(refused(trace, "h2o:recent=0", "logged") ==
        "policy h2o: it needs attention, and " + path +
            " has only selections; use a policy that needs none, such as lru, clock or sieve, or a "
            "trace with queries, keys and values");
  CHECK_THAT(refused(trace, "knorm", "logged"),
             ContainsSubstring("policy knorm: it needs key_norm, which is computed from keys"));
  CacheConfig all = config_of("knorm", 20);  // a budget of all tokens evicts nothing
  all.budget = {.extent = {}, .all = true};
  CHECK_THAT(error_of<std::invalid_argument>([&] {
               replay(trace, 0, {&all, 1}, {.refetch = parse_selector("logged")});
             }),
             ContainsSubstring("policy knorm: it needs key_norm"));
  CHECK_THAT(refused(trace, "lru", ""),
             ContainsSubstring("it has only selections and no queries, keys and values; use "
                               "--refetch logged"));
  CHECK_THAT(refused(trace, "lru", "top:6"), ContainsSubstring("use --refetch logged"));
  CHECK_THAT(refused(trace, "lru", "logged", Queries::all),
             ContainsSubstring("has selections of decoded queries only; use --queries decode"));
  CHECK_THAT(refused(trace, "lru:recent=15", "logged"),
             ContainsSubstring("but --refetch logged needs at least 22"));
  const Traced traced({});
  CHECK_THAT(refused(traced.trace, "lru", "logged"),
             ContainsSubstring("has no selections; write them with kvlab.Trace.from_selections"));
  CHECK_THAT(error_of<std::invalid_argument>([] { parse_selector("logged:6"); }),
             ContainsSubstring("is not a selector; give top:K") &&
                 ContainsSubstring("or logged (the trace's selections)"));
}

}  // namespace
}  // namespace kvlab::logged_test
