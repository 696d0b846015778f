// A replay in memory, and its results.
#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <numeric>
#include <stdexcept>

#include "policies/features/output_projections.hpp"
#include "sim/budgets/budget_file.hpp"
#include "sim/device/cuda_replay.hpp"
#include "sim/metrics.hpp"
#include "sim/report/recommendation.hpp"
#include "sim/run/replay_run.hpp"
#include "tools/python/src/array.hpp"
#include "tools/python/src/long_call.hpp"
#include "tools/python/src/policy.hpp"
#include "tools/python/src/trace.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab::python {
namespace {

using Words = nb::typed<nb::dict, std::string, nb::object>;

/// The keyword `name` of a replay. kvlab/_run.py has already checked the value.
template <class T>
T word(const Words& words, const char* name) {
  try {
    return nb::cast<T>(nb::object(words[name]));
  } catch (const nb::cast_error&) {
    throw std::invalid_argument(fmt::format("{}: has an unexpected type", name));
  }
}

SweepRequest sweep_from(const Words& words) {
  using Texts = std::vector<std::string>;
  return {.policies = word<Texts>(words, "policies"),
          .budgets = word<Texts>(words, "budgets"),
          .prefills = word<Texts>(words, "prefill"),
          .positions = word<Texts>(words, "positions"),
          .seed = word<std::uint64_t>(words, "seed"),
          .threshold = word<double>(words, "threshold")};
}

ReplayOptions options_from(const Words& words) {
  ReplayOptions options;
  options.queries = parse_queries(word<std::string>(words, "queries"));
  options.every_output_error = word<bool>(words, "every_output_error");
  options.plain = word<bool>(words, "plain");
  options.layers = word<std::vector<std::uint32_t>>(words, "layers");
  const auto refetch = word<std::optional<std::string>>(words, "refetch");
  if (refetch) options.refetch = parse_selector(*refetch);
  options.progress = progress_to(nb::object(words["progress"]));
  options.threads = word<std::optional<unsigned>>(words, "threads").value_or(default_threads());
  if (!nb::object(words["output"]).is_none())
    options.output = word<std::shared_ptr<OutputProjections>>(words, "output");
  return options;
}

/// A run, and the notices that its replay gave.
struct PythonRun {
  Run run;
  std::vector<std::string> notices = {};
};

PythonRun replay_traces(const std::vector<Trace>& traces, const std::vector<Policy>& own,
                        const Words& words) {
  PythonRun result;
  ReplayRequest request{.sweep = {},
                        .options = options_from(words),
                        .notice = [&](const std::string& line) { result.notices.push_back(line); }};
  request.sweep = make_sweep(sweep_with(sweep_from(words), request.options.refetch),
                             replay_oracles(), compiled_from(own), request.notice);
  if (word<std::string>(words, "device") == "cuda") request.device = cuda_replayer();
  request.options.elsewhere = request.device.get();
  std::vector<const TraceReader*> readers;
  for (const Trace& trace : traces) {
    request.traces.push_back(trace.path);
    readers.push_back(trace.reader.get());
  }
  check_budgets(request, readers);
  if (word<bool>(words, "references"))
    request.sweep = add_references(std::move(request.sweep), request.options.refetch.has_value());
  call_long([&] { result.run = replay_in_memory(request, readers); });
  return result;
}

/// policy, params, budget, prefill, positions of each configuration.
using SweepRow = std::tuple<std::string, std::string, std::string, std::string, std::string>;

std::vector<SweepRow> sweep_of(const PythonRun& self) {
  std::vector<SweepRow> sweep;
  for (const RunConfig& c : self.run.info.sweep)
    sweep.emplace_back(c.policy, c.params, c.budget, c.prefill, c.positions);
  return sweep;
}

/// trace, budget in tokens, fetch rate, fetched bytes of each point of the curve of lru.
std::vector<std::tuple<std::string, std::uint32_t, double, double>> lru_curve_of(
    const PythonRun& self) {
  std::vector<std::tuple<std::string, std::uint32_t, double, double>> curve;
  for (const LruPoint& point : self.run.lru_curve)
    curve.emplace_back(point.trace, point.budget_tokens, point.fetch_rate, point.fetch_bytes);
  return curve;
}

/// (name, path, hash) of each trace.
std::vector<std::tuple<std::string, std::string, std::string>> traces_of(const PythonRun& self) {
  std::vector<std::tuple<std::string, std::string, std::string>> traces;
  for (const RunTrace& trace : self.run.info.traces)
    traces.emplace_back(trace.name, trace.path, trace.hash);
  return traces;
}

/// Makes a configuration of the run again. run.json stores it as texts, in the form of the command
/// line.
CacheConfig config_of(const RunInfo& info, std::size_t index, const std::vector<Policy>& own) {
  const RunConfig& requested = info.sweep.at(index);
  const std::string text =
      requested.params.empty() ? requested.policy : requested.policy + ":" + requested.params;
  SweepRequest request{.policies = {text},
                       .budgets = {requested.budget},
                       .prefills = {requested.prefill},
                       .positions = {requested.positions},
                       .seed = requested.seed,
                       .threshold = info.threshold};
  if (requested.budget == "all") request.budgets.clear();
  if (!requested.budget.starts_with('@'))
    return make_sweep(request, replay_oracles(), compiled_from(own)).front();
  // The budget comes from a budget file. The run contains the budgets of that file, so the file is
  // not read again: the configuration is made with any budget, which is then replaced.
  constexpr std::uint32_t kAny = 1'000'000'000;
  request.budgets = {std::to_string(kAny)};
  CacheConfig config = make_sweep(request, replay_oracles(), compiled_from(own)).front();
  const HeadBudgets& stored = requested.budgets;
  const bool one = stored.size() == 1 && stored.front().size() == 1;
  config.budget = one ? Budget{.extent = tokens(stored.front().front())} : budget_of_heads(stored);
  return config;
}

/// Positions of the queries, and an array [query, token] that says whether the token was live.
std::pair<Array<std::uint32_t>, Array<bool>> kept_of(const PythonRun& self, const Trace& trace,
                                                     std::uint32_t sequence, std::size_t config,
                                                     const std::vector<Policy>& own,
                                                     std::uint32_t layer, std::uint32_t kv_head,
                                                     bool plain,
                                                     std::shared_ptr<OutputProjections> output) {
  const CacheConfig wanted = config_of(self.run.info, config, own);
  const TraceReader& reader = *trace.reader;
  std::vector<std::uint32_t> queries =
      MeasuredQueries(reader.segments(), self.run.info.queries, 1).sampled_queries();
  ReplayOptions options{
      .queries = self.run.info.queries, .plain = plain, .output = std::move(output)};
  if (!self.run.info.refetch.empty()) options.refetch = parse_selector(self.run.info.refetch);
  const std::size_t tokens = reader.tokens();
  auto live = std::make_unique<bool[]>(queries.size() * tokens);
  call_long([&] {
    const auto sets = kept_sets(reader, sequence, wanted, options, layer, kv_head, queries);
    for (std::size_t q = 0; q < sets.size(); ++q)
      for (const std::uint32_t position : sets[q].positions) live[q * tokens + position] = true;
  });
  const std::size_t count = queries.size();
  bool* const data = live.get();
  const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<bool*>(p); });
  static_cast<void>(live.release());
  return {array_of(std::move(queries), {count}), Array<bool>(data, {count, tokens}, owner)};
}

/// Writes the run's folder completely or not at all.
void save(PythonRun& self, const std::string& directory) {
  const nb::gil_scoped_release no_gil;
  AtomicFolder folder(directory);
  save_run(self.run, folder / "");
  folder.commit();
}

/// The ranking at a budget as JSON: {"standings", "recommendation"}. If the metric is empty, uses
/// the best predictor.
std::string ranking(const PythonRun& self, const std::string& budget, const std::string& metric) {
  const MetricTable metric_table(self.run.rows);
  const MetricInfo* const by = find_metric(metric.empty() ? best_metric(self.run.rows) : metric);
  const BudgetColumn* const column = metric_table.find_budget(budget);
  if (!by || !by->ranks)
    throw std::invalid_argument(fmt::format("ranking: '{}' is not a metric that can rank", metric));
  if (!column)
    throw std::invalid_argument(fmt::format("ranking: budget {} is not in this run", budget));
  Ranking found = rank_policies(metric_table, column->text, *by);
  if (found.empty())
    throw std::invalid_argument(
        fmt::format("ranking: no policy has {} at budget {}", by->name, budget));
  found.recommendation.scope.tokens = scored_tokens(self.run.info, self.run.rows);
  found.recommendation.scope.note = std::string(kReplayNote);
  return nlohmann::ordered_json{{"standings", ranking_json(found, metric_table)},
                                {"recommendation", recommendation_json(found.recommendation)}}
      .dump();
}

std::vector<std::string> budgets_of(const PythonRun& self) {
  std::vector<std::string> budgets;
  const MetricTable metric_table(self.run.rows);
  for (const BudgetColumn& budget : metric_table.budgets()) budgets.push_back(budget.text);
  return budgets;
}

/// The paired difference of two configurations from values [configuration][text][block]: mean,
/// standard error, low, high, texts.
std::tuple<double, double, double, double, std::size_t> difference(
    const std::vector<std::vector<std::vector<double>>>& values) {
  if (values.size() != 2 || values[0].size() != values[1].size())
    throw std::invalid_argument("difference: a and b should have the same number of texts");
  PairedScores scores(2);
  for (std::size_t t = 0; t < values[0].size(); ++t) {
    if (values[0][t].size() != values[1][t].size() || values[0][t].empty())
      throw std::invalid_argument(fmt::format(
          "difference: text {}: a and b should have the same number of blocks, at least 1", t));
    PairedText text{.text = std::to_string(t), .tokens = static_cast<double>(values[0][t].size())};
    for (const auto& blocks : values) {
      text.means.push_back(std::accumulate(blocks[t].begin(), blocks[t].end(), 0.0) /
                           static_cast<double>(blocks[t].size()));
      text.blocks.push_back(blocks[t]);
    }
    scores.add(std::move(text));
  }
  const Difference found = scores.difference(0, 1);
  return {found.mean, found.standard_error, found.interval.low, found.interval.high, found.texts};
}

PythonRun load(const std::string& directory) {
  return result_of_long([&] { return PythonRun{load_run(directory)}; });
}

std::vector<std::tuple<std::string, std::string, bool, bool>> metrics() {
  std::vector<std::tuple<std::string, std::string, bool, bool>> all;
  for (const MetricInfo& metric : all_metrics())
    all.emplace_back(metric.name, metric.label, metric.higher_is_better, metric.ranks);
  return all;
}

}  // namespace

void bind_replay(nb::module_& module) {
  nb::class_<PythonRun>(module, "Run", "The results of a replay.")
      .def_static("load", load, nb::arg("directory"))
      .def("save", save, nb::arg("directory"),
           "Writes results.csv, blocks.csv, run.json and kept.json.")
      .def("ranking", ranking, nb::arg("budget"), nb::arg("metric"),
           "JSON: standings and recommendation at a budget.")
      .def_prop_ro("budgets", budgets_of, "The budgets as requested, in the order of their tokens.")
      .def("csv", [](const PythonRun& self) { return results_csv(self.run.rows); })
      .def("kept", kept_of, nb::arg("trace"), nb::arg("sequence"), nb::arg("config"),
           nb::arg("own"), nb::arg("layer"), nb::arg("kv_head"), nb::arg("plain"),
           nb::arg("output").none(),
           "Positions of the queries, and [query, token]: whether the token was live.")
      .def_prop_ro(
          "refetch", [](const PythonRun& self) { return self.run.info.refetch; },
          "The selector of a replay with refetch; empty: without.")
      .def_prop_ro("lru_curve", lru_curve_of,
                   "(trace, budget, fetch rate, fetched bytes) of each point of the curve of lru.")
      .def_prop_ro("version", [](const PythonRun& self) { return self.run.info.version; })
      .def_prop_ro(
          "queries",
          [](const PythonRun& self) { return std::string(name_of(self.run.info.queries)); })
      .def_prop_ro("sweep", sweep_of,
                   "(policy, params, budget, prefill, positions) of each configuration.")
      .def_prop_ro("traces", traces_of, "(name, path, hash) of each trace.")
      .def_ro("notices", &PythonRun::notices);
  module.def("replay", replay_traces, nb::arg("traces"), nb::arg("own"), nb::arg("words"));
  module.def("difference", difference, nb::arg("values"));
  module.def("metrics", metrics, "(name, label, higher is better, ranks) of each metric.");
}

}  // namespace kvlab::python
