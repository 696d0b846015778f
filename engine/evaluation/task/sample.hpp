// Questions with known answers: a pass key, needles, pairs of key and value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tokenizer/tokenizer.hpp"

namespace kvlab {
// A long text by sentences, and what is hidden in it.

/// Text without digits, written for kvlab.
std::string_view bundled_haystack();

/// A sentence that is put into a text behind `depth` of its words.
struct Hidden {
  double depth;  ///< 0 … 1
  std::string sentence;
};

class Haystack {
 public:
  /// Throws std::invalid_argument for a text without words.
  explicit Haystack(std::string_view text);

  std::size_t sentences() const { return sentences_.size(); }
  /// Whole sentences from the `start`-th on, beginning again behind the last one, until there are
  /// `words` words; between them what is hidden, each at the border nearest to its depth. At one
  /// border, in the order given.
  std::string with(std::uint32_t words, std::size_t start, std::span<const Hidden> hidden) const;

 private:
  struct Sentence {
    std::string text;
    std::uint32_t words;
  };
  std::vector<Sentence> sentences_;
};

enum class TaskKind { passkey, needle, recall };
/// Throws std::invalid_argument in the name of --task for another name.
/// `what` is the option or the word that it is given as.
TaskKind parse_task_kind(std::string_view name, std::string_view what = "--task");

/// What is asked.
struct TaskSpec {
  TaskKind kind = TaskKind::passkey;
  std::uint32_t keys = 1;    ///< needle: keys with numbers in the text, one of which is asked
  std::uint32_t values = 1;  ///< needle: numbers of each key
  bool reassigned = false;   ///< recall: keys may get a new value, which counts

  /// "needle:keys=4:values=1", say.
  std::string text() const;
};

/// Where the answer is: so many words, behind a share of them.
struct TaskPoint {
  std::uint32_t words;
  double depth;  ///< 0 … 1
};

/// One question. A prompt is context, question, and the beginning of the answer, which leaves only
/// the answer itself to be said.
struct TaskSample {
  std::string context, question;
  std::string lead;                   ///< how the answer begins: "The pass key is"
  std::vector<std::string> expected;  ///< numbers, in the order of the text
  std::vector<std::string> evidence;  ///< what in the context says each of them, there once
  std::string answer() const;         ///< what follows the lead: " 4821, 1734"
};

/// The `draw`-th question at a place; the same for the same arguments, on any machine. Throws
/// std::invalid_argument for more keys than there are, or too few words for them.
TaskSample sample_task(const TaskSpec& spec, const Haystack& haystack, TaskPoint point,
                       std::uint64_t seed, std::uint32_t sample);

// A question as token ids.

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

/// The ids are the same in both modes: only where one append ends and the next begins differs.
struct TaskPrompt {
  std::vector<std::int32_t> context;            ///< with what comes before it
  std::vector<std::int32_t> question;           ///< up to where the answer is to begin
  std::vector<std::int32_t> answer;             ///< the right one
  std::vector<std::string> expected, evidence;  ///< as in TaskSample

  std::uint32_t tokens() const {  ///< without the answer
    return static_cast<std::uint32_t>(context.size() + question.size());
  }
  /// What is appended one after another.
  std::vector<std::vector<std::int32_t>> segments(QueryMode mode) const;
};

/// `chat`: none for a model without a template.
TaskPrompt encode_task(const Tokenizer& tokenizer, const std::optional<ChatFrame>& chat,
                       const TaskSample& sample);

}  // namespace kvlab
