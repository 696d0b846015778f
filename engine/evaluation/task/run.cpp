#include "engine/evaluation/task/run.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "engine/capture.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "sim/head_view.hpp"
#include "sim/run/results.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

ResolvedConfig resolve_for(const CacheConfig& requested, const TaskPrompt& prompt, QueryMode mode,
                           const CacheShape& model) {
  std::vector<Segment> segments;
  std::uint32_t start = 0;
  const auto add = [&](std::size_t tokens, SegmentKind kind) {
    segments.push_back({start, static_cast<std::uint32_t>(tokens), kind});
    start += segments.back().tokens;
  };
  for (const auto& segment : prompt.segments(mode)) add(segment.size(), SegmentKind::prompt);
  add(prompt.answer.size(), SegmentKind::decode);
  CacheConfig config = requested;
  // The budget is a share of the prompt without the answer.
  config.budget = config.budget_at_length(prompt.tokens(), model.head_size);
  return resolve(config, segments, 0, model);
}

/// The configurations whose budget fits every question.
std::vector<CacheConfig> fitting(const TaskRun& run, const CacheShape& model,
                                 const LeaveOut& leave_out) {
  return configs_that_fit(
      run.configs,
      [&](const CacheConfig& config) {
        for (const QueryMode mode : run.modes)
          for (const TaskPrompt& prompt : run.prompts) resolve_for(config, prompt, mode, model);
      },
      leave_out);
}

/// The values that `score` gives to the answers of one mode, [configuration][prompt].
PairedScores paired_answers(const TaskRun& run, std::size_t mode, bool is_binary,
                            double (*score)(const TaskAnswer&)) {
  PairedText samples{.text = "samples", .is_binary = is_binary};
  for (std::size_t c = 0; c < run.configs.size(); ++c) {
    double sum = 0;
    auto& own = samples.blocks.emplace_back();
    for (const auto& prompt : run.answers) sum += own.emplace_back(score(prompt[mode][c]));
    samples.means.push_back(sum / static_cast<double>(own.size()));
  }
  PairedScores scores(run.configs.size());
  scores.add(std::move(samples));
  return scores;
}

/// The share of an answer that is right.
double accuracy(const TaskAnswer& answer) { return answer.found.value_or(answer.right ? 1 : 0); }

/// Whether the first configuration, which is the full cache, answers anything right.
bool full_cache_answers(const TaskRun& run, std::size_t mode) {
  return std::ranges::any_of(
      run.answers, [&](const auto& prompt) { return accuracy(prompt[mode].front()) > 0; });
}

/// Whether accuracy() may be a value between 0 and 1.
bool has_shares(const TaskRun& run) {
  return std::ranges::any_of(run.prompts, [](const TaskPrompt& prompt) {
    return prompt.matching == Matching::strings && prompt.expected.size() > 1;
  });
}

void check_context(const ModelConfig& config, const TaskRun& run) {
  for (std::size_t p = 0; p < run.prompts.size(); ++p) {
    const TaskPrompt& prompt = run.prompts[p];
    const std::size_t tokens =
        prompt.tokens() + std::max<std::size_t>(prompt.answer.size(), prompt.max_new_tokens);
    if (tokens > config.trained_context)
      throw std::invalid_argument(fmt::format(
          "{} {}: needs {} positions, but {} was trained with a context of only {} tokens; give "
          "{}, or "
          "--beyond-context",
          run.points[p].depth ? "--words" : "--length", run.points[p].words, tokens, config.name,
          config.trained_context, run.points[p].depth ? "fewer words" : "a shorter --length"));
  }
}

}  // namespace

std::vector<std::vector<Memory>> task_memory(const TaskRun& run, const CacheShape& model) {
  std::vector<std::vector<Memory>> memory(run.modes.size(),
                                          std::vector<Memory>(run.configs.size()));
  const auto prompts = static_cast<double>(run.prompts.size());
  for (std::size_t m = 0; m < run.modes.size(); ++m)
    for (std::size_t c = 0; c < run.configs.size(); ++c)
      for (const TaskPrompt& prompt : run.prompts) {
        const Memory own =
            memory_of(resolve_for(run.configs[c], prompt, run.modes[m], model), model);
        Memory& all = memory[m][c];
        all.mean += own.mean / prompts;
        all.peak = std::max(all.peak, own.peak);
        all.state = std::max(all.state, own.state);
        all.budget = std::max(all.budget, own.budget);
        all.window_mean += own.window_mean / prompts;
        all.window_peak = std::max(all.window_peak, own.window_peak);
      }
  return memory;
}

std::vector<TaskMetric> memory_metrics(const TaskRun& run) {
  std::vector<TaskMetric> metrics;
  for (std::size_t m = 0; m < run.memory.size(); ++m)
    for (std::size_t c = 0; c < run.configs.size(); ++c) {
      const Memory& memory = run.memory[m][c];
      for (const auto& [metric, value] :
           {std::pair("kv_bytes_mean", memory.mean), std::pair("kv_bytes_peak", memory.peak),
            std::pair("state_bytes", memory.state), std::pair("budget_bytes", memory.budget),
            std::pair("window_bytes_mean", memory.window_mean),
            std::pair("window_bytes_peak", memory.window_peak)})
        if (value > 0 || !std::string_view(metric).starts_with("window"))
          metrics.push_back({c, run.modes[m], {}, {}, {}, metric, value, {}, run.prompts.size()});
    }
  return metrics;
}

std::vector<Recommendation> task_recommendations(const TaskRun& run, std::size_t mode) {
  const bool by_share = full_cache_answers(run, mode);
  const PairedScores scores =
      by_share ? paired_answers(run, mode, !has_shares(run), accuracy)
               : paired_answers(run, mode, false,
                                [](const TaskAnswer& answer) { return answer.log_likelihood; });
  std::vector<std::string> budgets;
  double full_bytes = 0;
  for (std::size_t c = 0; c < run.configs.size(); ++c) {
    const std::string budget = run.configs[c].budget_text();
    if (!run.configs[c].evicts())
      full_bytes = run.memory.empty() ? 0 : run.memory[mode][c].mean;
    else if (!run.configs[c].budget.all && std::ranges::find(budgets, budget) == budgets.end())
      budgets.push_back(budget);
  }
  std::vector<Recommendation> made;
  for (const std::string& budget : budgets) {
    std::vector<std::size_t> configs;
    std::vector<Candidate> candidates;
    BudgetBytes budget_bytes;
    ComparisonScope scope{.budget = budget,
                          .full_bytes = full_bytes,
                          .metric = by_share ? "right answers" : "log p of the right answer",
                          .higher_is_better = true,
                          .samples = run.prompts.size()};
    for (std::size_t c = 0; c < run.configs.size(); ++c) {
      if (!run.configs[c].evicts() || run.configs[c].budget_text() != budget) continue;
      const Memory memory = run.memory.empty() ? Memory{} : run.memory[mode][c];
      configs.push_back(c);
      candidates.push_back(
          {.name = run.configs[c].policy.brief(), .error = -scores.mean(c), .memory = memory});
      budget_bytes.add(memory.budget, run.configs[c].policy.prompt);
    }
    scope.budget_bytes = budget_bytes.bytes();
    std::vector<const CacheConfig*> own;
    for (const std::size_t c : configs) own.push_back(&run.configs[c]);
    make_names_different(candidates, own);
    made.push_back(
        recommend(std::move(candidates), std::move(scope), [&](std::size_t a, std::size_t b) {
          return scores.difference(configs[b],
                                   configs[a]);  // a difference of errors, so the order is reversed
        }));
  }
  return made;
}

std::string TaskRequest::name() const {
  return ruler.size() == 1 ? std::string(ruler.front()->name) : spec.text();
}

namespace {

using TakeSample =
    std::function<void(const TaskPoint&, std::uint32_t number, const TaskSample& sample)>;

void for_each_ruler_sample(const TaskRequest& request, const Tokenizer& tokenizer,
                           const TakeSample& take) {
  const RulerSources sources{tokenizer, request.chat, request.text, request.word_lists};
  for (const std::uint32_t length : request.words)
    for (const RulerTask* task : request.ruler) {
      TaskPoint point{.words = length, .depth = {}};
      if (request.ruler.size() > 1) point.task = task->name;
      const auto sampler =
          ruler_sampler(*task, sources, length, static_cast<std::uint32_t>(request.seed));
      for (std::uint32_t number = 0; number < request.samples; ++number) {
        const TaskSample sample = sampler->next();
        if (number >= request.first_sample) take(point, number, sample);
      }
    }
}

void for_each_sample(const TaskRequest& request, const Tokenizer& tokenizer,
                     const TakeSample& take) {
  if (request.spec.kind == TaskKind::ruler) return for_each_ruler_sample(request, tokenizer, take);
  const Haystack haystack(request.text);
  for (const std::uint32_t words : request.words)
    for (const double depth : request.depths)
      for (std::uint32_t number = request.first_sample; number < request.samples; ++number) {
        const TaskPoint point{.words = words, .depth = depth};
        take(point, number, sample_task(request.spec, haystack, point, request.seed, number));
      }
}

}  // namespace

TaskRun run_task(Backend& backend, const Tokenizer& tokenizer, const TaskRequest& request) {
  TaskRun run{
      .task = request.name(), .configs = put_full_first(request.configs), .modes = request.modes};
  for_each_sample(request, tokenizer,
                  [&](const TaskPoint& point, std::uint32_t number, const TaskSample& sample) {
                    run.points.push_back(point);
                    run.samples.push_back(number);
                    run.prompts.push_back(encode_task(tokenizer, request.chat, sample));
                  });
  if (!request.beyond_context) check_context(backend.config(), run);
  run.configs = fitting(run, backend.config().heads(), request.leave_out);
  run.answers = answer_tasks(backend.batches(), tokenizer, run.prompts, run.modes, run.configs,
                             request.answers);
  run.memory = task_memory(run, backend.config().heads());
  return run;
}

namespace {

/// The answers of one configuration and mode at some points, and those of the first configuration.
struct Sample {
  std::vector<const TaskAnswer*> own, first;
};

class TaskMetricList {
 public:
  explicit TaskMetricList(TaskMetric point) : entry_(point) {}

  void add_all(const Sample& sample) {
    std::uint64_t right = 0, kept = 0, gained = 0, first_right = 0;
    std::vector<double> found, likelihood, change;
    for (std::size_t i = 0; i < sample.own.size(); ++i) {
      const TaskAnswer &own = *sample.own[i], &first = *sample.first[i];
      right += own.right;
      first_right += first.right;
      kept += own.right && first.right;
      gained += own.right && !first.right;
      if (own.found) found.push_back(*own.found);
      likelihood.push_back(own.log_likelihood);
      change.push_back(own.log_likelihood - first.log_likelihood);
    }
    add_found(found);
    add_share("exact_match", right, sample.own.size());
    add_share("lost", first_right - kept, first_right);
    add_share("gained", gained, sample.own.size() - first_right);
    add_mean("log_likelihood", likelihood);
    add_mean("log_likelihood_change", change);
  }
  std::vector<TaskMetric> metrics;

 private:
  void add(std::string_view metric, double value, Interval interval, std::uint64_t count) {
    entry_.metric = metric;
    entry_.value = value;
    entry_.interval = interval;
    entry_.count = count;
    metrics.push_back(entry_);
  }
  void add_share(std::string_view metric, std::uint64_t hits, std::uint64_t count) {
    if (count == 0) return;
    add(metric, static_cast<double>(hits) / static_cast<double>(count), share_interval(hits, count),
        count);
  }
  /// Adds string_match. If each value is 0 or 1, it is a share of answers.
  void add_found(const std::vector<double>& found) {
    const auto is_whole = [](double share) { return share == 0 || share == 1; };
    if (std::ranges::all_of(found, is_whole))
      add_share("string_match", static_cast<std::uint64_t>(std::ranges::count(found, 1.0)),
                found.size());
    else
      add_mean("string_match", found);
  }
  void add_mean(std::string_view metric, const std::vector<double>& values) {
    if (values.empty()) return;
    PairedScores scores(1);
    const double sum = std::accumulate(values.begin(), values.end(), 0.0);
    scores.add({.text = "samples",
                .means = {sum / static_cast<double>(values.size())},
                .blocks = {values}});
    const Difference average = scores.average(0);
    add(metric, average.mean, average.interval, values.size());
  }

  TaskMetric entry_;
};

/// nullopt, which stands for "all", followed by the distinct values of a member, ascending.
template <class T, class Member>
std::vector<std::optional<T>> all_and_each(std::span<const TaskPoint> points, Member member) {
  std::vector<std::optional<T>> values{std::nullopt};
  for (const TaskPoint& point : points)
    if (std::ranges::find(values, std::optional<T>(point.*member)) == values.end())
      values.push_back(point.*member);
  std::ranges::sort(values);
  return values;
}

/// The columns that name the task, the configuration and the mode.
std::string config_fields(const TaskRun& run, std::optional<std::string_view> task, std::size_t c,
                          QueryMode mode) {
  const CacheConfig& config = run.configs[c];
  return fmt::format("{},{},{},{},{},{},{},{}", csv_field(std::string(task.value_or(run.task))),
                     csv_field(config.policy.name), csv_field(config.policy.params_text()),
                     csv_field(config.budget_text()), csv_field(config.prefill.text()),
                     name_of(config.positions), config.seed, name_of(mode));
}

std::string number_or_nothing(double value) {
  return std::isnan(value) ? "" : fmt::format("{}", value);
}

}  // namespace

std::vector<TaskMetric> task_metrics(std::span<const std::vector<std::vector<TaskAnswer>>> answers,
                                     std::span<const TaskPoint> points,
                                     std::span<const QueryMode> modes) {
  const auto all_tasks = all_and_each<std::string_view>(points, &TaskPoint::task);
  const auto all_words = all_and_each<std::uint32_t>(points, &TaskPoint::words);
  const auto all_depths = all_and_each<double>(points, &TaskPoint::depth);
  const std::size_t configs = answers.empty() ? 0 : answers[0][0].size();
  std::vector<TaskMetric> metrics;
  for (std::size_t config = 0; config < configs; ++config)
    for (std::size_t mode = 0; mode < modes.size(); ++mode)
      for (const auto& task : all_tasks)
        for (const auto& words : all_words)
          for (const auto& depth : all_depths) {
            Sample sample;
            for (std::size_t p = 0; p < points.size(); ++p) {
              if ((task && points[p].task != task) || (words && points[p].words != *words) ||
                  (depth && points[p].depth != depth))
                continue;
              sample.own.push_back(&answers[p][mode][config]);
              sample.first.push_back(&answers[p][mode].front());
            }
            TaskMetricList place_metrics(
                {config, modes[mode], task, words, depth, "", 0, {0, 0}, 0});
            place_metrics.add_all(sample);
            metrics.insert(metrics.end(), place_metrics.metrics.begin(),
                           place_metrics.metrics.end());
          }
  return metrics;
}

std::string depth_text(std::optional<double> depth) {
  return depth ? fmt::format("{:.6g}%", 100 * *depth) : "all";
}

std::string task_metrics_csv(const TaskRun& run, std::span<const TaskMetric> metrics) {
  std::string text =
      "task,policy,params,budget,prefill,positions,seed,mode,words,depth,metric,value,low,high,"
      "count\n";
  for (const TaskMetric& entry : metrics)
    text += fmt::format("{},{},{},{},{},{},{},{}\n",
                        config_fields(run, entry.task, entry.config, entry.mode),
                        entry.words ? std::to_string(*entry.words) : "all", depth_text(entry.depth),
                        entry.metric, entry.value, number_or_nothing(entry.interval.low),
                        number_or_nothing(entry.interval.high), entry.count);
  return text;
}

std::string task_answers_csv(const TaskRun& run) {
  std::string text =
      "task,policy,params,budget,prefill,positions,seed,mode,words,depth,sample,expected,said,"
      "right,log_likelihood,found\n";
  for (std::size_t c = 0; c < run.configs.size(); ++c)
    for (std::size_t m = 0; m < run.modes.size(); ++m)
      for (std::size_t p = 0; p < run.prompts.size(); ++p) {
        const TaskAnswer& answer = run.answers[p][m][c];
        text += fmt::format(
            "{},{},{},{},{},{},{},{},{}\n", config_fields(run, run.points[p].task, c, run.modes[m]),
            run.points[p].words, depth_text(run.points[p].depth), run.samples[p],
            fmt::join(run.prompts[p].expected, " "), csv_field(answer.said), answer.right ? 1 : 0,
            answer.log_likelihood, answer.found ? fmt::format("{}", *answer.found) : "");
      }
  return text;
}

std::string task_questions_jsonl(const TaskRun& run, const AnswerOptions& options) {
  std::string text;
  for (std::size_t p = 0; p < run.prompts.size(); ++p) {
    const TaskPrompt& prompt = run.prompts[p];
    const auto& depth = run.points[p].depth;
    const nlohmann::ordered_json line{
        {"task", run.points[p].task.value_or(run.task)},
        {"words", run.points[p].words},
        {"depth", depth ? nlohmann::ordered_json(*depth) : nlohmann::ordered_json()},
        {"sample", run.samples[p]},
        {"context", prompt.context},
        {"question", prompt.question},
        {"answer", prompt.answer},
        {"expected", prompt.expected},
        {"matching", prompt.matching == Matching::numbers ? "numbers" : "strings"},
        {"max_new_tokens", options.limit(prompt)}};
    text += line.dump() + "\n";
  }
  return text;
}

namespace {

namespace fs = std::filesystem;

void capture_one(Backend& backend, const fs::path& path, TraceHeader header,
                 const OutputSketch& sketch, const TaskPrompt& prompt, QueryMode mode) {
  TraceWriter writer(path, std::move(header));
  writer.sketch(sketch);
  const auto tokens = static_cast<std::uint32_t>(prompt.tokens() + prompt.answer.size());
  const auto decoder = backend.capturing_decoder(ResolvedConfig{}, tokens, writer, {});
  for (const auto& segment : prompt.segments(mode)) decoder->feed(segment, SegmentKind::prompt);
  decoder->feed(prompt.answer, SegmentKind::decode);
  decoder->flush();
  writer.finish();
}

}  // namespace

std::vector<Passage> answer_passages(const Tokenizer& tokenizer, const TaskPrompt& prompt) {
  std::vector<Passage> passages;
  for (const std::string& text : prompt.evidence) {
    const TokenRange range = covering_tokens(tokenizer, prompt.context, text);
    const std::string name = prompt.evidence.size() == 1
                                 ? std::string("answer")
                                 : fmt::format("answer {}", passages.size() + 1);
    passages.push_back({name, range.start, range.tokens});
  }
  return passages;
}

std::string task_trace_name(const TaskRun& run, std::size_t prompt, QueryMode mode) {
  const TaskPoint& point = run.points[prompt];
  if (!point.depth)
    return fmt::format("{}-{}-{}-{}", point.task.value_or(run.task), point.words,
                       run.samples[prompt], name_of(mode));
  return fmt::format("{}-{}-{}-{}", point.words, depth_text(point.depth), run.samples[prompt],
                     name_of(mode));
}

void capture_tasks(Backend& backend, const Tokenizer& tokenizer, const fs::path& model,
                   const TaskRun& run, const AtomicFolder& folder, unsigned threads,
                   const std::function<void(double)>& progress) {
  const OutputSketch sketch = output_sketch(model, kSketchSeed, threads);
  for (std::size_t p = 0; p < run.prompts.size(); ++p) {
    for (const QueryMode mode : run.modes) {
      nlohmann::json source{{"task", run.points[p].task.value_or(run.task)},
                            {"mode", name_of(mode)},
                            {"words", run.points[p].words},
                            {"sample", run.samples[p]}};
      if (run.points[p].depth) source["depth"] = *run.points[p].depth;
      TraceHeader header = backend.trace_header(source);
      header.passages = answer_passages(tokenizer, run.prompts[p]);
      capture_one(backend, folder / task_trace_name(run, p, mode), std::move(header), sketch,
                  run.prompts[p], mode);
    }
    if (progress) progress(static_cast<double>(p + 1) / static_cast<double>(run.prompts.size()));
  }
}

}  // namespace kvlab
