#include "sim/run/replay_run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <tuple>

#include "sim/access/full_attention.hpp"
#include "sim/metrics.hpp"
#include "sim/run/overlap.hpp"
#include "sim/run/ranking.hpp"
#include "sim/run/run.hpp"
#include "sim/run/run_folder.hpp"
#include "traces/base/cancel.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/parallel.hpp"
#include "traces/base/process.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

// Selects the kept tokens that the page of a run shows: those of two heads at one budget, over
// time, for some policies.

constexpr std::size_t kMaxQueries = 512;
constexpr std::size_t kMaxSeries = 6;
constexpr std::size_t kShownHeads = 2;

/// Returns the configurations to show. These are configurations at `budget` with the prefill mode
/// of the first of them. Each policy with its parameters is shown only once. The choice comes
/// first. `window` and the best other policy (by mean) come next, and then the remaining policies,
/// ordered by mean. oracle_attention comes last.
std::vector<const CacheConfig*> select_shown(std::span<const CacheConfig> sweep,
                                             const MetricTable& metric_table,
                                             std::string_view budget, const MetricInfo& metric) {
  std::vector<const CacheConfig*> configs;
  const CacheConfig* oracle = nullptr;
  const CacheConfig* first = nullptr;
  for (const CacheConfig& config : sweep) {
    if (config.budget.text() != budget || config.policy.name == kOracleTopk) continue;
    if (!first) first = &config;
    if (config.prefill.chunk != first->prefill.chunk) continue;
    const bool known = std::any_of(configs.begin(), configs.end(), [&](const CacheConfig* other) {
      return other->policy.text() == config.policy.text();
    });
    if (config.policy.name == kOracleAttention)
      oracle = &config;
    else if (!known)
      configs.push_back(&config);
  }
  const Ranking ranking = rank_policies(metric_table, budget, metric);
  auto ranked = ranking.ranked;
  if (!ranked.empty())  // puts the choice first, even if its mean is not the lowest
    std::rotate(ranked.begin(), ranked.begin() + static_cast<std::ptrdiff_t>(ranking.winner),
                ranked.begin() + static_cast<std::ptrdiff_t>(ranking.winner) + 1);
  const auto place = [&](const CacheConfig* config) {
    for (std::size_t i = 0; i < ranked.size(); ++i) {
      const Series& series = metric_table.series()[ranked[i].series];
      if (series.policy == config->policy.name && series.params == config->policy.params_text())
        return i > 1 && series.policy == "window" ? std::size_t{2} : 2 * i + (i > 1);
    }
    return 2 * ranked.size() + 1;
  };
  std::ranges::stable_sort(configs, {}, place);
  if (configs.size() > kMaxSeries) configs.resize(kMaxSeries);
  if (oracle) configs.push_back(oracle);
  return configs;
}

/// Returns the heads on which the recall at `budget` differs most between policies, with the
/// largest difference first. Heads of different layers are preferred.
std::vector<Scope> most_different_heads(std::span<const ResultRow> rows, std::string_view budget) {
  struct Spread {
    double lowest = std::numeric_limits<double>::infinity(), highest = -lowest;
  };
  std::map<Scope, Spread> spreads;
  for (const ResultRow& row : rows) {
    if (row.head < 0 || row.budget != budget || row.metric != "recall") continue;
    if (is_oracle(row.policy)) continue;
    Spread& spread = spreads[{row.layer, row.head}];
    spread.lowest = std::min(spread.lowest, row.value);
    spread.highest = std::max(spread.highest, row.value);
  }
  std::vector<Scope> heads;
  while (heads.size() < kShownHeads && !spreads.empty()) {
    const auto widest =
        std::max_element(spreads.begin(), spreads.end(), [](const auto& a, const auto& b) {
          return a.second.highest - a.second.lowest < b.second.highest - b.second.lowest;
        });
    const Scope head = widest->first;
    heads.push_back(head);
    const bool other_layers = std::ranges::any_of(
        spreads, [&](const auto& entry) { return entry.first.layer != head.layer; });
    std::erase_if(spreads, [&](const auto& entry) {
      return other_layers ? entry.first.layer == head.layer : entry.first.head == head.head;
    });
  }
  return heads;
}

/// Returns the tokens whose attention is large enough to be drawn. A level is 255 times the square
/// root of the probability, so that small probabilities are visible.
std::vector<Glance> glances_of(const std::vector<float>& attention) {
  constexpr std::uint32_t kFaintest = 10;  // the level of probabilities from 0.0014 on
  std::vector<Glance> glances;
  for (std::uint32_t j = 0; j < attention.size(); ++j) {
    const auto level = static_cast<std::uint32_t>(std::lround(255 * std::sqrt(attention[j])));
    if (level >= kFaintest) glances.push_back({j, level});
  }
  return glances;
}

/// Positions of at most kMaxQueries measured queries, at equal distances.
std::vector<std::uint32_t> shown_queries(const TraceReader& trace, Queries which) {
  const auto all = MeasuredQueries(trace.segments(), which, 1).sampled_queries();
  std::vector<std::uint32_t> queries;
  const std::size_t count = std::min(all.size(), kMaxQueries);
  for (std::size_t i = 0; i < count; ++i)
    queries.push_back(all[count < 2 ? 0 : i * (all.size() - 1) / (count - 1)]);
  return queries;
}

/// Returns which tokens the policies of `sweep` kept on two heads of `trace` at the measured
/// queries, and the full cache's attention on these heads. Shows the middle budget of the run, and
/// the heads on which recall differs most between policies. `rows`: the rows of the trace in
/// results.csv. Returns nullopt if there is no budget or no policy.
std::optional<Kept> kept_over_time(const TraceReader& trace, std::uint32_t sequence,
                                   std::string_view trace_name, std::span<const CacheConfig> sweep,
                                   const ReplayOptions& options, std::span<const ResultRow> rows) {
  const MetricTable metric_table(rows);
  if (metric_table.budgets().empty() || !trace.has_tensors()) return std::nullopt;
  const BudgetColumn& budget = metric_table.budgets()[(metric_table.budgets().size() - 1) / 2];
  const auto heads = most_different_heads(rows, budget.text);
  const auto configs =
      select_shown(sweep, metric_table, budget.text, *find_metric(best_metric(rows)));
  if (configs.empty() || heads.empty()) return std::nullopt;

  Kept kept{.trace = std::string(trace_name),
            .budget = budget.text,
            .prefill = configs.front()->prefill.text(),
            .budget_tokens = budget.min_tokens,
            .queries = shown_queries(trace, options.queries),
            .ids = trace.ids(),
            .heads = std::vector<KeptHead>(heads.size())};
  for (std::size_t h = 0; h < heads.size(); ++h)
    kept.heads[h] = {static_cast<std::uint32_t>(heads[h].layer),
                     static_cast<std::uint32_t>(heads[h].head),
                     std::vector<KeptSeries>(configs.size()),
                     {}};
  // One more job per head computes the full cache's attention.
  const std::size_t jobs = configs.size() + 1;
  parallel_for(heads.size() * jobs, options.threads, [&](std::size_t i) {
    KeptHead& head = kept.heads[i / jobs];
    const CacheConfig& config = *configs[std::min(i % jobs, configs.size() - 1)];
    if (i % jobs == configs.size()) {
      FullAttention full(trace, trace.shape().layer_of(head.layer), head.head, config.threshold);
      for (const std::uint32_t query : kept.queries)
        head.attention.push_back(glances_of(full.mean_row(query)));
      return;
    }
    const auto sets =
        kept_sets(trace, sequence, config, options, head.layer, head.head, kept.queries);
    head.series[i % jobs] = {config.policy.name, config.policy.params_text(),
                             std::string(name_of(config.positions)), lifetimes_of(sets)};
  });
  return kept;
}

/// Throws if the trace has a name that cannot be written to results.csv and run.json.
void refuse_unwritable(const RunTrace& trace) {
  using nlohmann::json;
  const json name = trace.name;
  const bool is_utf8 = name.dump(-1, ' ', false, json::error_handler_t::replace) ==
                       name.dump(-1, ' ', false, json::error_handler_t::ignore);
  if (!is_utf8 || has_controls(trace.name))
    throw std::invalid_argument(
        fmt::format("--trace: the name of the directory {} should be UTF-8 without control "
                    "characters, because results carry it; rename it",
                    json_quoted(trace.name)));
}

void refuse_same_names(const std::vector<RunTrace>& traces) {
  std::set<std::string> names;
  for (const RunTrace& trace : traces)
    if (!names.insert(trace.name).second)
      throw std::invalid_argument(
          fmt::format("--trace: two traces are called {}; results are listed by the directory's "
                      "name, so rename one",
                      trace.name));
}

/// Returns the budget of each head; empty if `budget` has none. If a budget file has one number for
/// all heads, the result has this number as its only entry.
HeadBudgets budgets_of(const Budget& budget) {
  if (!budget.heads.empty() || budget.file.empty()) return budget.heads;
  return {{budget.extent.tokens}};
}

/// Position of the first measured query.
std::size_t first_measured(const TraceReader& trace, Queries queries) {
  const auto first = std::ranges::find(trace.segments(), SegmentKind::decode, &Segment::kind);
  return queries == Queries::all || first == trace.segments().end() ? 0 : first->start;
}

/// Finds traces whose text also occurs in a longer trace of the same model, and sets
/// RunTrace::same_text_as. The text of a trace is not known if all its ids are equal, as they are
/// if Trace.from_arrays() gets none.
void find_overlaps(RunInfo& info, std::span<const TraceReader* const> traces) {
  std::map<std::string, std::vector<TextPiece>> pieces;  // key: hash of the weights, or the model
  for (std::size_t t = 0; t < traces.size(); ++t) {
    const RunTrace& trace = info.traces[t];
    const std::vector<std::int32_t>& ids = traces[t]->ids();
    if (std::ranges::adjacent_find(ids, std::ranges::not_equal_to{}) == ids.end()) continue;
    pieces[trace.weights_xxh3.empty() ? "model " + trace.model : trace.weights_xxh3].push_back(
        {.text = t, .ids = ids, .first_scored = first_measured(*traces[t], info.queries)});
  }
  for (const auto& [model, own] : pieces)
    for (const Overlaps::Pair& pair : overlaps_of(own).pairs)
      info.traces[pair.text].same_text_as = info.traces[pair.other].name;
}

RunInfo describe(const ReplayRequest& request, std::span<const TraceReader* const> traces) {
  RunInfo info{.version = KVLAB_RELEASE,
               .queries = request.options.queries,
               .every_output_error = request.options.every_output_error,
               .layers = request.options.layers};
  for (std::size_t i = 0; i < traces.size(); ++i)
    info.traces.push_back(describe(*traces[i], request.traces[i]));
  for (const CacheConfig& config : request.sweep)
    info.sweep.push_back({config.policy.name, config.policy.params_text(), config.budget.text(),
                          config.prefill.text(), std::string(name_of(config.positions)),
                          config.seed, budgets_of(config.budget)});
  if (const auto& refetch = request.options.refetch) {
    info.refetch = refetch->text;
    for (const TraceReader* const trace : traces)
      if (refetch->kind == Selector::Kind::logged)
        info.selected_tokens = std::max(info.selected_tokens, max_selected(*refetch, *trace));
  }
  if (const auto& output = request.options.output) info.projections_xxh3 = output->weights_xxh3;
  if (!request.sweep.empty()) info.threshold = request.sweep.front().threshold;
  for (const CacheConfig& config : request.sweep)
    if (const PolicyEntry* entry = config.policy.entry.get(); entry && entry->source) {
      const RunSource source{config.policy.name, entry->source->path, entry->source->xxh3};
      if (std::ranges::find(info.sources, source) == info.sources.end())
        info.sources.push_back(source);
    }
  for (const CacheConfig& config : request.sweep)
    if (const auto& constants = config.policy.centre.constants) {
      const RunCentreFile file{config.policy.centre.file, constants->xxh3};
      if (std::ranges::find(info.centre_files, file) == info.centre_files.end())
        info.centre_files.push_back(file);
    }
  std::ranges::for_each(info.traces, refuse_unwritable);
  refuse_same_names(info.traces);
  find_overlaps(info, traces);
  return info;
}

/// XXH3-64 of the file of the running program. It is part of the job, because another build may
/// compute other values of metrics.
std::string build_hash() {
  const auto program = program_file();
  return program.empty() ? "" : xxh3_hex(MappedFile(program).bytes());
}

/// Opens and verifies the traces. The processes of one host share the work of verifying.
std::vector<TraceReader> open_traces(const ReplayRequest& request, const ProcessGroup& group) {
  if (request.traces.empty())
    throw std::invalid_argument("--trace: name at least one trace directory");
  std::vector<TraceReader> traces;
  for (const std::string& path : request.traces) {
    const bool mine = traces.size() % static_cast<std::size_t>(group.host_size()) ==
                      static_cast<std::size_t>(group.host_rank());
    traces.push_back(mine ? open_verified_trace(path, request.options.threads)
                          : TraceReader::open(path));
  }
  return traces;
}

std::vector<const TraceReader*> pointers_to(const std::vector<TraceReader>& traces) {
  std::vector<const TraceReader*> pointers;
  pointers.reserve(traces.size());
  for (const TraceReader& trace : traces) pointers.push_back(&trace);
  return pointers;
}

/// Adds what `lru` fetches at every budget that is large enough for the tokens that one query
/// selects. `fetches`: ReplayResult::lru_fetches.
void add_lru_curve(Run& run, const ReplayRequest& request, const std::string& name,
                   const TraceReader& trace, std::span<const std::uint64_t> fetches) {
  if (!request.options.refetch) return;
  if (fetches.empty())
    return request.notice(
        fmt::format("lru_curve.csv does not cover {}, because a prompt follows decoded tokens, so "
                    "that what lru has seen depends on the budget",
                    name));
  const auto queries = MeasuredQueries(trace.segments(), request.options.queries, 1).size();
  const auto bytes = static_cast<double>(kv_bytes_per_token(trace.shape().head_size));
  for (std::size_t budget = max_selected(*request.options.refetch, trace) + std::size_t{1};
       budget < fetches.size(); ++budget) {
    const auto fetched = static_cast<double>(fetches[budget]);
    run.lru_curve.push_back({name, static_cast<std::uint32_t>(budget),
                             fetches[0] ? fetched / static_cast<double>(fetches[0]) : 0.0,
                             fetched * bytes / queries});
  }
}

/// Adds the result of the replay of trace `t` to `run`. For the first trace, also adds the tokens
/// that some heads kept.
void add_trace(Run& run, const ReplayRequest& request, std::size_t t, const TraceReader& trace,
               const ReplayResult& result) {
  const std::string& name = run.info.traces[t].name;
  auto rows = result_rows(name, request.sweep, request.options, result);
  name_texts(rows, run.info);
  if (t == 0) run.kept = kept_over_time(trace, 0, name, request.sweep, request.options, rows);
  run.rows.insert(run.rows.end(), rows.begin(), rows.end());
  add_lru_curve(run, request, name, trace, result.lru_fetches);
}

/// All head tasks of a request, numbered over all traces. The numbers are the same in every
/// process.
class ReplaySweepJob {
 public:
  ReplaySweepJob(const ReplayRequest& request, const ProcessGroup& group)
      : request_(request),
        traces_(open_traces(request, group)),
        info_(describe(request, pointers_to(traces_))),
        job_json_(job_of(info_, build_hash() + (request.options.elsewhere ? " on CUDA" : ""))),
        job_hash_(hash_of(job_json_)),
        jobs_(traces_.size()) {
    // Creates all jobs now, so that errors in the request are found immediately and not after
    // hours.
    for (std::size_t t = 0; t < traces_.size(); ++t)
      for (std::size_t u = 0; u < job(t)->tasks(); ++u) ids_.push_back({job_hash_, t, u});
  }

  const std::vector<TraceReader>& traces() const { return traces_; }
  const RunInfo& info() const { return info_; }
  const nlohmann::json& job_json() const { return job_json_; }
  std::string fingerprint() const { return fmt::format("{:016x}", job_hash_); }
  const std::vector<HeadTaskId>& tasks() const { return ids_; }

  /// Runs one head task and returns its outcomes as bytes. Callable from any thread.
  std::string compute(std::size_t task) {
    const HeadTaskId& id = ids_[task];
    return pack_head_task(id, job(id.trace)->run(id.task));
  }

  /// Runs some head tasks. The head tasks of one trace run together. Calls each(head task, bytes)
  /// for every head task.
  void compute_together(const std::vector<std::size_t>& tasks,
                        const std::function<void(std::size_t, const std::string&)>& each) {
    for (auto first = tasks.begin(); first != tasks.end();) {
      const auto end = std::find_if(
          first, tasks.end(), [&](std::size_t u) { return ids_[u].trace != ids_[*first].trace; });
      std::vector<std::size_t> indices;
      for (auto u = first; u != end; ++u) indices.push_back(ids_[*u].task);
      const auto outcomes = job(ids_[*first].trace)->run_together(indices);
      for (auto u = first; u != end; ++u)
        each(*u, pack_head_task(ids_[*u], outcomes[static_cast<std::size_t>(u - first)]));
      first = end;
    }
  }

  /// Whether the folder has the result of the head task. A damaged file is reported to the user and
  /// is treated as missing.
  bool is_finished(const RunFolder& folder, const HeadTaskId& id) const {
    try {
      const auto bytes = folder.read_unit(id.trace, id.task);
      if (bytes) unpack_head_task(id, *bytes, folder.unit_path(id.trace, id.task).string());
      return bytes.has_value();
    } catch (const std::runtime_error& error) {
      request_.notice(fmt::format("{}; the head task is computed again", error.what()));
      return false;
    }
  }

  /// Makes the run from the files of all head tasks in the folder.
  Run collect(const RunFolder& folder) {
    Run run{.info = info_};
    for (std::size_t t = 0; t < traces_.size(); ++t)
      add_trace(run, request_, t, traces_[t], gather(folder, t));
    return run;
  }

 private:
  static std::uint64_t hash_of(const nlohmann::json& job) {
    const std::string text = job.dump();
    return std::stoull(xxh3_hex(text), nullptr, 16);
  }

  /// The job of a trace. It is created for the first head task of the trace and freed after the
  /// last one, because a job needs memory for each token of the trace.
  std::shared_ptr<const ReplayJob> job(std::size_t trace) {
    const std::lock_guard lock(mutex_);
    auto found = jobs_[trace].lock();
    if (!found) {
      found = std::make_shared<const ReplayJob>(traces_[trace], static_cast<std::uint32_t>(trace),
                                                request_.sweep, request_.options);
      jobs_[trace] = latest_ = found;
    }
    return found;
  }

  ReplayResult gather(const RunFolder& folder, std::size_t trace) {
    const auto tasks = job(trace);
    ReplayGathering gathering(*tasks);
    for (std::size_t u = 0; u < tasks->tasks(); ++u) {
      const std::string file = folder.unit_path(trace, u).string();
      const auto bytes = folder.read_unit(trace, u);
      if (!bytes) throw std::runtime_error(file + ": has disappeared; run the same command again");
      gathering.put(u, unpack_head_task({job_hash_, trace, u}, *bytes, file));
    }
    return gathering.result();
  }

  const ReplayRequest& request_;
  std::vector<TraceReader> traces_;
  RunInfo info_;
  nlohmann::json job_json_;
  std::uint64_t job_hash_;
  std::vector<HeadTaskId> ids_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<const ReplayJob>> jobs_;  // by trace
  std::shared_ptr<const ReplayJob> latest_;
};

/// Counts finished head tasks and reports the progress.
class Progress {
 public:
  Progress(const ReplayRequest& request, std::size_t done, std::size_t all)
      : show_(request.options.progress), done_(done), all_(all) {
    show();
  }
  void add_one() {
    const std::lock_guard lock(mutex_);
    ++done_;
    show();
  }

 private:
  void show() {
    if (show_) show_(static_cast<double>(done_) / static_cast<double>(all_));
  }
  std::function<void(double)> show_;
  std::mutex mutex_;
  std::size_t done_, all_;
};

/// The head tasks that still have to be computed.
std::vector<std::size_t> missing_tasks(const ReplayRequest& request, const ReplaySweepJob& job,
                                       const RunFolder& folder) {
  const auto& tasks = job.tasks();
  std::vector<std::size_t> missing;
  for (std::size_t u = 0; u < tasks.size(); ++u)
    if (!job.is_finished(folder, tasks[u])) missing.push_back(u);
  if (missing.size() < tasks.size())
    request.notice(fmt::format("continuing {}: {} of {} head tasks are finished",
                               folder.staging().string(), tasks.size() - missing.size(),
                               tasks.size()));
  return missing;
}

/// Reports the traces that comparisons leave out because another trace has the same text.
void note_overlaps(const ReplayRequest& request, const RunInfo& info) {
  for (const RunTrace& trace : info.traces)
    if (!trace.same_text_as.empty())
      request.notice(fmt::format(
          "{} and {} have the same text; a text counts only once, so comparisons leave {} out",
          trace.same_text_as, trace.name, trace.name));
}

/// Reports the traces whose gradients the replay cannot use, because they were summed over queries
/// other than the measured ones.
void note_other_gradients(const ReplayRequest& request,
                          std::span<const TraceReader* const> traces) {
  std::string names;
  for (std::size_t t = 0; t < traces.size(); ++t)
    if (traces[t]->gradient_samples() > traces[t]->gradient_samples(request.options.queries))
      names += (names.empty() ? "" : ", ") + request.traces[t];
  if (!names.empty())
    request.notice(fmt::format(
        "no kl_estimate for {}, because the gradients were not summed over --queries {}; "
        "run python -m kvlab.hf sensitivities with this option and --replace",
        names, name_of(request.options.queries)));
}

/// Reports the traces that have only selections, because their results lack metrics of attention.
void note_missing_attention(const ReplayRequest& request,
                            std::span<const TraceReader* const> traces) {
  std::string names;
  for (std::size_t t = 0; t < traces.size(); ++t)
    if (!traces[t]->has_tensors()) names += (names.empty() ? "" : ", ") + request.traces[t];
  if (!names.empty())
    request.notice(
        fmt::format("no recall, miss_rate, output_error or other metric of attention for {}, "
                    "because a trace of selections has no queries, keys and values",
                    names));
}

Run lead(const ReplayRequest& request, const std::filesystem::path& out, ReplaySweepJob& job,
         ProcessGroup& group) {
  note_other_gradients(request, pointers_to(job.traces()));
  note_missing_attention(request, pointers_to(job.traces()));
  note_overlaps(request, job.info());
  RunFolder folder(out, job.job_json(), request.fresh);
  const auto& tasks = job.tasks();
  const auto missing = missing_tasks(request, job, folder);
  Progress progress(request, tasks.size() - missing.size(), tasks.size());
  const auto finished = [&](std::size_t u, const std::string& bytes) {
    folder.write_unit(tasks[u].trace, tasks[u].task, bytes);
    progress.add_one();
  };
  const auto compute = [&](std::size_t u) { return job.compute(u); };
  try {
    if (request.options.elsewhere)
      job.compute_together(missing, finished);
    else
      share_work(group, missing, request.options.threads, compute, finished);
    Run run = job.collect(folder);
    folder.commit(run);
    return run;
  } catch (const Cancelled& error) {
    throw folder.add_run_name(error);
  }
}

/// Throws unless all processes have the same job. `fingerprint` is a text that identifies the job.
void check_alike(ProcessGroup& group, const std::string& fingerprint) {
  const auto said = group.exchange(fingerprint);
  if (said[static_cast<std::size_t>(group.rank())] != said[0])
    throw std::runtime_error(
        "the traces, the options or the build differ from those of process 0; start all processes "
        "with the same ones");
}

}  // namespace

void check_budgets(ReplayRequest& request, std::span<const TraceReader* const> traces) {
  std::uint32_t longest = 0;
  for (const TraceReader* const trace : traces) {
    check_selections(request.options.refetch, request.options.queries, *trace);
    longest = std::max(longest, trace->tokens());
  }
  // Key: the budget. Value: whether any policy evicts at this budget.
  std::map<std::string, bool> evicts;
  const auto check = [&](const CacheConfig& config) {
    bool any = false;
    for (const TraceReader* const trace : traces) {
      check_refetch(request.options.refetch, config, *trace);
      any = tokens_within(config, *trace) < trace->tokens() || any;
    }
    if (config.evicts() && !config.budget.all && config.budget.is_even())
      evicts[config.budget.text()] = evicts[config.budget.text()] || any;
  };
  request.sweep = configs_that_fit(std::move(request.sweep), check, request.notice);
  for (const auto& [budget, any] : evicts)
    if (!any)
      request.notice(
          fmt::format("budget {} holds all {} tokens of the longest trace, so nothing is evicted",
                      budget, longest));
}

SweepRequest sweep_with(SweepRequest request, const std::optional<Selector>& refetch) {
  if (refetch && request.positions.empty()) request.positions = {"original"};
  return request;
}

std::vector<CacheConfig> add_references(std::vector<CacheConfig> sweep, bool refetch) {
  std::set<std::tuple<std::string, std::string, std::uint32_t>> known;
  for (const CacheConfig& config : sweep)
    known.insert({config.policy.name, config.budget.text(), config.prefill.chunk});
  const std::vector<CacheConfig> requested = sweep;
  const auto add = [&](const CacheConfig& beside, std::string_view name, Budget budget) {
    CacheConfig config = beside;
    config.policy = parse_policy(name, replay_oracles());
    config.budget = budget;
    config.positions = Positions::original;
    sweep.push_back(std::move(config));
  };
  static constexpr std::string_view kBoth[] = {kOracleAttention, kOracleTopk};
  const std::span<const std::string_view> names =
      refetch ? std::span(&kBelady, 1) : std::span<const std::string_view>(kBoth);
  for (const std::string_view name : names)
    for (const CacheConfig& config : requested)
      if (!config.budget.all &&
          known.insert({std::string(name), config.budget.text(), config.prefill.chunk}).second)
        add(config, name, config.budget);
  if (std::ranges::none_of(requested, &CacheConfig::is_full))
    add(requested.empty() ? CacheConfig{} : requested.front(), "full", {.extent = {}, .all = true});
  return sweep;
}

std::optional<Run> replay_to(const ReplayRequest& request, const std::filesystem::path& out,
                             ProcessGroup& group) {
  std::optional<ReplaySweepJob> job;
  if (!do_together(group, [&] { job.emplace(request, group); }) ||
      !do_together(group, [&] { check_alike(group, job->fingerprint()); }))
    return std::nullopt;
  try {
    if (group.leads()) return lead(request, out, *job, group);
    share_work(group, {}, request.options.threads, [&](std::size_t u) { return job->compute(u); },
               {});
    return std::nullopt;
  } catch (const std::exception& error) {
    if (group.size() == 1) throw;
    group.abort();
    throw std::runtime_error(
        fmt::format("process {} of {}: {}", group.rank(), group.size(), error.what()));
  }
}

Run replay_in_memory(const ReplayRequest& request, std::span<const TraceReader* const> traces) {
  Run run{.info = describe(request, traces)};
  note_other_gradients(request, traces);
  note_missing_attention(request, traces);
  note_overlaps(request, run.info);
  for (std::size_t t = 0; t < traces.size(); ++t) {
    ReplayOptions options = request.options;
    if (options.progress)
      options.progress = [&, t](double done) {
        request.options.progress((static_cast<double>(t) + done) /
                                 static_cast<double>(traces.size()));
      };
    add_trace(run, request, t, *traces[t],
              replay(*traces[t], static_cast<std::uint32_t>(t), request.sweep, options));
  }
  return run;
}

}  // namespace kvlab
