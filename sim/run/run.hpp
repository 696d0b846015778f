// A run: what one `kvlab replay` leaves behind, and all that reports and deployment need.
//   results.csv   the metrics
//   blocks.csv    the metrics by block of queries, by which two are paired (absent in older runs)
//   run.json      what was asked, of which traces, by which version
//   kept.json     what some heads kept over time (absent where nothing could be shown)
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sim/run/results.hpp"

namespace kvlab {

inline constexpr int kRunFormat = 1;

/// A trace as a run remembers it.
struct RunTrace {
  std::string name, path;  ///< the directory's name; where it was, as requested
  std::string hash;        ///< TraceReader::hash()
  std::uint32_t tokens = 0, prompt_tokens = 0;
  std::string model, dtype;
  std::uint32_t layers = 0, query_heads = 0, kv_heads = 0, head_size = 0;
  std::string weights_xxh3, tokenizer_xxh3;  ///< 16 hex digits, or empty
  JsonValue capture;                         ///< engine, version, device, options
  std::string same_text_as = {};             ///< another trace, which counts; empty: this one does
  std::vector<std::uint32_t> numbers = {};   ///< of the layers; empty: 0, 1, 2, …
  /// Beside `layers`: those with a window, which keep it as window does; and the bytes of their
  /// keys and values over decoded queries, 16 bit.
  std::uint32_t window_layers = 0;
  double window_mean_bytes = 0, window_peak_bytes = 0;

  std::uint32_t number(std::uint32_t layer) const {
    return numbers.empty() ? layer : numbers[layer];
  }
  /// "15 layers with a window beside them keep 1.2 MiB of keys and values, at most 1.3 MiB", or "".
  std::string windows_text() const;
  bool operator==(const RunTrace&) const = default;
};
RunTrace describe(const TraceReader& trace, const std::string& path);

/// One configuration of the sweep, as text.
struct RunConfig {
  std::string policy, params, budget, prefill, positions;
  std::uint64_t seed = 0;
  HeadBudgets budgets = {};  ///< what the budget's file said; empty: there was none

  bool operator==(const RunConfig&) const = default;
};

/// Where a policy of the sweep came from that is not kvlab's own.
struct RunSource {
  std::string policy, path;
  std::string xxh3;  ///< of the header's text

  bool operator==(const RunSource&) const = default;
};

struct RunInfo {
  std::string version;
  std::vector<RunTrace> traces;
  std::vector<RunConfig> sweep;
  Queries queries = Queries::decode;
  double threshold = 0.01;
  bool every_output_error = false;
  std::vector<std::uint32_t> layers;  ///< empty: all
  std::vector<RunSource> sources;     ///< of --policy-source
  std::string projections_xxh3;       ///< weights of --model; empty: none was given

  bool operator==(const RunInfo&) const = default;
};

/// How long one token was kept: the first and the last of the shown queries that spanned it.
struct Lifetime {
  std::uint32_t position, first_query, last_query;
  bool operator==(const Lifetime&) const = default;
};

/// What one configuration kept in the shown head.
struct KeptSeries {
  std::string policy, params, positions;
  std::vector<Lifetime> lifetimes;  ///< by position, then first query
  bool operator==(const KeptSeries&) const = default;
};

/// What the full cache gave a token at a query.
struct Glance {
  std::uint32_t position;
  std::uint32_t level;  ///< 255 times the root of the probability, rounded; never 0
  bool operator==(const Glance&) const = default;
};

/// What one head kept over time.
struct KeptHead {
  std::uint32_t layer = 0, head = 0;
  std::vector<KeptSeries> series;
  std::vector<std::vector<Glance>> attention;  ///< by query shown; empty in older runs
  bool operator==(const KeptHead&) const = default;
};

/// What some heads kept over time, at one budget.
struct Kept {
  std::string trace, budget, prefill;
  std::uint32_t budget_tokens = 0;
  std::vector<std::uint32_t> queries;  ///< those looked at, ascending positions
  std::vector<std::int32_t> ids;       ///< of the trace's tokens; empty in older runs
  std::vector<KeptHead> heads;         ///< at least one
  bool operator==(const Kept&) const = default;
};

/// From kept sets at ascending queries to each token's lifetimes.
std::vector<Lifetime> lifetimes_of(std::span<const KeptSet> sets);

struct Run {
  RunInfo info;
  std::vector<ResultRow> rows;
  std::optional<Kept> kept;
  std::string hash;  ///< XXH3-64 of run.json, which holds that of results.csv; set by save and load
};

/// Each row's text: its trace's hash, by which a trace that is given twice counts once; and whether
/// it counts.
void name_texts(std::span<ResultRow> rows, const RunInfo& info);

/// What a replay does not measure.
inline constexpr std::string_view kReplayNote = "Offline replay; task accuracy was not measured.";

/// Measured queries, over the different traces of the rows.
std::uint64_t scored_tokens(const RunInfo& info, std::span<const ResultRow> rows);

/// What a replay computes, as JSON: equal jobs give equal runs, wherever their traces lie. `build`
/// names the program, whose arithmetic and policies are part of the job.
nlohmann::json job_of(const RunInfo& info, const std::string& build);

/// Writes the four files. Sets run.hash.
void save_run(Run& run, const std::filesystem::path& directory);

/// Throws std::runtime_error that names the file (and line or key): missing, not valid, a later
/// format, or results.csv changed after run.json was written.
Run load_run(const std::filesystem::path& directory);

}  // namespace kvlab
