// Samples questions with known answers: a pass key, needles, pairs of key and value.
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
// A long text, split into sentences, with other sentences hidden in it.

/// A text without digits, written for kvlab.
std::string_view bundled_haystack();

/// Whether a word ends a sentence: it ends in a full stop, a question mark or an exclamation mark,
/// perhaps followed by quotes or brackets.
bool ends_sentence(std::string_view word);

/// A sentence to be inserted into a text after the share `depth` of its words.
struct Hidden {
  double depth;  ///< 0 to 1
  std::string sentence;
};

class Haystack {
 public:
  /// Throws std::invalid_argument for a text without words.
  explicit Haystack(std::string_view text);

  std::size_t sentences() const { return sentences_.size(); }
  /// Returns whole sentences, beginning with the `start`-th and continuing at the beginning of the
  /// text, until there are `words` words. Each hidden sentence is inserted at the border between
  /// sentences that is nearest to its depth. Several sentences at one border keep the given order.
  std::string with(std::uint32_t words, std::size_t start, std::span<const Hidden> hidden) const;

 private:
  struct Sentence {
    std::string text;
    std::uint32_t words;
  };
  std::vector<Sentence> sentences_;
};

/// ruler: the tasks of engine/evaluation/task/ruler.hpp.
enum class TaskKind { passkey, needle, recall, ruler };
/// Parses a task name. `what`: the option or word to name in the message. Throws
/// std::invalid_argument for an unknown name.
TaskKind parse_task_kind(std::string_view name, std::string_view what = "--task");

/// The kind of a task's questions and its settings.
struct TaskSpec {
  TaskKind kind = TaskKind::passkey;
  std::uint32_t keys =
      1;  ///< needle: number of keys with numbers in the text; the question is about one of them
  std::uint32_t values = 1;  ///< needle: numbers per key
  bool reassigned = false;   ///< recall: whether a key may get a new value; the last value counts

  /// As text, for example "needle:keys=4:values=1".
  std::string text() const;
};

/// The length of a question, and the position of the answer in it.
struct TaskPoint {
  std::uint32_t words;          ///< length of the context; RULER: tokens of prompt and answer
  std::optional<double> depth;  ///< 0 to 1; RULER: nullopt, because it places answers at random
  std::optional<std::string_view> task = {};  ///< its task, if a run has several
};

/// How an answer is compared with the expected values.
///
///     numbers: the first numbers in the answer must be the expected ones
///     strings: the answer must contain the expected strings, ignoring case
enum class Matching { numbers, strings };

/// One question. A prompt consists of the context, the question, and the beginning of the answer,
/// so that the model only has to say the answer itself.
struct TaskSample {
  std::string context, question;
  std::string lead;                   ///< the beginning of the answer: "The pass key is"
  std::vector<std::string> expected;  ///< expected values, in the order of the text
  std::vector<std::string> evidence;  ///< the passages of the context that contain the expected
                                      ///< values, each unique; empty if there are none
  std::string answer_text =
      "";  ///< right answer after the lead; empty: `expected`, as " 4821, 1734"
  std::string before_lead = "\n";  ///< what a prompt without a chat template has before the lead
  Matching matching = Matching::numbers;
  std::uint32_t max_new_tokens = 0;  ///< maximum number of tokens of an answer; 0: not limited here
  std::string answer() const;
};

/// The `sample`-th question at a point, except for RULER's tasks. The point must have a depth. The
/// same arguments give the same question on any machine. Throws std::invalid_argument if the
/// question needs more different keys than exist.
TaskSample sample_task(const TaskSpec& spec, const Haystack& haystack, TaskPoint point,
                       std::uint64_t seed, std::uint32_t sample);

// A question as token ids.

// How a model's chat template formats one user message.

/// The text before a user's message, and the text after it up to where the answer begins.
struct ChatFrame {
  std::string before, after;
};

/// Makes the frame of a Jinja template without interpreting the template. Recognizes ChatML and the
/// templates of Llama 3, Gemma, Mistral, Phi and OLMo 2 by the expressions that print messages. The
/// frame contains the template's own system message, if there is one, and begins with `bos` if the
/// template contains bos_token. `file` is named in messages. Throws std::invalid_argument for any
/// other template, and for a template that writes today's date or whose answers begin with thoughts
/// (<think>).
ChatFrame chat_frame(std::string_view chat_template, std::string_view file,
                     std::string_view bos = "");

/// Reads the chat template of the model in `directory` from the first of chat_template.jinja,
/// tokenizer_config.json and chat_template.json that has one. Returns nullopt if there is no
/// template. Throws as chat_frame() does, and std::runtime_error for a broken file.
std::optional<ChatFrame> read_chat_frame(const std::filesystem::path& directory);

/// aware: the question is part of the prompt. agnostic: it comes after the context has been evicted
/// to the budget.
enum class QueryMode { aware, agnostic };
std::string_view name_of(QueryMode mode);  ///< "query-aware", "query-agnostic"

/// A question as token ids. Both modes have the same ids; they differ only in where one append ends
/// and the next begins.
struct TaskPrompt {
  std::vector<std::int32_t> context;            ///< with the special tokens or template before it
  std::vector<std::int32_t> question;           ///< up to where the answer begins
  std::vector<std::int32_t> answer;             ///< the right answer
  std::vector<std::string> expected, evidence;  ///< as in TaskSample
  Matching matching = Matching::numbers;
  std::uint32_t max_new_tokens = 0;

  std::uint32_t tokens() const {  ///< tokens of context and question
    return static_cast<std::uint32_t>(context.size() + question.size());
  }
  /// The parts that are appended one after another.
  std::vector<std::vector<std::int32_t>> segments(QueryMode mode) const;
};

/// `chat` is nullopt for a model without a template.
TaskPrompt encode_task(const Tokenizer& tokenizer, const std::optional<ChatFrame>& chat,
                       const TaskSample& sample);

}  // namespace kvlab
