// Traces of questions, in which the answer's tokens are spans.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "engine/backend.hpp"
#include "engine/loop/task/figures.hpp"
#include "traces/base/files.hpp"

namespace kvlab {

/// "answer", or "answer 1", "answer 2", …: the tokens of the context that say what is expected.
std::vector<NamedSpan> answer_spans(const Tokenizer& tokenizer, const TaskPrompt& prompt);

/// "250-50%-0-query-aware": words, depth, draw and mode.
std::string task_trace_name(const TaskRun& run, std::size_t prompt, QueryMode mode);

/// Captures every question of a run in every mode under the full cache, with the right answer
/// decoded behind it, into folders of `folder`, which the caller commits. `model`: the checkpoint's
/// directory, for the sketch of its output projections.
void capture_tasks(Backend& backend, const Tokenizer& tokenizer, const std::filesystem::path& model,
                   const TaskRun& run, const AtomicFolder& folder, unsigned threads,
                   const std::function<void(double)>& progress);

}  // namespace kvlab
