#include "tools/options.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>

#include "policies/executor.hpp"
#include "sim/access/feature_traces.hpp"
#include "sim/plan/centre_file.hpp"
#include "sim/plan/format_plan.hpp"
#include "sim/source/policy_source.hpp"
#include "tools/embedding.hpp"
#include "traces/base/json.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

constexpr std::int64_t kMaxThreads = 1024;
constexpr std::int64_t kMaxSelected = 1 << 27;
// If work will take longer than kLongSeconds seconds, one line announces it. The line is printed
// kAnnounceSeconds seconds after the start, because the speed of the work is known by then.
constexpr double kAnnounceSeconds = 3, kLongSeconds = 15;

}  // namespace

void add_numbers_option(OptionTable& table, const char* name, std::uint32_t max_value,
                        std::vector<std::uint32_t>& target, std::string help) {
  const auto parse = [name, max_value](const std::string& list) {
    std::vector<std::uint32_t> numbers;
    for (const std::string& text : list_entries(list)) {
      std::uint32_t number = 0;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
      if (error != std::errc() || end != text.data() + text.size() || number < 1 ||
          number > max_value)
        throw std::invalid_argument(
            fmt::format("--{}: '{}' should be a number from 1 to {}", name, text, max_value));
      numbers.push_back(number);
    }
    return numbers;
  };
  table.parsed(name, "LIST", target, parse, std::move(help),
               fmt::format("{}", fmt::join(target, ",")));
}

void add_selection_options(OptionTable& table, SelectionOptions& selection,
                           const std::string& prefix) {
  const auto parse_shares = [](const std::string& list) {
    std::vector<double> shares;
    for (const std::string& text : list_entries(list)) {
      const Extent share = parse_extent(text, "--fetch-rate", 0);
      if (!share.is_share)
        throw std::invalid_argument(
            fmt::format("--fetch-rate: '{}' should be a share, such as 5%", text));
      shares.push_back(share.share_ppm * 1e-6);
    }
    return shares;
  };
  table.whole("selected", "K", {1, kMaxSelected}, selection.selected,
              prefix + "tokens that a query selects in each KV head");
  table.whole("page", "P", {1, kMaxSelected}, selection.page,
              prefix + "tokens for each entry of the index through which queries select tokens");
  table.parsed("fetch-rate", "LIST", selection.fetch_rates, parse_shares,
               prefix + "shares of the selected tokens that are fetched, such as 2%,5%,10%");
}

void refuse_hub_name(const std::string& model) {
  if (model.empty()) return;
  std::error_code error;
  const bool like_a_name = std::count(model.begin(), model.end(), '/') == 1 &&
                           model.front() != '/' && model.front() != '.' && model.back() != '/';
  if (!like_a_name || std::filesystem::exists(std::filesystem::path(model), error) ||
      std::filesystem::exists(std::filesystem::path(model).parent_path(), error))
    return;
  throw std::invalid_argument(fmt::format(
      "--model: there is no directory {}; if it is a name on the Hugging Face hub, fetch it first "
      "(huggingface-cli download {} --local-dir DIR) and give --model DIR",
      model, model));
}

void require_model(const GivenOptions& given, const std::string& model, std::string_view example) {
  given.require("model", example);
  refuse_hub_name(model);
}

void refuse_beside_policy_file(const GivenOptions& given) {
  given.refuse({"policy", "budget", "tiers", "centre", "positions", "prefill", "request-threshold"},
               "--policy-file already sets it");
}

void refuse_lone_budget(const CacheOptions& caches) {
  if (!caches.sweep.budgets.empty())
    throw std::invalid_argument(
        "--budget: the full cache has no budget; give a policy that evicts: --policy h2o");
}

void refuse_lone_modes(const GivenOptions& given) {
  given.refuse({"prefill", "positions"},
               "it has no effect on the full cache, and no policy is given");
}

namespace {

/// `--policy`; if it was not given, the policies of `--policy-source`; if there are none, `full`.
std::vector<std::string> requested_policies(const CacheOptions& caches,
                                            const CompiledPolicies& compiled) {
  if (!caches.sweep.policies.empty()) return caches.sweep.policies;
  if (compiled.entries.empty()) {
    refuse_lone_budget(caches);
    return {"full"};
  }
  std::vector<std::string> names;
  for (const auto& entry : compiled.entries) names.emplace_back(entry->info.name);
  return names;
}

/// A progress bar. On a terminal it is drawn again for each percent, at most ten times a second and
/// at least every second. If standard error is not a terminal, one line says how long the work will
/// take.
class Bar {
 public:
  explicit Bar(std::string label) : label_(std::move(label)) {}
  ~Bar() {
    if (drawn_) fmt::print(stderr, "\n");
  }
  Bar(const Bar&) = delete;
  Bar& operator=(const Bar&) = delete;

  void show(double fraction) {
    const std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (percent_ < 0) first_ = fraction, started_ = now;
    const double seconds = std::chrono::duration<double>(now - started_).count();
    if (!terminal_) return announce(fraction, seconds);
    const int percent = static_cast<int>(std::clamp(fraction, 0.0, 1.0) * 100);
    const auto pause = std::chrono::milliseconds(percent > percent_ ? 100 : 1000);
    if (percent < 100 && now - last_ < pause) return;
    if (percent == 100 && percent_ == 100) return;
    percent_ = std::max(percent, percent_);
    last_ = now;
    draw(time_left(first_, fraction, seconds));
  }

 private:
  void announce(double fraction, double seconds) {
    percent_ = std::max(percent_, 0);
    if (announced_) return;
    const std::string text = announcement(first_, fraction, seconds);
    announced_ = !text.empty() || seconds >= kAnnounceSeconds;
    if (!text.empty()) fmt::print(stderr, "kvlab {}: {}\n", label_, text);
  }

  void draw(const std::string& left) {
    constexpr int kWidth = 40;
    drawn_ = true;
    fmt::print(stderr, "\r{} [{:<{}}] {:3}% {:<14}", label_,
               std::string(static_cast<std::size_t>(percent_ * kWidth / 100), '#'), kWidth,
               percent_, left);
    std::fflush(stderr);
  }

  std::string label_;
  bool terminal_ = isatty(STDERR_FILENO) != 0;
  std::mutex mutex_;
  int percent_ = -1;
  bool drawn_ = false, announced_ = false;
  double first_ = 0;
  std::chrono::steady_clock::time_point started_, last_;
};

}  // namespace

namespace {

/// The plan of `@FILE`. Throws std::invalid_argument if it is for centred keys and --centre was not
/// given.
TierPlan plan_from(const std::string& text, const CacheOptions& caches) {
  PlanFile file = read_plan_file(text.substr(1));
  if (file.centre != KeyCentre::none && caches.centre_text.empty())
    throw std::invalid_argument(
        fmt::format("--tiers {}: the plan is for centred keys; add --centre {}, or --centre none "
                    "to run it without",
                    printable(text), printable(file.centre.text())));
  return std::move(file.tier_plan);
}

}  // namespace

CentreSetting centre_of_option(const std::string& text) {
  if (text.empty()) return {};
  CentreSetting centre = parse_key_centre(text);
  load_centre(centre);
  return centre;
}

void add_tiers_option(OptionTable& table, CacheOptions& caches) {
  table.texts("tiers", "FORMAT:SHARE,...", Takes::one_word, caches.tiers,
              "precision of keys and values, in the memory that the budget takes in 16 bit: one "
              "format such as 16, fp8, 8, 4, k4v2 or q4_0, a tier plan such as 16:16t,4:100%, "
              "formats by layer such as 8x2-4x28, or @FILE of `kvlab plan`. auto: runs several "
              "plans. May be given several times (default: 16)");
  table.text(
      "centre", "none|prompt|@FILE", caches.centre_text,
      "prompt: subtract the mean of the prompt's first 128 keys from each key before it is "
      "quantized. @FILE: subtract the vectors of a file of `kvlab plan --centre-out`. Neither "
      "changes attention weights. It applies to the plans of --tiers that quantize keys "
      "(default: none)");
  table.check([&caches](const GivenOptions&) {
    caches.centre = centre_of_option(caches.centre_text);
    if (!caches.tiers.empty()) caches.tier_plans.clear();
    for (const std::string& text : caches.tiers)
      if (text == "auto")
        for (const char* const standard : kStandardTierPlans)
          caches.tier_plans.push_back(parse_tier_plan(standard));
      else if (text.starts_with('@'))
        caches.tier_plans.push_back(plan_from(text, caches));
      else
        caches.tier_plans.push_back(parse_tier_plan(text));
    if (caches.centre != KeyCentre::none &&
        std::ranges::none_of(caches.tier_plans, &TierPlan::is_quantized))
      throw std::invalid_argument(
          "--centre: no plan of --tiers quantizes keys; add --tiers 4, or leave --centre out");
  });
}

void add_cache_options(OptionTable& table, CacheOptions& caches, bool needs_policy) {
  const std::string without = needs_policy ? "not needed with --policy-source"
                                           : "default: full, or the policy of --policy-source";
  table.list(
      "policy", "P,...", caches.sweep.policies,
      "policies, such as h2o:sinks=4:recent=25%; `kvlab policies` lists them (" + without + ")");
  add_source_option(table, caches.sources);
  table.list("budget", "B,...", caches.sweep.budgets,
             "cache size of a KV head during decoding: in tokens or as a share of the length "
             "(64,128,20%), in bytes (64KiB,20%bytes), by head from a file (@FILE), or split by a "
             "formula such as pyramid(20%)");
  add_tiers_option(table, caches);
  table.list("prefill", "MODE,...", caches.sweep.prefills,
             "how the prompt is processed: dense (at once, then evict), chunk:N (N tokens, then "
             "evict) or stream (token by token)");
  table.list("positions", "original|cache", caches.sweep.positions,
             "positions for RoPE: those in the text (original), or the live tokens numbered 0, 1, "
             "2, ... (cache) (default: the policy's own)");
  add_seed_option(table, caches.sweep.seed);
}

void add_seed_option(OptionTable& table, std::uint64_t& seed) {
  table.whole("seed", "N", {0, std::numeric_limits<std::int64_t>::max()}, seed, "random seed");
}

void add_source_option(OptionTable& table, std::vector<std::string>& sources) {
  table.texts("policy-source", "FILE.hpp", Takes::one_word, sources,
              "header of your own policy, like those in policies/; the command compiles it; may be "
              "given several times");
}

void add_features_option(OptionTable& table, std::vector<std::string>& features) {
  table.texts("features", "TRACE", Takes::one_word, features,
              "trace that begins with exactly the tokens of a prompt and has the features that "
              "policies with `once` read. May be given several times, once for each prompt");
}

void add_threshold_option(OptionTable& table, double& threshold) {
  table.number("request-threshold", "TAU", threshold,
               "a query requests a token if its attention is at least TAU times the query's "
               "largest attention");
  table.check([&threshold](const GivenOptions&) {
    if (!(threshold >= 0 && threshold <= 1))
      throw std::invalid_argument(
          fmt::format("--request-threshold: {} should be between 0 and 1", threshold));
  });
}

void add_output_error_option(OptionTable& table, bool& every_output_error, std::string help) {
  const auto is_all = [](const std::string& text) {
    if (text != "sample" && text != "all")
      throw std::invalid_argument(
          fmt::format("--output-error: '{}' should be sample or all", text));
    return text == "all";
  };
  table.parsed("output-error", "sample|all", every_output_error, is_all, std::move(help), "sample");
}

void add_threads_option(OptionTable& table, unsigned& threads) {
  threads = default_threads();
  table.whole("threads", "N", {1, kMaxThreads}, threads, "number of threads (default: all cores)",
              "");
}

void add_model_option(OptionTable& table, std::string& model) {
  table.text("model", "DIR", model, "checkpoint: config.json, safetensors files, tokenizer.json");
}

void add_json_option(OptionTable& table, bool& json) {
  table.flag("json", json, "print one JSON object");
}

namespace {

/// The device of `--device`.
Device device_from(const std::string& text) {
  if (text == "cpu") return Device::cpu;
  if (text != "cuda")
    throw std::invalid_argument(fmt::format("--device: '{}' should be cpu or cuda", text));
  if (!cuda_in_build())
    throw std::invalid_argument("--device: cuda is not in this build; use --device cpu");
  if (!has_cuda_device())
    throw std::runtime_error("--device: no CUDA device on this machine; use --device cpu");
  return Device::cuda;
}

/// The features of `--features`; null if none are given.
std::shared_ptr<const FeatureSource> features_of(const CacheOptions& caches,
                                                 const CommonOptions& common) {
  if (caches.features.empty()) return nullptr;
  if (common.device == Device::cuda) throw std::invalid_argument(cpu_only("--features"));
  return std::make_shared<const FeatureTraces>(caches.features, common.threads);
}

}  // namespace

void add_common_options(OptionTable& table, CommonOptions& common, std::optional<Device> standard) {
  add_threads_option(table, common.threads);
  table.parsed("device", "cpu|cuda", common.device, device_from,
               "device to run on (default: cuda if there is a CUDA device, but cpu for replay and "
               "bench replay)");
  add_json_option(table, common.json);
  table.check([&common, standard](const GivenOptions& given) {
    if (given.has("device")) return;
    common.device = standard ? *standard : has_cuda_device() ? Device::cuda : Device::cpu;
  });
}

bool has_policy_sources(const CacheOptions& caches) {
  const Embedding* const within = Embedding::current();
  return !caches.sources.empty() || (within && !within->policies().entries.empty());
}

CompiledPolicies compiled_policies(const CacheOptions& caches, const CommonOptions& common) {
  CompiledPolicies all;
  if (!caches.sources.empty()) all = compile_policy_sources(caches.sources);
  for (const auto& entry : all.entries)
    if (entry->source->has_old_names)
      fmt::print(
          stderr,
          "kvlab: {}: uses names of versions before 0.6, which the next release will refuse; "
          "docs/guides/write-a-policy.md has the current names\n",
          entry->source->path);
  if (const Embedding* const within = Embedding::current())
    all.entries.insert(all.entries.end(), within->policies().entries.begin(),
                       within->policies().entries.end());
  all.feature_source = features_of(caches, common);
  return all;
}

std::vector<std::string> apply_tier_plans(const std::vector<std::string>& policies,
                                          const std::vector<TierPlan>& tier_plans,
                                          const CentreSetting& centre,
                                          std::span<const std::string_view> oracles) {
  std::vector<std::string> all;
  for (const std::string& policy : policies)
    if (std::ranges::find(oracles, policy) != oracles.end())
      all.push_back(policy);
    else
      for (const TierPlan& tier_plan : tier_plans) {
        std::string text = policy;
        if (!tier_plan.is_plain()) text += ":" + tier_plan.setting();
        if (tier_plan.is_quantized() && centre != KeyCentre::none)
          text += ":centre=" + centre.text();
        all.push_back(std::move(text));
      }
  return all;
}

std::vector<CacheConfig> sweep_of(const CacheOptions& caches, const CompiledPolicies& compiled,
                                  const LeaveOut& leave_out,
                                  std::span<const std::string_view> oracles) {
  SweepRequest sweep = caches.sweep;
  sweep.policies = apply_tier_plans(requested_policies(caches, compiled), caches.tier_plans,
                                    caches.centre, oracles);
  return make_sweep(sweep, oracles, compiled, leave_out);
}

LeaveOut report_omissions(std::string command) {
  return [command = std::move(command)](const std::string& line) {
    fmt::print(stderr, "kvlab {}: {}\n", command, line);
  };
}

CacheConfig only_config(const CacheOptions& caches, const CompiledPolicies& compiled) {
  const std::vector<std::string>& policies = caches.sweep.policies;
  if (caches.sweep.budgets.empty() && policies.size() == 1 && policies.front() != "full")
    throw std::invalid_argument(fmt::format(
        "--budget: policy {} needs one; give tokens or a share: --budget 128", policies.front()));
  if (policies == std::vector<std::string>{"full"}) refuse_lone_budget(caches);
  const auto sweep = sweep_of(caches, compiled);
  if (sweep.size() != 1)
    throw std::invalid_argument(fmt::format(
        "{} configurations are requested, but this command runs only one; give one policy, "
        "budget, prefill mode and position mode",
        sweep.size()));
  return sweep.front();
}

namespace {

/// The time as text: "1:05", "2:45:00".
std::string clock_text(double seconds) {
  const std::int64_t all = std::llround(seconds), hours = all / 3600, minutes = all / 60 % 60;
  return hours ? fmt::format("{}:{:02}:{:02}", hours, minutes, all % 60)
               : fmt::format("{}:{:02}", minutes, all % 60);
}

}  // namespace

std::string time_left(double first, double done, double seconds) {
  if (done <= first || done >= 1 || seconds < 1) return "";
  return clock_text(seconds * (1 - done) / (done - first)) + " left";
}

std::string announcement(double first, double done, double seconds) {
  if (done <= first || done >= 1 || seconds < kAnnounceSeconds) return "";
  const double left = seconds * (1 - done) / (done - first);
  return left < kLongSeconds ? ""
                             : fmt::format("about {} left, {} in all", clock_text(left),
                                           clock_text(seconds + left));
}

std::function<void(double)> progress_bar(std::string label) {
  if (const Embedding* const within = Embedding::current())
    return within->progress() ? within->progress() : [](double) {};
  return [bar = std::make_shared<Bar>(std::move(label))](double fraction) { bar->show(fraction); };
}

void announce_traces(std::string_view command, const ModelShape& shape, std::uint64_t tokens,
                     std::string_view where) {
  constexpr double kMegabyte = 1e6, kLarge = 100;
  const std::uint64_t heads = std::uint64_t{shape.query_heads} + 2 * shape.kv_heads;
  const double megabytes =
      static_cast<double>(tokens * shape.layers * heads * shape.head_size * bytes_of(shape.dtype)) /
      kMegabyte;
  if (megabytes >= kLarge)
    fmt::print(stderr, "kvlab {}: writes up to {:.0f} MB of traces {}\n", command, megabytes,
               where);
}

std::vector<std::string> text_names(const std::vector<std::string>& paths) {
  constexpr std::string_view kTaken = "all";  // the name of metrics over all texts
  if (std::ranges::find(paths, kTaken) != paths.end())
    throw std::invalid_argument(
        "--text: the name 'all' stands for all texts in the results; write ./all");
  std::vector<std::string> names;
  std::set<std::string_view> seen;  // views of `names`, whose memory is reserved below
  names.reserve(paths.size());
  for (const std::string& path : paths) {
    names.push_back(std::filesystem::path(path).stem().string());
    if (names.back() == kTaken || !seen.insert(names.back()).second) return paths;
  }
  return names;
}

std::string read_text(const std::string& path) {
  return read_text_file(path, std::size_t{1} << 30);
}

void print_json(const nlohmann::ordered_json& json) {
  const std::string text = printable_json(json_text(json));
  if (Embedding* const within = Embedding::current())
    within->json = text;
  else
    fmt::print("{}\n", text);
}

void refuse_unwritable(const std::string& path, std::string_view option) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (std::filesystem::is_directory(path, error))
    throw std::runtime_error(fmt::format("{}: {} is a directory; give a file", option, path));
  if (!folder.empty() && !std::filesystem::is_directory(folder, error))
    throw std::runtime_error(
        fmt::format("{}: {}: parent directory {} does not exist; make it first", option, path,
                    folder.string()));
}

void refuse_existing(const std::string& path, std::string_view option) {
  std::error_code error;
  if (std::filesystem::exists(std::filesystem::symlink_status(path, error)))
    throw std::runtime_error(
        fmt::format("{}: {} exists already; give a path that does not exist", option, path));
}

void refuse_missing_parent(const std::string& path, std::string_view option) {
  const std::filesystem::path whole = (std::filesystem::path(path) / "").lexically_normal();
  const std::filesystem::path folder = whole.parent_path().parent_path();
  std::error_code error;
  if (!folder.empty() && !std::filesystem::is_directory(folder, error))
    throw std::runtime_error(
        fmt::format("{}: {}: parent directory {} does not exist; make it first", option, path,
                    folder.string()));
}

}  // namespace kvlab
