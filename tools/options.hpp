// Options that several commands share: one spelling, one default, one error each.
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

/// Of results in which every policy keeps every token.
inline constexpr std::string_view kBudgetKeepsAll =
    "budget all keeps every token, so no policy evicted anything; to compare policies give tokens "
    "or a share: --budget 128,20%";

/// What an option holds; `name` is that of its value in --help, `standard` the default, if any.
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

/// The text of `--name`. Throws std::invalid_argument if it was not given; `example` says what
/// would be right: "--model DIR".
std::string required(const po::variables_map& options, const char* name, std::string_view example);
/// The entries of the list `--name`, less the space around each; none where it was not given.
std::vector<std::string> list_from(const po::variables_map& options, const char* name);
void add_tiers_option(po::options_description& options);
/// Those of `--tiers`, of which `auto` stands for several; one of 16 bit if none is given.
std::vector<TierPlan> tier_plans_from(const po::variables_map& options);
/// The number of `--name`, which is a value<std::int64_t> (Boost reads -1 as a large unsigned).
/// Throws std::invalid_argument outside [least, most].
std::int64_t number_from(const po::variables_map& options, const char* name, std::int64_t least,
                         std::int64_t most);
/// The same of a number that 32 bits hold.
std::uint32_t count_from(const po::variables_map& options, const char* name, std::int64_t least,
                         std::int64_t most);
/// `--seed`.
std::uint64_t seed_from(const po::variables_map& options);

/// `--policy-source` alone, any number of times, for commands that take no sweep.
void add_source_option(po::options_description& options);
/// `--features`, for commands that run prompts which are known beforehand.
void add_features_option(po::options_description& options);
/// The policies of `--policy-source`, compiled, and the features of `--features`. Throws as
/// compile_policy_sources and FeatureTraces do.
CompiledPolicies policy_sources_from(const po::variables_map& options);

/// The sweep that `--policy`, `--budget`, … ask for: every policy x budget (x prefill x positions),
/// each once. `compiled` is what policy_sources_from() gave. Without `--policy`: those, or else
/// `full`. Positions default to each policy's own; `full` is one row
/// with budget `all`, and a reference comes with original positions only. Throws
/// std::invalid_argument: an unknown name, a policy that evicts without a budget, protected tokens
/// that do not fit a budget in tokens.
std::vector<CacheConfig> sweep_from(const po::variables_map& options,
                                    std::span<const std::string_view> oracles,
                                    const CompiledPolicies& compiled,
                                    const LeaveOut& leave_out = nullptr);
/// Prints what is left out of a command's sweep to standard error.
LeaveOut left_out_of(std::string command);
/// The sweep with the policies of `--policy-source`, if any.
std::vector<CacheConfig> sweep_from(const po::variables_map& options,
                                    std::span<const std::string_view> oracles = {});
/// The configuration where there can be only one: throws std::invalid_argument if a list was
/// given.
CacheConfig only_config(const po::variables_map& options);

/// Throws std::invalid_argument for the first of `names` that was given: "--NAME: WHY; leave it
/// out".
void refuse_given(const po::variables_map& options, std::initializer_list<const char*> names,
                  std::string_view why);
/// The same for options that say how `--needed` is done, where that was not given.
void refuse_without(const po::variables_map& options, const char* needed,
                    std::initializer_list<const char*> names);
/// Throws std::invalid_argument for options that say what `--policy-file` says.
void refuse_beside_policy_file(const po::variables_map& options);

/// Throws std::invalid_argument for a `--budget` that no policy would heed: without any, the cache
/// is `full`.
void refuse_lone_budget(const po::variables_map& options);

/// `--threads`, at least 1; default: all cores.
unsigned threads_from(const po::variables_map& options);
/// `--device`, by default cuda where this build and this machine have it. Throws
/// std::invalid_argument for cuda in a build without it, std::runtime_error without a device.
Device device_from(const po::variables_map& options);
/// For a command that runs on the CPU: throws std::invalid_argument for --device cuda.
void check_device(const po::variables_map& options);

/// What a bar says when fraction `done` is reached `seconds` after fraction `first`: "1:05 left",
/// or nothing as long as there is nothing to go by.
std::string time_left(double first, double done, double seconds);
/// What is said once where there is no terminal: "about 1:40 left, 1:45 in all"; nothing as long as
/// there is little to go by, or where little is left.
std::string announcement(double first, double done, double seconds);
/// A bar with the time left on standard error, or one line where that is no terminal and the work
/// long; call with the fraction done, from any thread. The first call says where the work begins.
std::function<void(double)> progress_bar(std::string label);

/// Says before a large write how large it will be, on standard error: traces of so many tokens of a
/// model, "in TMPDIR, one at a time" or the like. Nothing of less than 100 MB.
void announce_traces(std::string_view command, const ModelShape& shape, std::uint64_t tokens,
                     std::string_view where);

/// What each text is called: its file's name without the extension, or the whole path where two
/// would have one name, or one would be `all`. Throws std::invalid_argument for a path `all`.
std::vector<std::string> text_names(const std::vector<std::string>& paths);

/// `--output-error`: whether errors are taken on all queries, not on a sample.
bool every_output_error_from(const po::variables_map& options);
/// A text of at most 1 GiB. Throws as read_text_file() does.
std::string read_text(const std::string& path);

/// One JSON value on standard output. Bytes that are not UTF-8 (in a folder's name, say) become
/// U+FFFD.
void print_json(const nlohmann::ordered_json& json);

/// Throws std::runtime_error if no file could be written at `path`, which is a folder or lies in
/// none: before the work, not after it.
void refuse_unwritable(const std::string& path, std::string_view option);
/// Throws std::invalid_argument for what looks like a model's name on the Hugging Face hub and is
/// no folder.
void refuse_hub_name(const std::string& model);
/// Throws std::runtime_error if the folder in which `path` would be made is not there.
void refuse_homeless(const std::string& path, std::string_view option);
/// Throws std::runtime_error if `path` exists.
void refuse_existing(const std::string& path, std::string_view option);

}  // namespace kvlab
