// A run: the results of one `kvlab replay`, from which pages are made and policies are deployed.
// Its files:
//
//     results.csv    the metrics
//     blocks.csv     the metrics by block of queries, for paired comparisons; absent in older runs
//     run.json       the request, the traces, the version
//     lru_curve.csv  what lru fetches at every budget; only with refetch
//     kept.json      the tokens that some heads kept over time; absent if there are none to show
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/run/results.hpp"

namespace kvlab {

inline constexpr int kRunFormat = 1;

/// A trace as a run records it.
struct RunTrace {
  std::string name, path;  ///< name of the directory, and path as requested
  std::string hash;        ///< TraceReader::hash()
  std::uint32_t tokens = 0, prompt_tokens = 0;
  std::string model, dtype;
  std::uint32_t layers = 0, query_heads = 0, kv_heads = 0, head_size = 0;
  std::string weights_xxh3, tokenizer_xxh3;  ///< 16 hex digits, or empty
  JsonValue capture;                         ///< engine, version, device, options
  /// Name of another trace that has the same text and is used instead; empty if this trace is used.
  std::string same_text_as = {};
  std::vector<std::uint32_t> numbers = {};  ///< layer numbers; empty: 0, 1, 2, …
  /// Number of layers with a sliding window, in addition to `layers`, and the 16-bit bytes of their
  /// keys and values over decoded queries.
  std::uint32_t window_layers = 0;
  double window_mean_bytes = 0, window_peak_bytes = 0;

  std::uint32_t number(std::uint32_t layer) const {
    return numbers.empty() ? layer : numbers[layer];
  }
  /// Whether both traces come from one model. Traces without a checksum of the weights, such as
  /// those of Trace.from_arrays(), are compared by the model's name.
  bool is_of_model(const RunTrace& other) const {
    return weights_xxh3 == other.weights_xxh3 && (!weights_xxh3.empty() || model == other.model);
  }
  /// The text of kvlab::windows_text() for this trace.
  std::string windows_text() const;
  bool operator==(const RunTrace&) const = default;
};
RunTrace describe(const TraceReader& trace, const std::string& path);

/// One configuration of the sweep, as text.
struct RunConfig {
  std::string policy, params, budget, prefill, positions;
  std::uint64_t seed = 0;
  /// Budgets by head, if the budget was read from a file; otherwise empty.
  HeadBudgets budgets = {};

  bool operator==(const RunConfig&) const = default;
};

/// The source of a policy that is not part of kvlab.
struct RunSource {
  std::string policy, path;
  std::string xxh3;  ///< hash of the header's text

  bool operator==(const RunSource&) const = default;
};

/// A centre file that configurations of the sweep name.
struct RunCentreFile {
  std::string path;
  std::string xxh3;  ///< hash of the file's bytes

  bool operator==(const RunCentreFile&) const = default;
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
  std::vector<RunCentreFile> centre_files;
  std::string refetch;  ///< the selector of --refetch as typed; empty: not given
  /// With --refetch logged: maximum number of tokens that a query selects in the traces.
  std::uint32_t selected_tokens = 0;
  std::string projections_xxh3;  ///< hash of the weights of --model; empty: not given

  bool operator==(const RunInfo&) const = default;
};

/// Throws std::invalid_argument if the traces come from several models. `what`: what a run of
/// several models cannot be used for, as in "deploy".
void refuse_several_models(const RunInfo& info, std::string_view what);

/// A period in which a token was kept. It is given by the first and the last shown query in that
/// period.
struct Lifetime {
  std::uint32_t position, first_query, last_query;
  bool operator==(const Lifetime&) const = default;
};

/// The tokens that one configuration kept in the shown head.
struct KeptSeries {
  std::string policy, params, positions;
  std::vector<Lifetime> lifetimes;  ///< by position, then first query
  bool operator==(const KeptSeries&) const = default;
};

/// The attention that a query of the full cache gives a token.
struct Glance {
  std::uint32_t position;
  std::uint32_t level;  ///< 255 times the square root of the probability, rounded; never 0
  bool operator==(const Glance&) const = default;
};

/// The tokens that one head kept over time.
struct KeptHead {
  std::uint32_t layer = 0, head = 0;
  std::vector<KeptSeries> series;
  std::vector<std::vector<Glance>> attention;  ///< by shown query; empty in older runs
  bool operator==(const KeptHead&) const = default;
};

/// The tokens that some heads kept over time, at one budget.
struct Kept {
  std::string trace, budget, prefill;
  std::uint32_t budget_tokens = 0;
  std::vector<std::uint32_t> queries;  ///< shown queries, ascending positions
  std::vector<std::int32_t> ids;       ///< token ids of the trace; empty in older runs
  std::vector<KeptHead> heads;         ///< at least one
  bool operator==(const Kept&) const = default;
};

/// Converts sets of kept tokens, ordered by query, to the periods in which each token was kept.
std::vector<Lifetime> lifetimes_of(std::span<const KeptSet> sets);

/// How much `lru` fetches on a trace with one size of the device buffer, over all replayed KV
/// heads.
struct LruPoint {
  std::string trace;
  std::uint32_t budget_tokens = 0;
  double fetch_rate = 0, fetch_bytes = 0;
  bool operator==(const LruPoint&) const = default;
};

/// The mean over the traces at each budget that all traces have, in the order of the budgets.
/// `trace` of a result is empty.
std::vector<LruPoint> mean_lru_curve(std::span<const LruPoint> curve);
/// A sentence with the smallest budgets at which lru fetches at most 20%, 10%, … of the selected
/// tokens, for the means over the traces; empty if no budget reaches 20%.
std::string buffer_sizes_text(std::span<const LruPoint> curve);

struct Run {
  RunInfo info;
  std::vector<ResultRow> rows;
  std::optional<Kept> kept;
  std::vector<LruPoint> lru_curve = {};  ///< by trace, then budget; empty without refetch
  /// XXH3-64 of run.json, which contains the hash of results.csv. Set by save_run() and load_run().
  std::string hash;
};

/// Sets `text` and `counts` of each row. `text` is the hash of the row's trace. So if a trace was
/// given twice, it is used once.
void name_texts(std::span<ResultRow> rows, const RunInfo& info);

/// A note for recommendations about what a replay does not measure.
inline constexpr std::string_view kReplayNote = "Offline replay; task accuracy was not measured.";

/// Number of measured queries, summed over the different traces of the rows.
std::uint64_t scored_tokens(const RunInfo& info, std::span<const ResultRow> rows);

/// Describes as JSON everything on which the results of a replay depend. Equal jobs give equal
/// runs, even if their traces are stored in different places. `build` identifies the program,
/// because results depend on its arithmetic and its policies.
nlohmann::json job_of(const RunInfo& info, const std::string& build);

/// Writes the files of a run. Sets run.hash.
void save_run(Run& run, const std::filesystem::path& directory);

/// Reads a run. Throws std::runtime_error, which names the file (and the line or key), if a file is
/// missing or invalid, if it has the format of a later version, or if results.csv was changed after
/// run.json was written.
Run load_run(const std::filesystem::path& directory);

}  // namespace kvlab
