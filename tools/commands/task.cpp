#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <optional>

#include "engine/evaluation/task/answers.hpp"
#include "engine/evaluation/task/run.hpp"
#include "policies/catalogue.hpp"
#include "sim/budgets/budget_file.hpp"
#include "sim/report/recommendation.hpp"
#include "tools/command.hpp"
#include "tools/options.hpp"
#include "tools/turns.hpp"
#include "traces/base/cancel.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

constexpr std::int64_t kMaxWords = 1'000'000, kMaxSamples = 100'000, kMaxNeedles = 64;
constexpr std::int64_t kMaxLength = 1 << 20, kMaxNumpySeed = 0xffffffff;
constexpr std::uint32_t kCpuRows = 16, kCudaRows = 128;  // caches in a batch

struct Request {
  TaskRequest task;
  CacheOptions caches;
  CommonOptions common;
  std::string model, text, out, capture, word_lists;  ///< paths; empty: not given
  std::vector<std::uint32_t> lengths{4096};           ///< for the task `ruler`
  std::string kind = "";                              ///< for the task `needle`
  bool query_aware = false, query_agnostic = false;
  bool chat = true;
  bool fresh = false;
};

/// Parses the items of a list. Each is a number followed by `suffix`.
std::vector<double> parse_numbers(const std::string& text, const char* name, double max_value,
                                  std::string_view suffix, std::string_view example) {
  std::vector<double> numbers;
  for (const std::string& item : list_entries(text)) {
    double value = -1;
    const char* const end = item.data() + item.size();
    const auto read = std::from_chars(item.data(), end, value, std::chars_format::fixed);
    const bool whole = read.ec == std::errc() && std::string_view(read.ptr, end) == suffix;
    if (!whole || !(value >= 0 && value <= max_value))
      throw std::invalid_argument(
          fmt::format("--{}: {} should be a list such as {}, each between 0{} and {}{}", name,
                      json_quoted(item), example, suffix, max_value, suffix));
    if (std::ranges::find(numbers, value) == numbers.end()) numbers.push_back(value);
  }
  return numbers;
}

/// Parses a list of lengths: whole numbers from 1 to `max_value`.
std::vector<std::uint32_t> parse_lengths(const std::string& text, const char* name,
                                         double max_value, std::string_view example) {
  std::vector<std::uint32_t> lengths;
  for (const double length : parse_numbers(text, name, max_value, "", example)) {
    if (length < 1 || length != std::floor(length))
      throw std::invalid_argument(
          fmt::format("--{}: {} should be a whole number, at least 1", name, length));
    lengths.push_back(static_cast<std::uint32_t>(length));
  }
  return lengths;
}

std::vector<std::uint32_t> parse_words(const std::string& text) {
  return parse_lengths(text, "words", kMaxWords, "250,500,1000");
}

std::vector<std::uint32_t> parse_tokens(const std::string& text) {
  return parse_lengths(text, "length", kMaxLength, "4096,8192");
}

std::vector<const RulerTask*> all_ruler_tasks() {
  std::vector<const RulerTask*> tasks;
  for (const RulerTask& task : ruler_tasks()) tasks.push_back(&task);
  return tasks;
}

std::vector<const RulerTask*> parse_ruler_tasks(const std::string& text) {
  if (text == "all") return all_ruler_tasks();
  std::vector<const RulerTask*> tasks;
  for (const std::string& name : list_entries(text)) {
    const RulerTask* const task = &ruler_task(name);
    if (std::ranges::find(tasks, task) == tasks.end()) tasks.push_back(task);
  }
  return tasks;
}

std::vector<double> parse_depths(const std::string& text) {
  std::vector<double> depths = parse_numbers(text, "depth", 100, "%", "0%,50%,100%");
  for (double& depth : depths) depth /= 100;
  return depths;
}

/// Throws std::invalid_argument if options of another task were given.
void refuse_foreign(TaskKind kind, const GivenOptions& given) {
  const auto refuse = [&](const char* name, TaskKind own_kind, const char* task) {
    if (given.has(name) && kind != own_kind)
      throw std::invalid_argument(
          fmt::format("--{}: is for kvlab task {}; leave it out", name, task));
  };
  for (const char* name : {"kind", "keys", "values"}) refuse(name, TaskKind::needle, "needle");
  refuse("reassigned", TaskKind::recall, "recall");
  for (const char* name : {"tasks", "length", "word-lists"}) refuse(name, TaskKind::ruler, "ruler");
  if (kind == TaskKind::recall && given.has("text"))
    throw std::invalid_argument("--text: task recall does not use a text; leave it out");
  if (kind != TaskKind::ruler) return;
  if (given.has("words"))
    throw std::invalid_argument("--words: task ruler takes a length in tokens; give --length");
  for (const char* name : {"depth", "max-new-tokens"})
    if (given.has(name))
      throw std::invalid_argument(
          fmt::format("--{}: RULER's tasks define it themselves; leave it out", name));
}

void check_kind(Request& request, const GivenOptions& given) {
  given.require("task", "kvlab task passkey, needle, recall or ruler");
  refuse_foreign(request.task.spec.kind, given);
  const std::string& kind = request.kind;
  if (given.has("kind") && kind != "single" && kind != "multi-key" && kind != "multi-value")
    throw std::invalid_argument(
        fmt::format("--kind: {} should be single, multi-key or multi-value", json_quoted(kind)));
  if (kind == "multi-key" && !given.has("keys")) request.task.spec.keys = 4;
  if (kind == "multi-value" && !given.has("values")) request.task.spec.values = 4;
}

void check_ruler(Request& request) {
  TaskRequest& task = request.task;
  if (task.spec.kind != TaskKind::ruler) return;
  if (task.seed > kMaxNumpySeed)
    throw std::invalid_argument(
        fmt::format("--seed: {} is above {}, the largest seed of RULER's generator; give a smaller "
                    "one",
                    task.seed, kMaxNumpySeed));
  task.words = request.lengths;
  if (task.ruler.empty()) task.ruler = all_ruler_tasks();
  task.word_lists =
      request.word_lists.empty() ? bundled_word_lists() : read_word_lists(request.word_lists);
}

/// Refuses two outputs if one is inside the other, because they are committed separately.
void refuse_nested(const std::string& out, const std::string& capture) {
  const auto whole = [](const std::string& path) {
    return (std::filesystem::absolute(path) / "").lexically_normal();
  };
  const std::filesystem::path a = whole(out), b = whole(capture);
  const auto [rest_a, rest_b] = std::mismatch(a.begin(), --a.end(), b.begin(),
                                              --b.end());  // without the "" at the end of the paths
  if (rest_a == --a.end() || rest_b == --b.end())
    throw std::invalid_argument(fmt::format(
        "--capture: {} and --out {} should be two directories, and neither may be inside the other",
        capture, out));
}

void check(Request& request, const GivenOptions& given) {
  check_kind(request, given);
  TaskRequest& task = request.task;
  task.seed = request.caches.sweep.seed;
  check_ruler(request);
  task.modes.clear();
  if (request.query_aware) task.modes.push_back(QueryMode::aware);
  if (request.query_agnostic || !request.query_aware) task.modes.push_back(QueryMode::agnostic);
  task.answers.max_rows = request.common.device == Device::cuda ? kCudaRows : kCpuRows;
  if (!given.has("policy") && !given.has("policy-source")) {
    refuse_lone_budget(request.caches);
    if (!given.has("tiers")) refuse_lone_modes(given);
  }
  require_model(given, request.model);
  if (given.has("out") && given.has("capture")) refuse_nested(request.out, request.capture);
  if (given.has("out")) refuse_existing(request.out, "--out");
  if (given.has("capture")) refuse_existing(request.capture, "--capture");
}

void add_needle_options(OptionTable& table, Request& request) {
  table.text(
      "kind", "single|multi-key|multi-value", request.kind,
      "needle: the text hides one number (single), the numbers of 4 keys, of which the question "
      "asks for one (multi-key), or 4 numbers of one key (multi-value) (default: single)");
  table.whole("keys", "N", {1, kMaxNeedles}, request.task.spec.keys,
              "needle: number of keys in the text; the question is for one of them", "");
  table.whole("values", "N", {1, kMaxNeedles}, request.task.spec.values,
              "needle: number of values of each key", "");
}

void add_ruler_options(OptionTable& table, Request& request) {
  table.parsed("tasks", "LIST", request.task.ruler, parse_ruler_tasks,
               "ruler: names of RULER's tasks: niah_single_1 to niah_single_3, niah_multikey_1 to "
               "niah_multikey_3, niah_multivalue, niah_multiquery, vt, cwe, fwe",
               "all");
  table.parsed("length", "LIST", request.lengths, parse_tokens,
               "ruler: maximum number of tokens of a prompt and its answer", "4096");
  table.text("word-lists", "DIR", request.word_lists,
             "ruler: directory with nounlist.txt, adjectivelist.txt and verblist.txt, as in the "
             "Python package wonderwords (default: built-in words)");
}

void add_options(OptionTable& table, Request& request) {
  TaskRequest& task = request.task;
  const auto kind = [](const std::string& text) { return parse_task_kind(text, "task"); };
  table.parsed("task", "passkey|needle|recall|ruler", task.spec.kind, kind,
               "the task; the word `--task` may be left out");
  add_model_option(table, request.model);
  table.flag("query-aware", request.query_aware,
             "the question is in the prompt, so it is seen before anything is evicted");
  table.flag("query-agnostic", request.query_agnostic,
             "the question comes after the context has been evicted to the budget (default). With "
             "both switches, both modes run");
  table.parsed("words", "LIST", task.words, parse_words, "lengths of the context, in words",
               "250,500");
  table.parsed("depth", "LIST", task.depths, parse_depths, "depths of the answer in the context",
               "0%,25%,50%,75%,100%");
  table.whole("samples", "N", {1, kMaxSamples}, task.samples,
              "questions at each length and depth; the same for every policy and budget");
  add_needle_options(table, request);
  add_ruler_options(table, request);
  table.flag("reassigned", task.spec.reassigned,
             "recall: a key may get a new value later, and the last value is the right answer");
  table.text(
      "text", "FILE", request.text,
      "text in which the answer is hidden (default: a built-in text; the task recall has none)");
  table.flag("no-chat", request.chat, "do not use the model's chat template", false);
  table.whole("max-new-tokens", "N", {1, 1 << 20}, task.answers.max_new_tokens,
              "maximum number of tokens of an answer");
  table.flag("beyond-context", task.beyond_context,
             "allow prompts longer than the context that the model was trained on");
  table.text(
      "out", "RUN", request.out,
      "new directory for the results. If the command was interrupted, the same command continues");
  table.flag("fresh", request.fresh,
             "start from the beginning and delete the unfinished results of --out");
  table.text("capture", "DIR", request.capture,
             "new directory for one trace for each question. A trace has the question, followed by "
             "its right answer");
  add_cache_options(table, request.caches);
  add_features_option(table, request.caches.features);
  add_common_options(table, request.common);
}

// --- Output --------------------------------------------------------------------------------------

const TaskMetric* find_task_metric(std::span<const TaskMetric> metrics, std::size_t config,
                                   QueryMode mode, std::optional<std::string_view> task,
                                   std::optional<std::uint32_t> words, std::string_view metric) {
  const auto found = std::ranges::find_if(metrics, [&](const TaskMetric& entry) {
    return entry.config == config && entry.mode == mode && entry.task == task &&
           entry.words == words && !entry.depth && entry.metric == metric;
  });
  return found == metrics.end() ? nullptr : &*found;
}

std::string share_cell(const TaskMetric* entry) {
  if (!entry) return "-";
  const auto percent = [](double share) { return std::lround(100 * share); };
  if (std::isnan(entry->interval.low)) return fmt::format("{}", percent(entry->value));
  return fmt::format("{} ({}-{})", percent(entry->value), percent(entry->interval.low),
                     percent(entry->interval.high));
}

std::string mean_cell(const TaskMetric& entry) {
  const double half = entry.interval.high - entry.value;
  return std::isnan(half) ? fmt::format("{:.2f}", entry.value)
                          : fmt::format("{:.2f} ± {:.2f}", entry.value, half);
}

/// The tasks of a run that have separate rows: none, if there is only one task.
std::vector<std::string_view> tasks_with_rows(const TaskRequest& request) {
  std::vector<std::string_view> tasks;
  if (request.ruler.size() > 1)
    for (const RulerTask* task : request.ruler) tasks.push_back(task->name);
  return tasks;
}

/// The metric from which the table takes its share of right answers.
std::string_view accuracy_metric(const TaskRequest& request) {
  return request.spec.kind == TaskKind::ruler ? "string_match" : "exact_match";
}

class ModeTable {
 public:
  ModeTable(const TaskRun& run, std::span<const TaskMetric> metrics, const TaskRequest& request,
            QueryMode mode)
      : run_(run), metrics_(metrics), request_(request), mode_(mode) {}

  void print() const {
    const bool is_ruler = request_.spec.kind == TaskKind::ruler;
    const std::vector<std::string_view> tasks = tasks_with_rows(request_);
    fmt::print("{}, {}: {} in %\n", run_.task, name_of(mode_),
               is_ruler ? "answers found" : "right answers");
    const std::size_t width = tasks.empty() ? 0 : kTaskWidth;
    print_first(width, "task");
    fmt::print("{:<36} {:>6}", "policy", "budget");
    for (const std::uint32_t length : request_.words)
      fmt::print(" {:>12}", fmt::format("{} {}", length, is_ruler ? "tokens" : "words"));
    fmt::print(" {:>12} {:>16} {:>16}\n", "all", "log p", "change");
    for (const std::string_view task : tasks) print_rows(width, task, task);
    print_rows(width, "all", std::nullopt);
  }

 private:
  static constexpr std::size_t kTaskWidth = 16;

  static void print_first(std::size_t width, std::string_view text) {
    if (width > 0) fmt::print("{:<{}} ", text, width);
  }

  void print_rows(std::size_t width, std::string_view title,
                  std::optional<std::string_view> task) const {
    const std::string_view accuracy = accuracy_metric(request_);
    for (std::size_t c = 0; c < run_.configs.size(); ++c) {
      const CacheConfig& config = run_.configs[c];
      const auto find = [&](std::optional<std::uint32_t> words, std::string_view metric) {
        return find_task_metric(metrics_, c, mode_, task, words, metric);
      };
      print_first(width, title);
      fmt::print("{:<36} {:>6}", config.policy.brief(), config.budget_text());
      for (const std::uint32_t words : request_.words)
        fmt::print(" {:>12}", share_cell(find(words, accuracy)));
      fmt::print(" {:>12} {:>16} {:>16}\n", share_cell(find({}, accuracy)),
                 mean_cell(*find({}, "log_likelihood")),
                 c == 0 ? "" : mean_cell(*find({}, "log_likelihood_change")));
    }
  }

  const TaskRun& run_;
  std::span<const TaskMetric> metrics_;
  const TaskRequest& request_;
  QueryMode mode_;
};

void print_mode(const TaskRun& run, std::span<const TaskMetric> metrics, QueryMode mode,
                const TaskRequest& request) {
  ModeTable(run, metrics, request, mode).print();
  const auto own = std::ranges::find(run.modes, mode) - run.modes.begin();
  const auto made = task_recommendations(run, static_cast<std::size_t>(own));
  if (!made.empty()) fmt::print("\n");
  fmt::print("{}", recommendations_text(made));
  fmt::print("\n");
}

void print_table(const TaskRun& run, std::span<const TaskMetric> metrics,
                 const TaskRequest& request) {
  for (const QueryMode mode : run.modes) print_mode(run, metrics, mode, request);
  const bool is_ruler = request.spec.kind == TaskKind::ruler;
  fmt::print(
      "{} samples for each {}; (low-high): 95% interval, Clopper-Pearson{};\n"
      "log p: log-probability of the right answer, in nats; change: difference from the\n"
      "first line over the same samples; ±: half of its 95% interval, if 8 or more samples\n",
      request.samples, is_ruler ? "task and length" : "length and depth",
      is_ruler ? "\nor, for questions with several answers and 8 or more samples, Student's" : "");
  const bool any = std::ranges::any_of(run.modes, [&](QueryMode mode) {
    const TaskMetric* const full =
        find_task_metric(metrics, 0, mode, {}, {}, accuracy_metric(request));
    return full && full->value > 0;
  });
  if (!any)
    fmt::print(
        "The full cache answers no question right, so the task is too hard for this model; compare "
        "log p only.\n");
}

ordered_json to_json(const TaskRun& run, const TaskMetric& entry) {
  const CacheConfig& config = run.configs[entry.config];
  return {{"task", entry.task.value_or(run.task)},
          {"policy", config.policy.name},
          {"params", config.policy.params_text()},
          {"budget", config.budget_text()},
          {"prefill", config.prefill.text()},
          {"positions", name_of(config.positions)},
          {"seed", config.seed},
          {"mode", name_of(entry.mode)},
          {"words", entry.words ? ordered_json(*entry.words) : ordered_json("all")},
          {"depth", depth_text(entry.depth)},
          {"metric", entry.metric},
          {"value", entry.value},
          {"low", number_or_null(entry.interval.low)},
          {"high", number_or_null(entry.interval.high)},
          {"count", entry.count}};
}

/// Describes the task and the model.
ordered_json about(const TaskRequest& request, const Backend& backend) {
  const bool is_ruler = request.spec.kind == TaskKind::ruler;
  ordered_json depths = ordered_json::array(), modes = ordered_json::array();
  if (!is_ruler)
    for (const double depth : request.depths) depths.push_back(depth_text(depth));
  for (const QueryMode mode : request.modes) modes.push_back(name_of(mode));
  ordered_json json{
      {"kvlab", KVLAB_RELEASE},
      {"task", request.name()},
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
  if (!is_ruler) return json;
  json.erase("max_new_tokens");
  for (const RulerTask* task : request.ruler) json["tasks"].push_back(task->name);
  json["word_lists_xxh3"] = xxh3_hex(nlohmann::json{
      request.word_lists.nouns, request.word_lists.adjectives, request.word_lists.verbs}
                                         .dump());
  return json;
}

/// Everything on which the stored answers depend. An unfinished run may be continued only if this
/// is unchanged.
ordered_json job_of(const TaskRequest& request, const ordered_json& about, Device device) {
  ordered_json job = about, configs = ordered_json::array();
  for (const CacheConfig& config : request.configs) {
    const auto& source = config.policy.entry->source;
    const auto& centre = config.policy.centre.constants;
    configs.push_back({config.policy.text(), source ? source->xxh3 : "", config.budget_text(),
                       config.prefill.text(), name_of(config.positions), config.seed,
                       config.threshold});
    // The texts of a policy and of a budget only name their files, which may change.
    if (centre) configs.back().push_back(centre->xxh3);
    if (!config.budget.file.empty())
      configs.back().push_back({config.budget.extent.tokens, budgets_json(config.budget.heads)});
  }
  job["policies"] = std::move(configs);
  if (const auto& features = request.configs.back().policy.feature_source)
    job["features"] = features->xxh3();
  job["device"] = device == Device::cuda ? "cuda" : "cpu";
  return job;
}

/// The folder in which answers are stored as soon as they are known; nullopt if no tables were
/// requested.
std::optional<RunFolder> folder_of(const Request& request, const ordered_json& job) {
  if (request.out.empty()) return std::nullopt;
  const std::filesystem::path path = request.out;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path());
  return std::optional<RunFolder>(std::in_place, path, job, request.fresh, "task");
}

void write_run(RunFolder& folder, const TaskRun& run, std::span<const TaskMetric> metrics,
               const AnswerOptions& options, const ordered_json& about) {
  folder.commit([&](const std::filesystem::path& made) {
    write_file_atomically(made / "answers.csv", task_answers_csv(run));
    write_file_atomically(made / "questions.jsonl", task_questions_jsonl(run, options));
    write_file_atomically(made / "task.csv", task_metrics_csv(run, metrics));
    write_file_atomically(made / "task.json", json_text(about) + "\n");
  });
}

/// Runs the task. If there is a folder, answers are stored there as soon as they are known.
TaskRun answer_tasks(Backend& backend, const Tokenizer& tokenizer, TaskRequest& request,
                     const std::optional<RunFolder>& out) {
  if (out) request.answers.kept = &*out;
  try {
    return run_task(backend, tokenizer, request);
  } catch (const Cancelled& error) {
    if (out) throw out->add_run_name(error);
    throw;
  }
}

/// Captures every question.
void capture_run(Backend& backend, const Tokenizer& tokenizer, const Request& given,
                 const TaskRun& run, AtomicFolder& folder) {
  std::uint64_t tokens = 0;
  for (const TaskPrompt& prompt : run.prompts)
    tokens += run.modes.size() * (prompt.tokens() + prompt.answer.size());
  announce_traces("task", backend.trace_header({}).shape, tokens, "into " + given.capture);
  capture_tasks(backend, tokenizer, given.model, run, folder, given.common.threads,
                progress_bar("capture"));
  folder.commit();
}

int run(const Request& given) {
  TaskRequest request = given.task;
  request.leave_out = report_omissions("task");
  request.answers.progress = progress_bar("task");
  const CacheOptions& caches = given.caches;
  if (!caches.sweep.policies.empty() || !caches.sources.empty() || !caches.tiers.empty())
    request.configs = sweep_of(caches, compiled_policies(caches, given.common), request.leave_out);
  std::optional<AtomicFolder> capture;
  if (!given.capture.empty()) capture.emplace(given.capture);
  std::string text;
  if (!given.text.empty()) {
    text = read_text(given.text);
    request.text = text;
  }
  if (given.chat) request.chat = read_chat_frame(given.model);
  const Device device = given.common.device;
  const auto backend = load_backend(device, given.model, given.common.threads);
  const Tokenizer tokenizer = tokenizer_of(given.model, backend->config());
  say_of_model(backend->config(), tokenizer, "", request.chat.has_value());

  request.configs = put_full_first(request.configs);
  ordered_json json = about(request, *backend);
  std::optional<RunFolder> out = folder_of(given, job_of(request, json, device));
  const TaskRun run = answer_tasks(*backend, tokenizer, request, out);
  std::vector<TaskMetric> metrics = task_metrics(run.answers, run.points, run.modes);
  const std::vector<TaskMetric> held = memory_metrics(run);
  metrics.insert(metrics.end(), held.begin(), held.end());
  for (std::size_t m = 0; m < run.modes.size(); ++m)
    json["recommendations"][std::string(name_of(run.modes[m]))] =
        recommendations_json(task_recommendations(run, m));
  if (out) write_run(*out, run, metrics, request.answers, json);
  if (capture) capture_run(*backend, tokenizer, given, run, *capture);
  if (!given.common.json) {
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
  return {
      .name = "task",
      .summary = "measures task accuracy: pass key, needle, recall of pairs, RULER",
      .usage = "passkey|needle|recall|ruler --model DIR [--policy LIST --budget LIST] [options]",
      .example =
          "kvlab task passkey --model engine/models/tiny --policy sink,h2o --budget 64 "
          "--words 100 --depth 50% --samples 2",
      .positional = "task",
      .prepare = make_prepare(add_options, check, run)};
}

}  // namespace kvlab
