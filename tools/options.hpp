// Options that several commands share, with one spelling, default and error for each.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/backend.hpp"
#include "sim/budgets/budget_file.hpp"
#include "sim/replay.hpp"
#include "tools/option_table.hpp"
#include "traces/base/text.hpp"

namespace kvlab {

/// The message for results in which every policy keeps every token.
inline constexpr std::string_view kBudgetKeepsAll =
    "budget all keeps every token, so no policy evicted anything; to compare policies give tokens "
    "or a share: --budget 128,20%";

/// The values of `--threads`, `--device` and `--json`.
struct CommonOptions {
  unsigned threads = 1;
  Device device = Device::cpu;
  bool json = false;
};
/// `--threads` defaults to all cores. `--device` defaults to `standard`. If `standard` is empty, it
/// defaults to cuda if this build and this machine support it, and to cpu otherwise. For `--device
/// cuda` the option throws std::invalid_argument in a build without CUDA, and std::runtime_error on
/// a machine without a CUDA device.
void add_common_options(OptionTable& table, CommonOptions& common,
                        std::optional<Device> standard = std::nullopt);
void add_threads_option(OptionTable& table, unsigned& threads);
void add_json_option(OptionTable& table, bool& json);
/// `--model`, the directory of a checkpoint.
void add_model_option(OptionTable& table, std::string& model);

/// Which caches a command runs: policies, budgets, tier plans and how prompts are processed.
struct CacheOptions {
  SweepRequest sweep;
  std::vector<std::string> tiers;  ///< the texts of --tiers
  std::vector<TierPlan> tier_plans{
      TierPlan{}};                    ///< the parsed --tiers; by default one plan, in 16 bit
  CentreSetting centre;               ///< for the plans that quantize
  std::string centre_text;            ///< the text of --centre
  std::vector<std::string> sources;   ///< files of --policy-source
  std::vector<std::string> features;  ///< traces of --features
};
/// `--policy`, `--policy-source`, `--budget`, `--tiers`, `--centre`, `--prefill`, `--positions`,
/// `--seed`.
void add_cache_options(OptionTable& table, CacheOptions& caches, bool needs_policy = false);
void add_seed_option(OptionTable& table, std::uint64_t& seed);
/// The setting that `--centre` gives; `none` if the text is empty. Reads the centre file. Throws
/// std::invalid_argument as parse_key_centre() does, and std::runtime_error as read_centre_file()
/// does.
CentreSetting centre_of_option(const std::string& text);
/// `--tiers`, where `auto` stands for several plans, and `--centre`.
void add_tiers_option(OptionTable& table, CacheOptions& caches);
/// `--request-threshold`, as a share of a query's largest attention probability, between 0 and 1.
void add_threshold_option(OptionTable& table, double& threshold);
/// `--policy-source`, which may be repeated.
void add_source_option(OptionTable& table, std::vector<std::string>& sources);
/// `--features`, for commands whose prompts are known in advance.
void add_features_option(OptionTable& table, std::vector<std::string>& features);
/// `--output-error`: whether errors are measured on all queries instead of a sample.
void add_output_error_option(OptionTable& table, bool& every_output_error, std::string help);

/// An option that takes a list of numbers from 1 to `max_value`.
void add_numbers_option(OptionTable& table, const char* name, std::uint32_t max_value,
                        std::vector<std::uint32_t>& target, std::string help);

/// Which tokens the queries of a refetching decoder select, and the share that is fetched.
struct SelectionOptions {
  std::uint32_t selected = 2048, page = 16;
  std::vector<double> fetch_rates;
};
/// `--selected`, `--page` and `--fetch-rate`. `prefix` is put before each help text.
void add_selection_options(OptionTable& table, SelectionOptions& selection,
                           const std::string& prefix = "");

/// Requires `--model`. Throws std::invalid_argument also if `model` looks like a name on the
/// Hugging Face hub and is not a folder.
void require_model(const GivenOptions& given, const std::string& model,
                   std::string_view example = "--model DIR, a checkpoint's directory");
/// Throws std::invalid_argument for options that `--policy-file` already sets.
void refuse_beside_policy_file(const GivenOptions& given);
/// Throws std::invalid_argument for a `--budget` without a policy, because `full` has no budget.
void refuse_lone_budget(const CacheOptions& caches);
/// Throws std::invalid_argument for `--prefill` and `--positions` without a policy.
void refuse_lone_modes(const GivenOptions& given);

/// Whether `--policy-source`, or the program that runs the command, gives policies.
bool has_policy_sources(const CacheOptions& caches);
/// The compiled policies of `--policy-source` and the features of `--features`. Throws as
/// compile_policy_sources and FeatureTraces do.
CompiledPolicies compiled_policies(const CacheOptions& caches, const CommonOptions& common = {});

/// The sweep that `--policy`, `--budget`, `--prefill` and `--positions` request: each combination
/// of their values once. Without `--policy`, the sweep has the compiled policies or, if there are
/// none, `full`. The default positions are those of each policy. `full` is one configuration with
/// budget `all`, and oracles only have original positions. Throws std::invalid_argument for an
/// unknown name, for a policy that evicts without a budget, and for protected tokens that do not
/// fit a budget in tokens.
std::vector<CacheConfig> sweep_of(const CacheOptions& caches, const CompiledPolicies& compiled,
                                  const LeaveOut& leave_out = nullptr,
                                  std::span<const std::string_view> oracles = {});
/// The text of each policy combined with each plan of `--tiers`. Oracles stay in 16 bit. `centre`
/// applies to the plans that quantize.
std::vector<std::string> apply_tier_plans(const std::vector<std::string>& policies,
                                          const std::vector<TierPlan>& tier_plans,
                                          const CentreSetting& centre,
                                          std::span<const std::string_view> oracles = {});
/// Returns a function that prints to standard error which configurations a command leaves out.
LeaveOut report_omissions(std::string command);
/// The configuration of a command that takes only one. Throws std::invalid_argument if a list was
/// given.
CacheConfig only_config(const CacheOptions& caches, const CompiledPolicies& compiled);

/// The time left, as a progress bar shows it: "1:05 left", or "" if it is too early for an
/// estimate. `first` is the fraction at which the work began, and `done` the fraction done after
/// `seconds` seconds.
std::string time_left(double first, double done, double seconds);
/// The line that replaces the progress bar if standard error is not a terminal: "about 1:40 left,
/// 1:45 in all". "" if it is too early for an estimate, or if little time is left.
std::string announcement(double first, double done, double seconds);
/// A progress bar on standard error that shows the time left. If standard error is not a terminal
/// and the work is long, prints one line instead. Call it with the fraction done, from any thread.
/// The first call says at which fraction the work begins.
std::function<void(double)> progress_bar(std::string label);

/// Prints to standard error how large the traces of `tokens` tokens of a model will be, if that is
/// at least 100 MB. `where` ends the sentence, for example "into TMPDIR, one text at a time".
void announce_traces(std::string_view command, const ModelShape& shape, std::uint64_t tokens,
                     std::string_view where);

/// The name of each text: its file's name without the extension. If two of these names are equal,
/// or one is `all`, returns the whole paths instead. Throws std::invalid_argument for a path `all`.
std::vector<std::string> text_names(const std::vector<std::string>& paths);

/// Reads a text of at most 1 GiB. Throws as read_text_file() does.
std::string read_text(const std::string& path);

/// Prints one JSON value to standard output. Bytes that are not UTF-8 (in a folder's name, for
/// example) become U+FFFD.
void print_json(const nlohmann::ordered_json& json);

/// Throws std::runtime_error if no file can be written at `path`, because it is a folder or its
/// parent folder does not exist. Called before the work begins.
void refuse_unwritable(const std::string& path, std::string_view option);
/// Throws std::invalid_argument if `model` looks like a name on the Hugging Face hub and is not a
/// folder.
void refuse_hub_name(const std::string& model);
/// Throws std::runtime_error if the parent folder of `path` does not exist.
void refuse_missing_parent(const std::string& path, std::string_view option);
/// Throws std::runtime_error if `path` exists.
void refuse_existing(const std::string& path, std::string_view option);

}  // namespace kvlab
