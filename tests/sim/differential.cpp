#include "tests/sim/differential.hpp"

#include <fmt/format.h>

#include <cmath>
#include <map>
#include <random>
#include <set>

#include "policies/features/features.hpp"
#include "tests/catch.hpp"
#include "tests/traces/extra_files.hpp"

namespace kvlab {
namespace {

const std::vector<std::string> kPolicies{"full", "window",        "sink",  "lru",
                                         "h2o",  "streaming_h2o", "random"};

bool is_oracle(const std::string& policy) { return policy.starts_with("oracle_"); }

bool is_exact(const std::string& metric) {
  static const std::set<std::string> kExact{"evictions", "live_max", "kv_bytes_peak",
                                            "zero_outputs"};
  return kExact.contains(metric) || metric.ends_with("_bytes");
}

brute::MetricValues metric_values_of(const ReplayResult& result, std::size_t config) {
  brute::MetricValues metric_values;
  for (const Measurement& m : result.measurements)
    if (m.config == config && m.metric != "budget_bytes")  // the budget as requested
      metric_values[{m.layer, m.head, m.metric}] = {m.value, m.standard_error, m.count};
  return metric_values;
}

std::string row_name(const brute::MetricValues::key_type& key) {
  const auto& [layer, head, metric] = key;
  return fmt::format("layer {} head {} {}", layer, head, metric);
}

bool near(double a, double b, double tolerance) {
  if (std::isnan(b)) return std::isnan(a);
  return std::abs(a - b) <= tolerance * std::max(1.0, std::abs(b));
}

/// The differences, one per line.
std::string differences(const brute::MetricValues& got, const brute::MetricValues& wanted,
                        double tolerance) {
  std::string text;
  for (const auto& [key, metric_value] : got)
    if (!wanted.contains(key)) text += row_name(key) + ": should not be there\n";
  for (const auto& [key, metric_value] : wanted) {
    const auto row = got.find(key);
    if (row == got.end()) {
      text += row_name(key) + ": missing\n";
      continue;
    }
    const brute::MetricValue& value = row->second;
    const double allowed = is_exact(std::get<2>(key)) ? 0 : tolerance;
    if (!near(value.value, metric_value.value, allowed) || value.count != metric_value.count ||
        !near(value.standard_error, metric_value.standard_error, tolerance))
      text += fmt::format("{}: {} ± {} of {}, should be {} ± {} of {}\n", row_name(key),
                          value.value, value.standard_error, value.count, metric_value.value,
                          metric_value.standard_error, metric_value.count);
  }
  return text;
}

void check_kept(const TraceReader& trace, const Case& c, const brute::Outcome& outcome,
                const ReplayOptions& options) {
  for (std::uint32_t layer = 0; layer < trace.shape().layers; ++layer)
    for (std::uint32_t head = 0; head < trace.shape().kv_heads; ++head) {
      INFO("layer " << layer << " head " << head);
      check_sets(every_set(trace, c.brute.sequence, c.replay, options, layer, head),
                 outcome.caches[layer][head].kept);
    }
}

/// The outcome under budgets by head. Each head's part is taken from a run in which all heads have
/// that head's budget.
brute::Outcome run_by_head(const brute::Simulator& exact, const Case& c) {
  brute::Outcome outcome = exact.run(c.brute);
  const std::uint32_t group = exact.sequence().group();
  for (std::uint32_t layer = 0; layer < c.heads.size(); ++layer)
    for (std::uint32_t head = 0; head < c.heads[layer].size(); ++head) {
      brute::Config own = brute::standard(c.brute.policy, c.heads[layer][head]);
      own.chunk = c.brute.chunk;
      own.cache_positions = c.brute.cache_positions;
      own.seed = c.brute.seed;
      own.sequence = c.brute.sequence;
      brute::Outcome alone = exact.run(own);
      if (!outcome.caches[layer].empty())  // oracle_topk has no caches
        outcome.caches[layer][head] = std::move(alone.caches[layer][head]);
      for (std::uint32_t q = head * group; q < (head + 1) * group; ++q)
        outcome.queries[layer][q] = std::move(alone.queries[layer][q]);
      outcome.narrowest = std::min(outcome.narrowest, alone.narrowest);
    }
  return outcome;
}

}  // namespace

Case make_case(const std::string& policy, std::uint32_t budget, std::uint32_t chunk,
               bool cache_positions, std::optional<std::uint32_t> sinks,
               std::optional<std::uint32_t> recent) {
  Case c;
  c.brute = brute::standard(policy, budget);
  c.brute.chunk = chunk;
  c.brute.cache_positions = cache_positions;
  c.brute.seed = 11;
  c.brute.sequence = kSequence;
  std::string text = policy;
  if (sinks) text += fmt::format(":sinks={}", c.brute.sinks = *sinks);
  if (recent) text += fmt::format(":recent={}", c.brute.recent = *recent);
  c.replay.policy = parse_policy(text, replay_oracles());
  c.replay.budget = {.extent = tokens(budget)};
  c.replay.prefill = {chunk};
  c.replay.positions = cache_positions ? Positions::cache : Positions::original;
  c.replay.seed = c.brute.seed;
  c.text = fmt::format("{} budget {} prefill {} positions {}", text, budget,
                       c.replay.prefill.text(), name_of(c.replay.positions));
  return c;
}

std::vector<Case> whole_sweep(std::uint32_t tokens) {
  std::vector<std::string> names = kPolicies;
  names.insert(names.end(), {"oracle_attention", "oracle_topk"});
  std::vector<Case> cases;
  for (const std::string& name : names)
    for (const std::uint32_t budget : {name == "sink" ? 5u : 1u, 2u, 19u, tokens + 5}) {
      if (name == "full" && budget != 19) continue;  // full has no budget
      const bool one_sink = name == "sink" && budget == 2;
      std::set<std::uint32_t> chunks{0, 1, 7};
      if (budget > 1) chunks.insert(budget - 1);
      for (const std::uint32_t chunk : chunks)
        for (const bool cache_positions : {false, true})
          if (!cache_positions || !is_oracle(name))
            cases.push_back(make_case(name, budget, chunk, cache_positions,
                                      one_sink ? std::optional(1u) : std::nullopt));
    }
  for (const std::uint32_t chunk : {0u, 7u}) {
    cases.push_back(make_case("lru", 18, chunk, false, 4, 9));
    cases.push_back(make_case("h2o", 12, chunk, true, 3, 9));
    cases.push_back(make_case("random", 12, chunk, false, 11, 1));
    cases.push_back(make_case("window", 12, chunk, true, 1, 0));
    cases.push_back(make_case("h2o", 12, chunk, false, 0, 0));
  }
  return cases;
}

Case make_case_by_head(const std::string& policy, const HeadBudgets& heads, std::uint32_t chunk,
                       bool cache_positions) {
  Case c = make_case(policy, heads.front().front(), chunk, cache_positions);
  c.heads = heads;
  c.replay.budget = budget_of_heads(heads);
  c.text =
      fmt::format("{} budget [{}] prefill {} positions {}", policy, fmt::join(heads.front(), " "),
                  c.replay.prefill.text(), name_of(c.replay.positions));
  return c;
}

std::vector<Case> by_head_sweep(const ModelShape& shape, std::uint32_t tokens) {
  HeadBudgets heads(shape.layers, std::vector<std::uint32_t>(shape.kv_heads));
  const std::uint32_t budgets[] = {12, 5, tokens + 3, 31, 8, 19};
  std::uint32_t next = 0;
  for (auto& layer : heads)
    for (std::uint32_t& own : layer) own = budgets[next++ % std::size(budgets)];
  std::vector<std::string> names = kPolicies;
  names.insert(names.end(), {"oracle_attention", "oracle_topk"});
  std::vector<Case> cases;
  for (const std::string& name : names)
    for (const std::uint32_t chunk : {0u, 1u, 7u})
      for (const bool cache_positions : {false, true})
        if (!cache_positions || !is_oracle(name))
          cases.push_back(make_case_by_head(name, heads, chunk, cache_positions));
  return cases;
}

TraceReader write_with_features(const std::filesystem::path& directory, const RandomTrace& wanted) {
  write_random_trace(directory, wanted);
  std::mt19937 rng(wanted.seed);
  std::set<std::string> names{"drawn"};
  for (const PolicyEntry& entry : policy_catalogue())
    for (std::uint32_t c = 0; c < entry.info.feature_count(); ++c)
      names.insert(entry.info.features[c]);
  for (const std::string& name : names)
    if (!is_computed(name, false) && !name.starts_with("name="))
      test::write_feature(directory, name, [&](auto, auto, auto) {
        return static_cast<float>(rng() % 4096) / 4096;
      });
  return TraceReader::open(directory);
}

std::vector<CacheConfig> configs_of(const test::Choices& choices, const Executor* executor,
                                    const TraceReader& trace, std::uint32_t budget) {
  const ModelShape& shape = trace.shape();
  const CacheShape model{shape.layers, shape.kv_heads, shape.head_size};
  test::Choices from = choices;
  if (from.budgets.empty()) from.budgets = test::budgets_about(budget, model);
  return test::covering(from, executor, trace.tokens(), model);
}

std::vector<CacheConfig> replay_configs(const std::vector<Case>& cases) {
  std::vector<CacheConfig> configs;
  for (const Case& c : cases) configs.push_back(c.replay);
  return configs;
}

namespace {

/// The outcomes of a sweep's oracles, each run once.
class Oracles {
 public:
  Oracles(const brute::Simulator& exact, const std::vector<Case>& cases)
      : exact_(exact), cases_(cases) {}

  /// Attaches the outcomes of the oracles of `c` to `outcome`, which is the outcome of `c`.
  void put_beside(const Case& c, brute::Outcome& outcome) {
    if (is_oracle(c.brute.policy) || c.brute.policy == "full" || c.replay.policy.prompt) return;
    outcome.attention_oracle = find("oracle_attention", c);
    if (!outcome.attention_oracle) return;
    for (std::size_t l = 0; l < outcome.queries.size(); ++l)
      for (std::size_t h = 0; h < outcome.queries[l].size(); ++h)
        for (std::size_t t = 0; t < outcome.queries[l][h].size(); ++t)
          outcome.queries[l][h][t].oracle_recall =
              outcome.attention_oracle->queries[l][h][t].recall;
  }

 private:
  const brute::Outcome* find(const std::string& name, const Case& beside) {
    for (std::size_t c = 0; c < cases_.size(); ++c)
      if (cases_[c].brute.policy == name && cases_[c].brute.chunk == beside.brute.chunk &&
          cases_[c].replay.budget.text() == beside.replay.budget.text()) {
        if (!outcomes_.contains(c)) outcomes_.emplace(c, run_by_head(exact_, cases_[c]));
        return &outcomes_.at(c);
      }
    return nullptr;
  }

  const brute::Simulator& exact_;
  const std::vector<Case>& cases_;
  std::map<std::size_t, brute::Outcome> outcomes_;
};

}  // namespace

void check_measured(const ReplayResult& got, const ReplayResult& wanted, double tolerance,
                    const std::function<std::string(std::size_t)>& name) {
  REQUIRE(got.measurements.size() == wanted.measurements.size());
  CHECK(got.budget_tokens == wanted.budget_tokens);
  for (std::size_t i = 0; i < wanted.measurements.size(); ++i) {
    const Measurement &a = got.measurements[i], &b = wanted.measurements[i];
    INFO(name(b.config) << " " << b.metric << " layer " << b.layer << " head " << b.head << ": "
                        << a.value << " ± " << a.standard_error << " of " << a.count
                        << ", should be " << b.value << " ± " << b.standard_error << " of "
                        << b.count);
    REQUIRE(std::tie(a.config, a.layer, a.head, a.metric) ==
            std::tie(b.config, b.layer, b.head, b.metric));
    CHECK(a.count == b.count);
    CHECK(near(a.value, b.value, is_exact(b.metric) ? 0 : tolerance));
    CHECK(near(a.standard_error, b.standard_error, tolerance));
  }
}

void check_agreement(const TraceReader& trace, const std::vector<Case>& cases,
                     ReplayOptions options, double tolerance) {
  const brute::Simulator exact(brute::load(trace), cases.front().replay.threshold);
  const ReplayResult result = replay(trace, kSequence, replay_configs(cases), options);
  const auto queries =
      options.queries == Queries::decode ? brute::Queries::decode : brute::Queries::all;
  const std::uint32_t stride = options.every_output_error ? 1 : 8;
  Oracles oracles(exact, cases);
  for (std::size_t c = 0; c < cases.size(); ++c) {
    brute::Outcome outcome = run_by_head(exact, cases[c]);
    oracles.put_beside(cases[c], outcome);
    INFO(cases[c].text << "; the closest decision differs by " << outcome.narrowest
                       << " (below 1e-6 it may go either way: change the data, not the test)");
    if (cases[c].brute.policy != "oracle_topk") check_kept(trace, cases[c], outcome, options);
    CHECK(differences(metric_values_of(result, c), exact.measure(outcome, queries, stride),
                      tolerance) == "");
  }
}

}  // namespace kvlab
