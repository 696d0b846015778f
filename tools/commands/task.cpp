#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <optional>

#include "engine/evaluation/task/answers.hpp"
#include "engine/evaluation/task/run.hpp"
#include "policies/catalogue.hpp"
#include "sim/report/recommendation.hpp"
#include "tools/options.hpp"
#include "tools/turns.hpp"
#include "traces/base/cancel.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

constexpr std::int64_t kMaxWords = 1'000'000, kMostSamples = 100'000, kMaxNeedles = 64;
constexpr std::uint32_t kCpuRows = 16, kCudaRows = 128;  // caches in a batch

void add_options(po::options_description& options) {
  auto add = options.add_options();
  add("task", text_option("passkey|needle|recall"), "the task; the word `--task` may be left out");
  add("model", text_option("DIR"), "checkpoint: config.json, safetensors files, tokenizer.json");
  add("query-aware", po::bool_switch(),
      "the question is in the prompt, so it is seen before anything is evicted");
  add("query-agnostic", po::bool_switch(),
      "the question comes after the context has been evicted to the budget (default; with both "
      "switches, both are run)");
  add("words", text_option("LIST", "250,500"), "lengths of the context, in words");
  add("depth", text_option("LIST", "0%,25%,50%,75%,100%"), "depths of the answer in the context");
  add("samples", number_option("N", 4),
      "questions at each length and depth; the same for every policy and budget");
  add("kind", text_option("single|multi-key|multi-value"),
      "needle: one number (single), 4 keys of which one is asked for (multi-key), or 4 numbers of "
      "a key (multi-value) (default: single)");
  add("keys", number_option("N"),
      "needle: number of keys in the text; the question is for one of them");
  add("values", number_option("N"), "needle: number of values of each key");
  add("reassigned", po::bool_switch(),
      "recall: a key may get a new value later, and the last value is the right answer");
  add("text", text_option("FILE"),
      "text that hides the answer (default: a built-in text; recall: none)");
  add("no-chat", po::bool_switch(), "do not use the model's chat template");
  add("max-new-tokens", number_option("N", 32), "maximum number of tokens of an answer");
  add("beyond-context", po::bool_switch(),
      "allow prompts longer than the context that the model was trained on");
  add("out", text_option("RUN"),
      "new directory for the tables; if it was interrupted, the same command continues it");
  add("fresh", po::bool_switch(),
      "start from the beginning and delete the unfinished results of --out");
  add("capture", text_option("DIR"),
      "new directory for a trace of every question, followed by its right answer");
  add_policy_options(options);
  add_features_option(options);
  add_common_options(options);
}

/// The items of a list, each read as a number followed by `suffix`.
std::vector<double> numbers_from(const po::variables_map& options, const char* name, double most,
                                 std::string_view suffix, std::string_view example) {
  std::vector<double> numbers;
  for (const std::string& item : list_from(options, name)) {
    double value = -1;
    const char* const end = item.data() + item.size();
    const auto read = std::from_chars(item.data(), end, value, std::chars_format::fixed);
    const bool whole = read.ec == std::errc() && std::string_view(read.ptr, end) == suffix;
    if (!whole || !(value >= 0 && value <= most))
      throw std::invalid_argument(
          fmt::format("--{}: {} should be a list such as {}, each between 0{} and {}{}", name,
                      json_quoted(item), example, suffix, most, suffix));
    if (std::ranges::find(numbers, value) == numbers.end()) numbers.push_back(value);
  }
  return numbers;
}

std::vector<std::uint32_t> words_from(const po::variables_map& options) {
  std::vector<std::uint32_t> words;
  for (const double count : numbers_from(options, "words", kMaxWords, "", "250,500,1000")) {
    if (count < 1 || count != std::floor(count))
      throw std::invalid_argument(
          fmt::format("--words: {} should be a whole number, at least 1", count));
    words.push_back(static_cast<std::uint32_t>(count));
  }
  return words;
}

/// Throws std::invalid_argument for options of another task.
void refuse_foreign(const po::variables_map& options, TaskKind kind) {
  const auto refuse = [&](const char* name, TaskKind of, const char* task) {
    const bool given =
        std::string_view(name) == "reassigned" ? options[name].as<bool>() : options.count(name) > 0;
    if (given && kind != of)
      throw std::invalid_argument(
          fmt::format("--{}: is for kvlab task {}; leave it out", name, task));
  };
  for (const char* name : {"kind", "keys", "values"}) refuse(name, TaskKind::needle, "needle");
  refuse("reassigned", TaskKind::recall, "recall");
  if (kind == TaskKind::recall && options.count("text"))
    throw std::invalid_argument("--text: task recall does not use a text; leave it out");
}

TaskSpec spec_from(const po::variables_map& options) {
  TaskSpec spec;
  spec.kind =
      parse_task_kind(required(options, "task", "kvlab task passkey, needle or recall"), "task");
  refuse_foreign(options, spec.kind);
  spec.reassigned = options["reassigned"].as<bool>();
  const std::string kind = options.count("kind") ? options["kind"].as<std::string>() : "single";
  if (kind != "single" && kind != "multi-key" && kind != "multi-value")
    throw std::invalid_argument(
        fmt::format("--kind: {} should be single, multi-key or multi-value", json_quoted(kind)));
  if (kind == "multi-key") spec.keys = 4;
  if (kind == "multi-value") spec.values = 4;
  if (options.count("keys")) spec.keys = count_from(options, "keys", 1, kMaxNeedles);
  if (options.count("values")) spec.values = count_from(options, "values", 1, kMaxNeedles);
  return spec;
}

std::vector<QueryMode> modes_from(const po::variables_map& options) {
  const bool aware = options["query-aware"].as<bool>();
  const bool agnostic = options["query-agnostic"].as<bool>();
  std::vector<QueryMode> modes;
  if (aware) modes.push_back(QueryMode::aware);
  if (agnostic || !aware) modes.push_back(QueryMode::agnostic);
  return modes;
}

TaskRequest request_from(const po::variables_map& options) {
  TaskRequest request{.spec = spec_from(options),
                      .words = words_from(options),
                      .depths = numbers_from(options, "depth", 100, "%", "0%,50%,100%"),
                      .samples = count_from(options, "samples", 1, kMostSamples),
                      .seed = seed_from(options),
                      .modes = modes_from(options),
                      .beyond_context = options["beyond-context"].as<bool>(),
                      .leave_out = left_out_of("task")};
  for (double& depth : request.depths) depth /= 100;
  request.answers = {.max_new_tokens = count_from(options, "max-new-tokens", 1, 1 << 20),
                     .max_rows = kCpuRows,
                     .progress = progress_bar("task")};
  if (options.count("policy") || options.count("policy-source"))
    request.configs = sweep_from(options, {}, policy_sources_from(options), request.leave_out);
  else
    refuse_lone_budget(options);
  return request;
}

// --- Output --------------------------------------------------------------------------------------

const TaskMetric* find_task_metric(std::span<const TaskMetric> metrics, std::size_t config,
                                   QueryMode mode, std::optional<std::uint32_t> words,
                                   std::string_view metric) {
  const auto found = std::ranges::find_if(metrics, [&](const TaskMetric& entry) {
    return entry.config == config && entry.mode == mode && entry.words == words && !entry.depth &&
           entry.metric == metric;
  });
  return found == metrics.end() ? nullptr : &*found;
}

std::string share_cell(const TaskMetric* entry) {
  if (!entry) return "-";
  const auto percent = [](double share) { return std::lround(100 * share); };
  return fmt::format("{} ({}-{})", percent(entry->value), percent(entry->interval.low),
                     percent(entry->interval.high));
}

std::string mean_cell(const TaskMetric& entry) {
  const double half = entry.interval.high - entry.value;
  return std::isnan(half) ? fmt::format("{:.2f}", entry.value)
                          : fmt::format("{:.2f} ± {:.2f}", entry.value, half);
}

void print_mode(const TaskRun& run, std::span<const TaskMetric> metrics, QueryMode mode,
                const std::vector<std::uint32_t>& words) {
  fmt::print("{}, {}: right answers in %\n{:<36} {:>6}", run.task, name_of(mode), "policy",
             "budget");
  for (const std::uint32_t count : words) fmt::print(" {:>12}", fmt::format("{} words", count));
  fmt::print(" {:>12} {:>16} {:>16}\n", "all", "log p", "change");
  for (std::size_t c = 0; c < run.configs.size(); ++c) {
    const CacheConfig& config = run.configs[c];
    const auto find = [&](std::optional<std::uint32_t> count, std::string_view metric) {
      return find_task_metric(metrics, c, mode, count, metric);
    };
    fmt::print("{:<36} {:>6}", config.policy.brief(), config.budget_text());
    for (const std::uint32_t count : words)
      fmt::print(" {:>12}", share_cell(find(count, "exact_match")));
    fmt::print(" {:>12} {:>16} {:>16}\n", share_cell(find({}, "exact_match")),
               mean_cell(*find({}, "log_likelihood")),
               c == 0 ? "" : mean_cell(*find({}, "log_likelihood_change")));
  }
  const auto own = std::ranges::find(run.modes, mode) - run.modes.begin();
  const auto made = task_recommendations(run, static_cast<std::size_t>(own));
  if (!made.empty()) fmt::print("\n");
  fmt::print("{}", recommendations_text(made));
  fmt::print("\n");
}

void print_table(const TaskRun& run, std::span<const TaskMetric> metrics,
                 const TaskRequest& request) {
  for (const QueryMode mode : run.modes) print_mode(run, metrics, mode, request.words);
  fmt::print(
      "samples for each length and depth: {}; (low-high): 95%, Clopper-Pearson;\n"
      "log p: of the right answer, nats; change: difference from the first line, over\n"
      "the same samples; ±: 95%, from 8 samples on\n",
      request.samples);
  const bool any = std::ranges::any_of(run.modes, [&](QueryMode mode) {
    const TaskMetric* const full = find_task_metric(metrics, 0, mode, {}, "exact_match");
    return full && full->value > 0;
  });
  if (!any)
    fmt::print(
        "The full cache answers no question right, so the task is too hard for this model; compare "
        "log p only.\n");
}

ordered_json to_json(const TaskRun& run, const TaskMetric& entry) {
  const CacheConfig& config = run.configs[entry.config];
  return {{"policy", config.policy.name},
          {"params", config.policy.params_text()},
          {"budget", config.budget_text()},
          {"prefill", config.prefill.text()},
          {"positions", name_of(config.positions)},
          {"seed", config.seed},
          {"mode", name_of(entry.mode)},
          {"words", entry.words ? ordered_json(*entry.words) : ordered_json("all")},
          {"depth", entry.depth ? ordered_json(depth_text(*entry.depth)) : ordered_json("all")},
          {"metric", entry.metric},
          {"value", entry.value},
          {"low", number_or_null(entry.interval.low)},
          {"high", number_or_null(entry.interval.high)},
          {"count", entry.count}};
}

/// Describes the task and the model.
ordered_json about(const TaskRequest& request, const Backend& backend) {
  ordered_json depths = ordered_json::array(), modes = ordered_json::array();
  for (const double depth : request.depths) depths.push_back(depth_text(depth));
  for (const QueryMode mode : request.modes) modes.push_back(name_of(mode));
  return {{"kvlab", KVLAB_RELEASE},
          {"task", request.spec.text()},
          {"model", backend.config().name},
          {"weights_xxh3", backend.weights_xxh3()},
          {"chat", request.chat ? "chatml" : "none"},
          {"text_xxh3", xxh3_hex(std::as_bytes(std::span(request.text)))},
          {"modes", std::move(modes)},
          {"words", request.words},
          {"depths", std::move(depths)},
          {"samples", request.samples},
          {"seed", request.seed},
          {"max_new_tokens", request.answers.max_new_tokens},
          {"interval",
           "95%: shares by Clopper and Pearson, means of 8 samples or more by Student's factor"}};
}

/// Everything that answers depend on, and the format in which they are stored.
ordered_json job_of(const TaskRequest& request, const ordered_json& about, Device device) {
  ordered_json job = about, configs = ordered_json::array();
  for (const CacheConfig& config : request.configs) {
    const auto& source = config.policy.entry->source;
    configs.push_back({config.policy.text(), source ? source->xxh3 : "", config.budget_text(),
                       config.prefill.text(), name_of(config.positions), config.seed,
                       config.threshold});
  }
  job["policies"] = std::move(configs);
  if (const auto& features = request.configs.back().policy.feature_source)
    job["features"] = features->xxh3();
  job["device"] = device == Device::cuda ? "cuda" : "cpu";
  return job;
}

/// Refuses two outputs of which one is inside the other, because they are committed separately.
void refuse_nested(const std::string& out, const std::string& capture) {
  const auto whole = [](const std::string& path) {
    return (std::filesystem::absolute(path) / "").lexically_normal();
  };
  const std::filesystem::path a = whole(out), b = whole(capture);
  const auto [rest_a, rest_b] =
      std::mismatch(a.begin(), --a.end(), b.begin(), --b.end());  // without the "" at the end
  if (rest_a == --a.end() || rest_b == --b.end())
    throw std::invalid_argument(fmt::format(
        "--capture: {} and --out {} should be two directories, and neither may be inside the other",
        capture, out));
}

/// Throws for folders that cannot be made, before work is lost.
void check_folders(const po::variables_map& options) {
  if (options.count("out") && options.count("capture"))
    refuse_nested(options["out"].as<std::string>(), options["capture"].as<std::string>());
  for (const char* name : {"out", "capture"}) {
    if (!options.count(name)) continue;
    const std::string path =
        required(options, name, fmt::format("--{} DIR, a directory to be made", name));
    refuse_existing(path, fmt::format("--{}", name));
  }
}

/// The folder that stores answers as they come; none if no tables were requested.
std::optional<RunFolder> folder_of(const po::variables_map& options, const ordered_json& job) {
  if (!options.count("out")) return std::nullopt;
  const std::filesystem::path path = options["out"].as<std::string>();
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path());
  return std::optional<RunFolder>(std::in_place, path, job, options["fresh"].as<bool>(), "task");
}

void write_run(RunFolder& folder, const TaskRun& run, std::span<const TaskMetric> metrics,
               const ordered_json& about) {
  folder.commit([&](const std::filesystem::path& made) {
    write_file_atomically(made / "answers.csv", task_answers_csv(run));
    write_file_atomically(made / "task.csv", task_metrics_csv(run, metrics));
    write_file_atomically(made / "task.json", json_text(about) + "\n");
  });
}

/// Runs the task, and stores answers as they come if there is a folder.
TaskRun answered(Backend& backend, const Tokenizer& tokenizer, TaskRequest& request,
                 const std::optional<RunFolder>& out) {
  if (out) request.answers.kept = &*out;
  try {
    return run_task(backend, tokenizer, request);
  } catch (const Cancelled& error) {
    if (out) throw out->in_name_of_run(error);
    throw;
  }
}

int run(const po::variables_map& options) {
  TaskRequest request = request_from(options);
  const std::string directory = required(options, "model", "--model DIR, a checkpoint's directory");
  check_folders(options);
  std::optional<AtomicFolder> capture;
  if (options.count("capture")) capture.emplace(options["capture"].as<std::string>());
  std::string text;
  if (options.count("text")) {
    text = read_text(options["text"].as<std::string>());
    request.text = text;
  }
  if (!options["no-chat"].as<bool>()) request.chat = read_chat_frame(directory);
  const Device device = device_from(options);
  if (device == Device::cuda) request.answers.max_rows = kCudaRows;
  const auto backend = load_backend(device, directory, threads_from(options));
  const Tokenizer tokenizer = tokenizer_of(directory, backend->config());
  say_of_model(backend->config(), tokenizer, "", request.chat.has_value());

  request.configs = with_full_first(request.configs);
  ordered_json json = about(request, *backend);
  std::optional<RunFolder> out = folder_of(options, job_of(request, json, device));
  const TaskRun run = answered(*backend, tokenizer, request, out);
  std::vector<TaskMetric> metrics = task_metrics(run.answers, run.points, run.modes);
  const std::vector<TaskMetric> held = memory_metrics(run);
  metrics.insert(metrics.end(), held.begin(), held.end());
  for (std::size_t m = 0; m < run.modes.size(); ++m)
    json["recommendations"][std::string(name_of(run.modes[m]))] =
        recommendations_json(task_recommendations(run, m));
  if (out) write_run(*out, run, metrics, json);
  if (capture) {
    std::uint64_t tokens = 0;
    for (const TaskPrompt& prompt : run.prompts)
      tokens += run.modes.size() * (prompt.tokens() + prompt.answer.size());
    announce_traces("task", backend->trace_header({}).shape, tokens,
                    "into " + options["capture"].as<std::string>());
    capture_tasks(*backend, tokenizer, directory, run, *capture, threads_from(options),
                  progress_bar("capture"));
    capture->commit();
  }
  if (!options["json"].as<bool>()) {
    print_table(run, metrics, request);
    return 0;
  }
  ordered_json rows = ordered_json::array();
  for (const TaskMetric& entry : metrics) rows.push_back(to_json(run, entry));
  json["metrics"] = std::move(rows);
  print_json(json);
  return 0;
}

}  // namespace

Command task_command() {
  return {.name = "task",
          .summary = "measures task accuracy: pass key, needle, recall of pairs",
          .usage = "passkey|needle|recall --model DIR [--policy LIST --budget LIST] [options]",
          .example =
              "kvlab task passkey --model engine/models/tiny --policy sink,h2o --budget 64 "
              "--words 100 --depth 50% --samples 2",
          .add_options = add_options,
          .positional = "task",
          .run = run};
}

}  // namespace kvlab
