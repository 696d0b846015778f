// A task from beginning to end: questions are drawn, answered under every configuration, counted.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/backend.hpp"
#include "engine/evaluation/statistics.hpp"
#include "engine/evaluation/task/answers.hpp"
#include "engine/evaluation/task/sample.hpp"
#include "sim/run/comparison.hpp"
#include "traces/base/files.hpp"

namespace kvlab {
// Metrics of many answers: by length and depth, with intervals, paired with the first
// configuration.
/// One metric.
///   exact_match: share of right answers
///   lost: of those that the first configuration answers right, the share that this one does not
///   gained: of those that the first one does not, the share that this one answers right
///     (all three with share_interval())
///   log_likelihood: of the right answer, mean of the samples, nats
///   log_likelihood_change: from the first configuration's, mean over the same samples
///     (both as PairedScores has them: NaN for fewer than eight samples)
struct TaskMetric {
  std::size_t config;
  QueryMode mode;
  std::optional<std::uint32_t> words;  ///< none: all
  std::optional<double> depth;         ///< likewise
  std::string_view metric;
  double value;
  Interval interval;
  std::uint64_t count;  ///< answers
};

/// All metrics of answers [prompt][mode][configuration], `points` [prompt]: by configuration, mode,
/// length and depth, and over all of each. What has no answers to count has no metric.
std::vector<TaskMetric> task_metrics(std::span<const std::vector<std::vector<TaskAnswer>>> answers,
                                     std::span<const TaskPoint> points,
                                     std::span<const QueryMode> modes);

// Answers and their metrics as tidy tables.

/// What the tables are of.
struct TaskRun {
  std::string task;  ///< TaskSpec::text()
  std::vector<CacheConfig> configs;
  std::vector<QueryMode> modes;
  std::vector<TaskPoint> points;       ///< [prompt]
  std::vector<std::uint32_t> samples;  ///< [prompt]: which sample of its place
  std::vector<TaskPrompt> prompts;
  std::vector<std::vector<std::vector<TaskAnswer>>> answers;  ///< [prompt][mode][configuration]
  std::vector<std::vector<Memory>> memory;                    ///< [mode][configuration]
};

/// "25%", "33.3%".
std::string depth_text(double depth);

/// task,policy,params,budget,prefill,positions,seed,mode,words,depth,metric,value,low,high,count:
/// one metric a row; an interval that there is not is empty.
std::string task_metrics_csv(const TaskRun& run, std::span<const TaskMetric> metrics);
/// task,policy,params,budget,prefill,positions,seed,mode,words,depth,sample,expected,said,right,
/// log_likelihood: one answer a row.
std::string task_answers_csv(const TaskRun& run);

// Which has the best task accuracy at each budget, and what is held meanwhile.

/// What a configuration holds while prompts are answered: mean of the prompts, the most of one.
/// [mode][configuration].
std::vector<std::vector<Memory>> task_memory(const TaskRun& run, const CacheShape& model);

/// TaskRun::memory as metrics over all lengths and depths.
std::vector<TaskMetric> memory_metrics(const TaskRun& run);

/// By right answers of one mode, at each budget at which configurations evict. Shares are paired
/// over the same samples.
std::vector<Recommendation> task_recommendations(const TaskRun& run, std::size_t mode);

struct TaskRequest {
  TaskSpec spec;
  std::vector<std::uint32_t> words{250, 500};
  std::vector<double> depths{0, 0.25, 0.5, 0.75, 1};
  std::uint32_t first_sample = 0;  ///< those before it were asked already
  std::uint32_t samples = 4;       ///< at each length and depth, up to this one
  std::uint64_t seed = 0;
  std::vector<QueryMode> modes{QueryMode::aware, QueryMode::agnostic};
  std::vector<CacheConfig> configs;  ///< `full` is put in front if it is not there
  std::optional<ChatFrame> chat;
  std::string_view text = bundled_haystack();
  bool beyond_context = false;  ///< take prompts longer than the model was trained on
  AnswerOptions answers;
  LeaveOut leave_out = nullptr;  ///< gets what has too small a budget; null: that is refused
};

/// Throws std::invalid_argument for a text without words, for too many keys, and for prompts longer
/// than what the model was trained on.
TaskRun run_task(Backend& backend, const Tokenizer& tokenizer, const TaskRequest& request);

// Traces of questions, in which the answer's tokens are passages.

/// "answer", or "answer 1", "answer 2", …: the tokens of the context that say what is expected.
std::vector<Passage> answer_passages(const Tokenizer& tokenizer, const TaskPrompt& prompt);

/// "250-50%-0-query-aware": words, depth, sample and mode.
std::string task_trace_name(const TaskRun& run, std::size_t prompt, QueryMode mode);

/// Captures every question of a run in every mode under the full cache, with the right answer
/// decoded behind it, into folders of `folder`, which the caller commits. `model`: the checkpoint's
/// directory, for the sketch of its output projections.
void capture_tasks(Backend& backend, const Tokenizer& tokenizer, const std::filesystem::path& model,
                   const TaskRun& run, const AtomicFolder& folder, unsigned threads,
                   const std::function<void(double)>& progress);

}  // namespace kvlab
