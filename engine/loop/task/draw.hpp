// Questions with known answers: a pass key, needles, pairs of key and value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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
TaskKind parse_task_kind(std::string_view name);

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
struct TaskPlace {
  std::uint32_t words;
  double depth;  ///< 0 … 1
};

/// One question. A prompt is context, question, and the beginning of the answer, which leaves only
/// the answer itself to be said.
struct TaskDraw {
  std::string context, question;
  std::string lead;                   ///< how the answer begins: "The pass key is"
  std::vector<std::string> expected;  ///< numbers, in the order of the text
  std::vector<std::string> evidence;  ///< what in the context says each of them, there once
  std::string answer() const;         ///< what follows the lead: " 4821, 1734"
};

/// The `draw`-th question at a place; the same for the same arguments, on any machine. Throws
/// std::invalid_argument for more keys than there are, or too few words for them.
TaskDraw draw_task(const TaskSpec& spec, const Haystack& haystack, TaskPlace place,
                   std::uint64_t seed, std::uint32_t draw);

}  // namespace kvlab
