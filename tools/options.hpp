// Options that several commands share, with one spelling, default and error for each.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "engine/backend.hpp"
#include "sim/replay.hpp"
#include "tools/command.hpp"
#include "traces/base/text.hpp"

namespace kvlab {

/// The message for results in which every policy keeps every token.
inline constexpr std::string_view kBudgetKeepsAll =
    "budget all keeps every token, so no policy evicted anything; to compare policies give tokens "
    "or a share: --budget 128,20%";

/// The value of an option. `name`: its name in --help. `standard`: the default, if any.
po::typed_value<std::string>* text_option(const char* name);
po::typed_value<std::string>* text_option(const char* name, const char* standard);
po::typed_value<std::int64_t>* number_option(const char* name);
po::typed_value<std::int64_t>* number_option(const char* name, std::int64_t standard);

/// `--policy`, `--policy-source`, `--budget`, `--prefill`, `--positions`, `--seed`.
void add_policy_options(po::options_description& options, bool needs_policy = false);
/// `--request-threshold`, as a share of the row's largest probability.
void add_threshold_option(po::options_description& options);
/// Throws std::invalid_argument if it is not between 0 and 1.
double threshold_from(const po::variables_map& options);
/// `--threads`, `--json`, `--device`.
void add_common_options(po::options_description& options);

/// The text of `--name`. Throws std::invalid_argument if it is missing; `example` shows correct
/// use: "--model DIR".
std::string required(const po::variables_map& options, const char* name, std::string_view example);
/// The entries of the list `--name`, without surrounding spaces; empty if it was not given.
std::vector<std::string> list_from(const po::variables_map& options, const char* name);
void add_tiers_option(po::options_description& options);
/// The tier plans of `--tiers`, of which `auto` means several; a plan of 16 bit if none is given.
std::vector<TierPlan> tier_plans_from(const po::variables_map& options);
/// The number of `--name`, which is a value<std::int64_t> (Boost reads -1 as a large unsigned
/// number). Throws std::invalid_argument outside [least, most].
std::int64_t number_from(const po::variables_map& options, const char* name, std::int64_t least,
                         std::int64_t most);
/// The same for a number of 32 bits.
std::uint32_t count_from(const po::variables_map& options, const char* name, std::int64_t least,
                         std::int64_t most);
/// `--seed`.
std::uint64_t seed_from(const po::variables_map& options);

/// `--policy-source` alone, which may be repeated, for commands without a sweep.
void add_source_option(po::options_description& options);
/// `--features`, for commands whose prompts are known in advance.
void add_features_option(po::options_description& options);
/// The compiled policies of `--policy-source` and the features of `--features`. Throws as
/// compile_policy_sources and FeatureTraces do.
CompiledPolicies policy_sources_from(const po::variables_map& options);

/// The sweep that `--policy`, `--budget`, … request: every policy x budget (x prefill x positions),
/// each once. `compiled` comes from policy_sources_from(). Without `--policy` the sweep has the
/// compiled policies, or else `full`. Positions default to each policy's own. `full` is one row
/// with budget `all`; oracles have original positions only. Throws std::invalid_argument for an
/// unknown name, a policy that evicts without a budget, and protected tokens that do not fit a
/// budget in tokens.
std::vector<CacheConfig> sweep_from(const po::variables_map& options,
                                    std::span<const std::string_view> oracles,
                                    const CompiledPolicies& compiled,
                                    const LeaveOut& leave_out = nullptr);
/// Prints configurations that a command leaves out to standard error.
LeaveOut left_out_of(std::string command);
/// The sweep, with the policies of `--policy-source` if there are any.
std::vector<CacheConfig> sweep_from(const po::variables_map& options,
                                    std::span<const std::string_view> oracles = {});
/// The configuration of a command that takes only one. Throws std::invalid_argument if a list was
/// given.
CacheConfig only_config(const po::variables_map& options);

/// Throws std::invalid_argument for the first of `names` that was given: "--NAME: WHY; leave it
/// out".
void refuse_given(const po::variables_map& options, std::initializer_list<const char*> names,
                  std::string_view why);
/// Throws the same for options that need `--needed`, if that was not given.
void refuse_without(const po::variables_map& options, const char* needed,
                    std::initializer_list<const char*> names);
/// Throws std::invalid_argument for options that `--policy-file` already sets.
void refuse_beside_policy_file(const po::variables_map& options);

/// Throws std::invalid_argument for a `--budget` without a policy, because `full` has no budget.
void refuse_lone_budget(const po::variables_map& options);

/// `--threads`, at least 1; number of threads (default: all cores).
unsigned threads_from(const po::variables_map& options);
/// `--device`, by default cuda if this build and this machine have it. Throws std::invalid_argument
/// for cuda in a build without it, std::runtime_error without a device.
Device device_from(const po::variables_map& options);
/// For a command that runs on the CPU only. Throws std::invalid_argument for --device cuda.
void check_device(const po::variables_map& options);

/// The text of a progress bar at fraction `done`, `seconds` after fraction `first`: "1:05 left", or
/// "" if there is too little to estimate from.
std::string time_left(double first, double done, double seconds);
/// The line that is printed once without a terminal: "about 1:40 left, 1:45 in all"; "" if there is
/// too little to estimate from, or little time is left.
std::string announcement(double first, double done, double seconds);
/// A progress bar with the time left on standard error; or one line, if that is not a terminal and
/// the work is long. Call it with the fraction done, from any thread. The first call marks where
/// the work begins.
std::function<void(double)> progress_bar(std::string label);

/// Prints to standard error before a write of at least 100 MB how large it will be: traces of
/// `tokens` tokens of a model. `where`: "in TMPDIR, one at a time", for example.
void announce_traces(std::string_view command, const ModelShape& shape, std::uint64_t tokens,
                     std::string_view where);

/// The name of each text: its file's name without the extension, or the whole path if two would
/// have the same name, or one would be `all`. Throws std::invalid_argument for a path `all`.
std::vector<std::string> text_names(const std::vector<std::string>& paths);

/// `--output-error`: whether errors are measured on all queries instead of a sample.
bool every_output_error_from(const po::variables_map& options);
/// Reads a text of at most 1 GiB. Throws as read_text_file() does.
std::string read_text(const std::string& path);

/// Prints one JSON value to standard output. Bytes that are not UTF-8 (in a folder's name, for
/// example) become U+FFFD.
void print_json(const nlohmann::ordered_json& json);

/// Throws std::runtime_error before the work if no file can be written at `path`: it is a folder,
/// or its parent folder does not exist.
void refuse_unwritable(const std::string& path, std::string_view option);
/// Throws std::invalid_argument if `model` looks like a name on the Hugging Face hub and is not a
/// folder.
void refuse_hub_name(const std::string& model);
/// Throws std::runtime_error if the parent folder of `path` does not exist.
void refuse_homeless(const std::string& path, std::string_view option);
/// Throws std::runtime_error if `path` exists.
void refuse_existing(const std::string& path, std::string_view option);

}  // namespace kvlab
