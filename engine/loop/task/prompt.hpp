// A question as token ids.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/loop/task/chat.hpp"
#include "engine/loop/task/draw.hpp"
#include "engine/tokenizer/tokenizer.hpp"

namespace kvlab {

/// Whether the question is in the cache's prompt, or comes when the context has been evicted to the
/// budget.
enum class QueryMode { aware, agnostic };
std::string_view name_of(QueryMode mode);  ///< "query-aware", "query-agnostic"

/// The ids are the same in both modes: only where one admission ends and the next begins differs.
struct TaskPrompt {
  std::vector<std::int32_t> context;            ///< with what comes before it
  std::vector<std::int32_t> question;           ///< up to where the answer is to begin
  std::vector<std::int32_t> answer;             ///< the right one
  std::vector<std::string> expected, evidence;  ///< as in TaskDraw

  std::uint32_t tokens() const {  ///< without the answer
    return static_cast<std::uint32_t>(context.size() + question.size());
  }
  /// What is admitted one after another.
  std::vector<std::vector<std::int32_t>> segments(QueryMode mode) const;
};

/// `chat`: none for a model without a template.
TaskPrompt encode_task(const Tokenizer& tokenizer, const std::optional<ChatFrame>& chat,
                       const TaskDraw& draw);

}  // namespace kvlab
