// A question as token ids.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/loop/task/draw.hpp"
#include "engine/tokenizer/tokenizer.hpp"

namespace kvlab {

// How a model's chat template dresses one message of a user.

/// The text before a user's message, and behind it, up to where the answer begins.
struct ChatFrame {
  std::string before, after;
};

/// Of a template as tokenizer_config.json holds it, in Jinja, which is not interpreted: ChatML is
/// recognised, with its own system message where it has one, behind `bos` where it says bos_token.
/// Throws std::invalid_argument for any
/// other, and for one whose answers begin with thoughts; `file` is named.
ChatFrame chat_frame(std::string_view chat_template, std::string_view file,
                     std::string_view bos = "");

/// Of the model in `directory`, by chat_template.jinja, tokenizer_config.json or
/// chat_template.json, whichever has one first; none where it has no template. Throws as
/// chat_frame() does, and std::runtime_error for a broken file.
std::optional<ChatFrame> read_chat_frame(const std::filesystem::path& directory);

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
