// Runs a task: samples questions, answers them under every configuration, and counts right answers.
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
#include "engine/evaluation/task/ruler.hpp"
#include "engine/evaluation/task/sample.hpp"
#include "sim/run/comparison.hpp"
#include "traces/base/files.hpp"

namespace kvlab {
// Metrics of the answers by length and depth, with intervals. Some metrics compare each answer with
// the first configuration's answer to the same question.
/// One metric of one configuration. `metric` is one of:
///
///     string_match: share of the expected strings that an answer contains, mean over the samples
///       (only for RULER's tasks, whose score it is)
///     exact_match: share of right answers
///     lost: share of wrong answers among those that the first configuration has right
///     gained: share of right answers among those that the first configuration has wrong
///     log_likelihood: log-likelihood of the right answer, mean over the samples, in nats
///     log_likelihood_change: log_likelihood minus that of the first configuration, over the same
///       samples
///
/// Intervals are by share_interval() for exact_match, lost and gained, and for string_match if each
/// value is 0 or 1. All other intervals are by PairedScores; they are NaN for fewer than eight
/// samples.
struct TaskMetric {
  std::size_t config;
  QueryMode mode;
  std::optional<std::string_view> task;  ///< nullopt: the run's only task, or over all its tasks
  std::optional<std::uint32_t> words;    ///< nullopt: over all lengths
  std::optional<double> depth;           ///< nullopt: over all depths
  std::string_view metric;
  double value;
  Interval interval;
  std::uint64_t count;  ///< number of answers
};

/// Computes all metrics of answers [prompt][mode][configuration] with `points` [prompt]: by
/// configuration, mode, task, length and depth, and over all tasks, lengths or depths. A metric
/// without answers to count is left out.
std::vector<TaskMetric> task_metrics(std::span<const std::vector<std::vector<TaskAnswer>>> answers,
                                     std::span<const TaskPoint> points,
                                     std::span<const QueryMode> modes);

// Answers and their metrics as tidy tables.

/// A task with its answers.
struct TaskRun {
  std::string task;  ///< TaskRequest::name()
  std::vector<CacheConfig> configs;
  std::vector<QueryMode> modes;
  std::vector<TaskPoint> points;       ///< [prompt]
  std::vector<std::uint32_t> samples;  ///< [prompt]: number of the sample at its length and depth
  std::vector<TaskPrompt> prompts;
  std::vector<std::vector<std::vector<TaskAnswer>>> answers;  ///< [prompt][mode][configuration]
  std::vector<std::vector<Memory>> memory;                    ///< [mode][configuration]
};

/// The depth as text: "25%", "33.3%". Without a depth "all".
std::string depth_text(std::optional<double> depth);

/// CSV with one metric in a row:
/// task,policy,params,budget,prefill,positions,seed,mode,words,depth,metric,value,low,high,count.
/// An unknown interval is empty.
std::string task_metrics_csv(const TaskRun& run, std::span<const TaskMetric> metrics);
/// CSV with one answer in a row:
/// task,policy,params,budget,prefill,positions,seed,mode,words,depth,sample,expected,said,right,
/// log_likelihood,found.
std::string task_answers_csv(const TaskRun& run);
/// The questions, one JSON object in a line, so that another program can answer them: task, words,
/// depth (null for RULER's tasks) and sample as in task_answers_csv(); context, question and answer
/// as token ids, in the order in which they are appended; the expected strings; how an answer is
/// compared with them ("numbers", "strings"); and the maximum number of tokens of an answer.
std::string task_questions_jsonl(const TaskRun& run, const AnswerOptions& options);

// Recommendations by task accuracy, and the memory that configurations need.

/// The memory of each configuration while prompts are answered, [mode][configuration]: the mean
/// over the prompts, and the peak.
std::vector<std::vector<Memory>> task_memory(const TaskRun& run, const CacheShape& model);

/// TaskRun::memory as metrics over all lengths and depths.
std::vector<TaskMetric> memory_metrics(const TaskRun& run);

/// Recommends a configuration by the right answers of one mode, at each budget at which
/// configurations evict. If the full cache has no right answer, recommends by log p of the right
/// answers. Answers are compared in pairs over the same samples.
std::vector<Recommendation> task_recommendations(const TaskRun& run, std::size_t mode);

struct TaskRequest {
  TaskSpec spec;
  std::vector<const RulerTask*> ruler;         ///< for TaskKind::ruler
  WordLists word_lists;                        ///< for TaskKind::ruler
  std::vector<std::uint32_t> words{250, 500};  ///< TaskPoint::words
  std::vector<double> depths{0, 0.25, 0.5, 0.75, 1};
  /// Samples first_sample to samples - 1 are evaluated at each length and depth. Earlier samples
  /// were evaluated before.
  std::uint32_t first_sample = 0;
  std::uint32_t samples = 4;
  std::uint64_t seed = 0;
  std::vector<QueryMode> modes{QueryMode::aware, QueryMode::agnostic};
  std::vector<CacheConfig> configs;  ///< `full` is put first if it is not there
  std::optional<ChatFrame> chat;
  std::string_view text = bundled_haystack();
  bool beyond_context = false;  ///< allows prompts longer than the model's trained context
  AnswerOptions answers;
  LeaveOut leave_out =
      nullptr;  ///< called for configurations whose budget is too small; null: they are an error

  /// TaskSpec::text() or, for one task of RULER, its name.
  std::string name() const;
};

/// Runs a task. Throws std::invalid_argument for a text without words, too many keys, prompts
/// longer than the model's trained context, and as ruler_sampler() does.
TaskRun run_task(Backend& backend, const Tokenizer& tokenizer, const TaskRequest& request);

// Captures traces of questions. In a trace, the parts of the context that contain the answer are
// passages.

/// The passages of the context that contain the expected values, named "answer" or "answer 1",
/// "answer 2", …
std::vector<Passage> answer_passages(const Tokenizer& tokenizer, const TaskPrompt& prompt);

/// The name of a trace, such as "250-50%-0-query-aware": words, depth, sample and mode. For RULER's
/// tasks: "vt-4096-0-query-aware".
std::string task_trace_name(const TaskRun& run, std::size_t prompt, QueryMode mode);

/// Captures every question of a run in every mode with the full cache, followed by the right answer
/// as decoded tokens. Writes each trace to its own folder in `folder`, which the caller commits.
/// `model`: the checkpoint's directory, for the sketch of its output projections.
void capture_tasks(Backend& backend, const Tokenizer& tokenizer, const std::filesystem::path& model,
                   const TaskRun& run, const AtomicFolder& folder, unsigned threads,
                   const std::function<void(double)>& progress);

}  // namespace kvlab
