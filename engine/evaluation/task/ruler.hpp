// RULER's synthetic tasks (Hsieh et al. 2024, arXiv:2404.06654): needles, variable tracking, common
// words and frequent words. Given the same tokenizer, words and seed, prompts are equal to those of
// RULER's own generator. docs/guides/tasks.md states the differences.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/evaluation/task/sample.hpp"

namespace kvlab {

enum class RulerKind { needles, variables, common_words, frequent_words };
/// noise: five sentences, repeated. text: a text that is given. needles: needles with other keys.
enum class RulerHaystack { noise, text, needles };
enum class NeedleForm { word, number, uuid };

struct RulerTask {
  std::string_view name;
  RulerKind kind;
  std::uint32_t max_new_tokens;  ///< tokens of an answer; the length of a task includes them
  /// RulerKind::needles: what hides the needles, and what keys and values look like.
  RulerHaystack haystack = RulerHaystack::noise;
  NeedleForm key = NeedleForm::word, value = NeedleForm::number;
  std::uint32_t keys = 1;     ///< keys in the text; at least `queries` are used
  std::uint32_t values = 1;   ///< values of each key
  std::uint32_t queries = 1;  ///< keys that are asked for
};

/// All tasks, in RULER's order: niah_single_1, …, vt, cwe, fwe.
std::span<const RulerTask> ruler_tasks();

/// Finds a task by its name. Throws std::invalid_argument for an unknown name. The message says
/// which tasks exist.
const RulerTask& ruler_task(std::string_view name);

/// The words from which keys and lists are made. A word may be in several lists.
struct WordLists {
  std::vector<std::string> nouns, adjectives, verbs;
};

/// Words that were written for kvlab, about 960 different ones.
WordLists bundled_word_lists();

/// Reads nounlist.txt, adjectivelist.txt and verblist.txt, which have a word on each line, as the
/// Python package wonderwords has them. Throws std::runtime_error for a file that is missing or has
/// no words.
WordLists read_word_lists(const std::filesystem::path& directory);

/// What prompts are made of. All of it must outlive the sampler.
struct RulerSources {
  const Tokenizer& tokenizer;  ///< counts tokens
  const std::optional<ChatFrame>& chat;
  std::string_view text;  ///< for RulerHaystack::text
  const WordLists& words;
};

/// Samples the questions of one task, one after another. RULER draws all questions from one
/// sequence of random numbers, so a question depends on those before it.
class RulerSampler {
 public:
  virtual ~RulerSampler() = default;
  /// The next question. Throws std::invalid_argument if no question fits the length.
  virtual TaskSample next() = 0;
};

/// Makes a sampler of questions that have, together with the answer's `max_new_tokens`, at most
/// `length` tokens, not counting special tokens that the tokenizer puts before a text. Throws
/// std::invalid_argument if the length is too short or there are too few words.
std::unique_ptr<RulerSampler> ruler_sampler(const RulerTask& task, const RulerSources& sources,
                                            std::uint32_t length, std::uint32_t seed);

}  // namespace kvlab
