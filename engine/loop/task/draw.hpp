// Questions with known answers: a pass key, needles, pairs of key and value.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/loop/task/haystack.hpp"

namespace kvlab {

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
