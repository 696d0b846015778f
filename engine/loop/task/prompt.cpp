#include "engine/loop/task/prompt.hpp"

#include <algorithm>

#include "engine/loop/conversation.hpp"

namespace kvlab {

std::string_view name_of(QueryMode mode) {
  return mode == QueryMode::aware ? "query-aware" : "query-agnostic";
}

std::vector<std::vector<std::int32_t>> TaskPrompt::segments(QueryMode mode) const {
  if (mode == QueryMode::agnostic) return {context, question};
  std::vector<std::int32_t> whole = context;
  whole.insert(whole.end(), question.begin(), question.end());
  return {std::move(whole)};
}

TaskPrompt encode_task(const Tokenizer& tokenizer, const std::optional<ChatFrame>& chat,
                       const TaskDraw& draw) {
  TaskPrompt prompt;
  // A chat template writes all special tokens itself.
  prompt.context = chat ? tokenizer.encode(chat->before + draw.context, false)
                        : encode_prompt(tokenizer, draw.context);
  const std::string question = draw.question + (chat ? chat->after : std::string("\n")) + draw.lead;
  // The border of the answer is where its text changes the ids.
  prompt.question = tokenizer.encode(question, false);
  const std::vector<std::int32_t> answered = tokenizer.encode(question + draw.answer(), false);
  const auto border = std::ranges::mismatch(prompt.question, answered);
  prompt.answer.assign(border.in2, answered.end());
  prompt.question.erase(border.in1, prompt.question.end());
  prompt.expected = draw.expected;
  prompt.evidence = draw.evidence;
  return prompt;
}

}  // namespace kvlab
