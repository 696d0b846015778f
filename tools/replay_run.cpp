#include "tools/replay_run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <tuple>

#include "sim/kept.hpp"

namespace kvlab {
namespace {

void refuse_same_names(const std::vector<RunTrace>& traces) {
  std::set<std::string> names;
  for (const RunTrace& trace : traces)
    if (!names.insert(trace.name).second)
      throw std::invalid_argument(
          fmt::format("--trace: two traces are called {}; results are told apart by the "
                      "directory's name, so rename one",
                      trace.name));
}

RunInfo describe(const ReplayRequest& request, const std::vector<TraceReader>& traces) {
  RunInfo info{.version = KVLAB_VERSION,
               .span = request.options.span,
               .threshold = request.options.threshold,
               .every_output_error = request.options.every_output_error,
               .layers = request.options.layers};
  for (std::size_t i = 0; i < traces.size(); ++i)
    info.traces.push_back(describe(traces[i], request.traces[i]));
  for (const ReplayConfig& config : request.grid)
    info.grid.push_back({config.policy.name, config.policy.params_text(), config.budget.text(),
                         config.prefill.text(), std::string(name_of(config.positions)),
                         config.seed});
  for (const ReplayConfig& config : request.grid)
    if (const PolicyEntry* entry = config.policy.entry.get(); entry && entry->source)
      info.source = RunSource{config.policy.name, entry->source->path, entry->source->xxh3};
  refuse_same_names(info.traces);
  return info;
}

/// The request's options, with progress over all traces.
ReplayOptions options_for(const ReplayRequest& request, std::size_t index) {
  ReplayOptions options = request.options;
  if (!options.progress) return options;
  const double share = 1.0 / static_cast<double>(request.traces.size());
  options.progress = [report = request.options.progress, share, index](double done) {
    report((static_cast<double>(index) + done) * share);
  };
  return options;
}

}  // namespace

std::vector<ReplayConfig> with_references(std::vector<ReplayConfig> grid) {
  std::set<std::tuple<std::string, std::string, std::uint32_t>> known;
  for (const ReplayConfig& config : grid)
    known.insert({config.policy.name, config.budget.text(), config.prefill.chunk});
  const auto has_full = [&] {
    return std::any_of(grid.begin(), grid.end(),
                       [](const ReplayConfig& c) { return c.policy.name == "full"; });
  };
  const std::vector<ReplayConfig> asked = grid;
  for (const std::string_view name : replay_references())
    for (const ReplayConfig& config : asked) {
      if (config.budget.all) continue;
      if (!known.insert({std::string(name), config.budget.text(), config.prefill.chunk}).second)
        continue;
      grid.push_back({.policy = parse_policy(name, replay_references()),
                      .budget = config.budget,
                      .prefill = config.prefill,
                      .positions = Positions::original,
                      .seed = config.seed});
    }
  if (!has_full()) {
    ReplayConfig full{.policy = parse_policy("full"), .budget = {.all = true}};
    if (!grid.empty()) full.prefill = grid.front().prefill, full.seed = grid.front().seed;
    grid.push_back(std::move(full));
  }
  return grid;
}

Run replay_traces(const ReplayRequest& request) {
  if (request.traces.empty())
    throw std::invalid_argument("--trace: name at least one trace directory");
  std::vector<TraceReader> traces;
  for (const std::string& path : request.traces)
    traces.push_back(open_verified_trace(path, request.options.threads));
  Run run{.info = describe(request, traces)};
  for (std::size_t i = 0; i < traces.size(); ++i) {
    const auto sequence = static_cast<std::uint32_t>(i);
    const std::string& name = run.info.traces[i].name;
    const ReplayResult result = replay(traces[i], sequence, request.grid, options_for(request, i));
    const auto rows = result_rows(name, request.grid, request.options, result);
    if (i == 0)
      run.kept = kept_over_time(traces[i], sequence, name, request.grid, request.options, rows);
    run.rows.insert(run.rows.end(), rows.begin(), rows.end());
  }
  return run;
}

Run replay_to(const ReplayRequest& request, const std::filesystem::path& out) {
  StagedDirectory directory(out);
  Run run = replay_traces(request);
  save_run(run, directory.staging());
  directory.commit();
  return run;
}

}  // namespace kvlab
