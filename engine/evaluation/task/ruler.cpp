#include "engine/evaluation/task/ruler.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iterator>
#include <numbers>
#include <set>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "engine/evaluation/task/python_random.hpp"
#include "policies/catalogue.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

constexpr std::array kTasks{
    RulerTask{.name = "niah_single_1", .kind = RulerKind::needles, .max_new_tokens = 128},
    RulerTask{.name = "niah_single_2",
              .kind = RulerKind::needles,
              .max_new_tokens = 128,
              .haystack = RulerHaystack::text},
    RulerTask{.name = "niah_single_3",
              .kind = RulerKind::needles,
              .max_new_tokens = 128,
              .haystack = RulerHaystack::text,
              .value = NeedleForm::uuid},
    RulerTask{.name = "niah_multikey_1",
              .kind = RulerKind::needles,
              .max_new_tokens = 128,
              .haystack = RulerHaystack::text,
              .keys = 4},
    RulerTask{.name = "niah_multikey_2",
              .kind = RulerKind::needles,
              .max_new_tokens = 128,
              .haystack = RulerHaystack::needles},
    RulerTask{.name = "niah_multikey_3",
              .kind = RulerKind::needles,
              .max_new_tokens = 128,
              .haystack = RulerHaystack::needles,
              .key = NeedleForm::uuid,
              .value = NeedleForm::uuid},
    RulerTask{.name = "niah_multivalue",
              .kind = RulerKind::needles,
              .max_new_tokens = 128,
              .haystack = RulerHaystack::text,
              .values = 4},
    RulerTask{.name = "niah_multiquery",
              .kind = RulerKind::needles,
              .max_new_tokens = 128,
              .haystack = RulerHaystack::text,
              .queries = 4},
    RulerTask{.name = "vt", .kind = RulerKind::variables, .max_new_tokens = 30},
    RulerTask{.name = "cwe", .kind = RulerKind::common_words, .max_new_tokens = 120},
    RulerTask{.name = "fwe", .kind = RulerKind::frequent_words, .max_new_tokens = 50},
};

constexpr std::string_view kNoise =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

// Below this length RULER changes the haystack in smaller steps and shortens the lists of words.
constexpr std::uint32_t kShort = 4096;

// Number of questions of the smallest size that are tried before the length counts as too short.
constexpr int kMaxTries = 100;

std::invalid_argument too_short(const RulerTask& task, std::uint32_t length) {
  return std::invalid_argument(
      fmt::format("--length {}: no question of {} fits, together with its answer of {} tokens; "
                  "give a longer --length",
                  length, task.name, task.max_new_tokens));
}

std::invalid_argument too_few_words(std::uint32_t length, std::uint32_t words) {
  return std::invalid_argument(fmt::format(
      "--length {}: cwe needs more than the {} different words of its lists; give a shorter "
      "--length, or --word-lists with more words",
      length, words));
}

std::string join(const std::vector<std::string>& parts, std::string_view between) {
  return fmt::format("{}", fmt::join(parts, between));
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos;
       at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
}

/// The words "1. one 2. two".
std::string number_words(std::span<const std::string> words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i)
    text += fmt::format("{}{}. {}", i ? " " : "", i + 1, words[i]);
  return text;
}

/// The different words of all lists, sorted.
std::vector<std::string> distinct(std::initializer_list<const std::vector<std::string>*> lists) {
  std::vector<std::string> words;
  for (const auto* list : lists) words.insert(words.end(), list->begin(), list->end());
  std::ranges::sort(words);
  words.erase(std::ranges::unique(words).begin(), words.end());
  return words;
}

/// `size` letters, the first of which is `first`.
std::string random_letters(PythonRandom& random, std::size_t size, char first) {
  std::string letters;
  while (letters.size() < size) letters += static_cast<char>(first + random.choices(26));
  return letters;
}

/// Samples names until `count` of them are different, and returns all sampled names.
std::vector<std::string> random_names(PythonRandom& random, std::size_t count, std::size_t letters,
                                      char first) {
  std::vector<std::string> names;
  while (names.size() < count || std::set(names.begin(), names.end()).size() < count)
    names.push_back(random_letters(random, letters, first));
  return names;
}

/// Writes questions whose haystack has a given size, and counts their tokens.
class Writer {
 public:
  explicit Writer(const RulerSources& sources) : sources_(sources) {}
  virtual ~Writer() = default;

  /// A question whose length grows with `size`.
  virtual TaskSample draft(std::uint32_t size) = 0;
  /// Adds to a draft what RULER leaves out while it looks for the size.
  virtual void complete(TaskSample&) {}

  std::string text(const TaskSample& sample) const {
    const auto& chat = sources_.chat;
    return fmt::format("{}{}{}{}{}", chat ? chat->before : "", sample.context, sample.question,
                       chat ? chat->after : "", sample.lead);
  }
  std::uint32_t tokens(std::string_view text) const {
    return static_cast<std::uint32_t>(sources_.tokenizer.encode(text, false).size());
  }
  std::uint32_t tokens(const TaskSample& sample) const { return tokens(text(sample)); }
  /// Estimates the size of a haystack of `length` tokens. Uses the number of tokens per unit of
  /// size in a draft of size `size`.
  double units(std::uint32_t length, std::uint32_t size) {
    return length / (static_cast<double>(tokens(draft(size))) / size);
  }

 protected:
  const RulerSources& sources_;
};

/// How RULER looks for the largest haystack.
struct SizeSearch {
  std::uint32_t length;    ///< maximum number of tokens, after those of the answer are subtracted
  std::uint32_t step;      ///< the smallest size, and the decrement if a question is too long
  std::uint32_t max_size;  ///< largest size that is tried
};

/// The largest size that RULER tries for `length` tokens: three times the estimated size, because
/// samples differ in length.
std::uint32_t largest_tried(Writer& writer, std::uint32_t length, std::uint32_t step) {
  return std::max(static_cast<std::uint32_t>(3 * writer.units(length, step)), 2 * step);
}

/// The largest size whose question fits, by bisection. A question of this size that is sampled
/// later may be too long.
std::uint32_t largest_size(Writer& writer, const SizeSearch& search, std::uint32_t extra) {
  std::uint32_t low = search.step, high = search.max_size, best = low;
  while (low <= high) {
    const std::uint32_t middle = (low + high) / 2;
    if (writer.tokens(writer.draft(middle)) + extra <= search.length) {
      best = middle;
      low = middle + 1;
    } else {
      high = middle - 1;
    }
  }
  return best;
}

/// A question of at most `size` units that fits; nullopt if even the smallest do not.
std::optional<TaskSample> fitting(Writer& writer, const SizeSearch& search, std::uint32_t size) {
  for (int tries = 0; tries < kMaxTries;) {
    TaskSample sample = writer.draft(size);
    writer.complete(sample);
    if (writer.tokens(sample) <= search.length) return sample;
    if (size > search.step)
      size -= search.step;
    else
      ++tries;
  }
  return std::nullopt;
}

// --- Needles -------------------------------------------------------------------------------------

/// Keys made of an adjective and a noun, sorted: "able-acorn". Lists as large as those of
/// wonderwords give millions of keys, so a key is computed from its index. Only keys whose order
/// differs from that of their adjectives are stored.
class NeedleWords {
 public:
  explicit NeedleWords(const WordLists& words) : nouns_(distinct({&words.nouns})) {
    std::vector<std::string> beginnings;
    for (const std::string& adjective : words.adjectives) beginnings.push_back(adjective + '-');
    beginnings = distinct({&beginnings});
    for (std::size_t first = 0, end = 0; first < beginnings.size(); first = end) {
      // That happens only if one beginning is a prefix of another: "well-", "well-known-".
      while (end < beginnings.size() && beginnings[end].starts_with(beginnings[first])) ++end;
      Block block{.begin = count_, .beginning = beginnings[first], .keys = {}};
      for (std::size_t i = first; end - first > 1 && i < end; ++i)
        for (const std::string& noun : nouns_) block.keys.push_back(beginnings[i] + noun);
      block.keys = distinct({&block.keys});
      const std::size_t size = end - first > 1 ? block.keys.size() : nouns_.size();
      count_ += static_cast<std::uint32_t>(size);
      blocks_.push_back(std::move(block));
    }
  }

  std::string sample(PythonRandom& random) const {
    const std::uint32_t key = random.below(count_);
    const Block& block = *--std::ranges::upper_bound(blocks_, key, {}, &Block::begin);
    return block.keys.empty() ? block.beginning + nouns_[key - block.begin]
                              : block.keys[key - block.begin];
  }

 private:
  /// Consecutive keys: all keys of one adjective, or stored keys of several adjectives.
  struct Block {
    std::uint32_t begin;  ///< number of keys before this block
    std::string beginning;
    std::vector<std::string> keys;  ///< empty if there is one adjective
  };

  std::vector<std::string> nouns_;
  std::vector<Block> blocks_;
  std::uint32_t count_ = 0;
};

/// A random UUID of version 4.
std::string random_uuid(PythonRandom& random) {
  std::array<std::uint32_t, 4> words;  // the lowest first
  for (std::uint32_t& word : words) word = random.bits(32);
  std::string digits =
      fmt::format("{:08x}{:08x}{:08x}{:08x}", words[3], words[2], words[1], words[0]);
  digits[12] = '4';
  constexpr std::string_view kVariant = "89ab";
  digits[16] = kVariant[(words[1] >> 28) & 3];
  for (const std::size_t at : {20, 16, 12, 8}) digits.insert(at, 1, '-');
  return digits;
}

class NeedleWriter : public Writer {
 public:
  NeedleWriter(const RulerTask& task, const RulerSources& sources, std::uint32_t seed)
      : Writer(sources), task_(task), seed_(seed), random_(seed) {
    if (task.key == NeedleForm::word) words_.emplace(sources.words);
    std::istringstream in{std::string(sources.text)};
    text_.assign(std::istream_iterator<std::string>(in), {});
    if (text_.empty())
      throw std::invalid_argument("--text: has no words; give a text of some sentences");
  }

  TaskSample draft(std::uint32_t size) override {
    std::vector<std::string> keys, needles;
    std::vector<std::vector<std::string>> values;
    for (std::uint32_t k = 0; k < std::max(task_.keys, task_.queries); ++k) {
      keys.push_back(sample(task_.key));
      values.emplace_back();
      for (std::uint32_t v = 0; v < task_.values; ++v) {
        values.back().push_back(sample(task_.value));
        needles.push_back(needle(keys.back(), values.back().back()));
      }
    }
    PythonRandom(seed_).shuffle(needles);
    const std::string hidden = task_.haystack == RulerHaystack::text ? write_text(size, needles)
                                                                     : write_lines(size, needles);
    TaskSample sample = question(hidden);
    std::vector<std::string> queries;
    for (const std::uint32_t k :
         random_.sample(static_cast<std::uint32_t>(keys.size()), task_.queries)) {
      queries.push_back(keys[k]);
      for (const std::string& value : values[k]) {
        sample.expected.push_back(value);
        sample.evidence.push_back(needle(keys[k], value));
      }
    }
    std::string asked = join(queries, ", ");
    if (queries.size() > 1) asked.insert(asked.size() - queries.back().size(), "and ");
    replace_all(sample.question, "{query}", asked);
    replace_all(sample.lead, "{query}", asked);
    return sample;
  }

 private:
  std::string sample(NeedleForm form) {
    switch (form) {
      case NeedleForm::word:
        return words_->sample(random_);
      case NeedleForm::number:
        return std::to_string(1'000'000 + random_.below(9'000'000));
      case NeedleForm::uuid:
        return random_uuid(random_);
    }
    return "";
  }
  std::string_view values_name() const {
    return task_.value == NeedleForm::uuid ? "uuids" : "numbers";
  }
  std::string needle(std::string_view key, std::string_view value) const {
    return fmt::format("One of the special magic {} for {} is: {}.", values_name(), key, value);
  }

  /// Needles in lines of noise, or of needles for other keys.
  std::string write_lines(std::uint32_t size, const std::vector<std::string>& needles) {
    std::vector<std::string> lines;
    for (std::uint32_t i = 0; i < size; ++i) {
      if (task_.haystack == RulerHaystack::noise) {
        lines.emplace_back(kNoise);
        continue;
      }
      const std::string key = sample(task_.key);  // RULER samples the key before the value
      lines.push_back(needle(key, sample(task_.value)));
    }
    auto places = random_.sample(size, static_cast<std::uint32_t>(needles.size()));
    std::ranges::sort(places, std::greater{});
    for (std::size_t i = 0; i < needles.size(); ++i)
      lines.insert(lines.begin() + places[i], needles[i]);
    return join(lines, "\n");
  }

  /// Needles between the sentences of the text's first words. The text is repeated if necessary.
  std::string write_text(std::uint32_t size, const std::vector<std::string>& needles) {
    std::vector<std::string> sentences;
    for (std::uint32_t i = 0; i < size; ++i) {
      const bool begins = i == 0 || ends_sentence(text_[(i - 1) % text_.size()]);
      const std::string& word = text_[i % text_.size()];
      if (begins)
        sentences.push_back(word);
      else
        sentences.back() += ' ' + word;
    }
    constexpr std::uint32_t kDepths = 40;  // from 0% to 100%
    std::vector<std::size_t> borders;
    for (const std::uint32_t i :
         random_.sample(kDepths, static_cast<std::uint32_t>(needles.size()))) {
      const double percent = std::round(100.0 * i / (kDepths - 1));
      borders.push_back(
          static_cast<std::size_t>(static_cast<double>(sentences.size()) * (percent / 100)));
    }
    std::ranges::sort(borders);
    std::vector<std::string> parts;
    std::size_t begin = 0;
    const auto take = [&](std::size_t end) {
      parts.push_back(
          fmt::format("{}", fmt::join(sentences.begin() + static_cast<long>(begin),
                                      sentences.begin() + static_cast<long>(end), " ")));
      begin = end;
    };
    for (std::size_t i = 0; i < needles.size(); ++i) {
      take(borders[i]);
      parts.push_back(needles[i]);
    }
    take(sentences.size());
    return join(parts, " ");
  }

  /// RULER's text around the needles. The wording depends on whether there is one value or several.
  TaskSample question(const std::string& hidden) const {
    const bool one = task_.queries * task_.values == 1;
    std::string_view values = values_name();
    if (one) values.remove_suffix(1);
    return {
        .context = fmt::format(
            "{} special magic {} {} hidden within the following text. Make sure to memorize "
            "it. I will quiz you about the {} afterwards.\n{}",
            one ? "A" : "Some", values, one ? "is" : "are", values, hidden),
        .question = fmt::format(
            "\nWhat {} the special magic {} for {{query}} mentioned in the provided text?",
            one ? "is" : "are all", values),
        .lead = fmt::format(" The special magic {} for {{query}} mentioned in the provided text {}",
                            values, one ? "is" : "are")};
  }

  const RulerTask& task_;
  std::uint32_t seed_;
  PythonRandom random_;
  std::optional<NeedleWords> words_;
  std::vector<std::string> text_;  // words of the haystack text
};

// --- Variable tracking ---------------------------------------------------------------------------

class VariableWriter : public Writer {
 public:
  VariableWriter(const RulerSources& sources, std::uint32_t seed)
      : Writer(sources), random_(seed), numbers_(seed) {
    find_example();
  }

  TaskSample draft(std::uint32_t size) override {
    std::vector<std::string> names = random_names(random_, kNames, example_.empty() ? 3 : 5, 'A');
    names.resize(kNames);
    const std::string value =
        example_.empty() ? std::string(kExampleValue) : std::to_string(random_value());
    std::vector<std::string> lines(size, std::string(kNoise));
    auto places = random_.sample(size, kNames);
    std::ranges::sort(places);
    TaskSample sample{
        .lead = fmt::format(" Answer: According to the chain(s) of variable assignment in the text "
                            "above, {} variables are assigned the value {}, they are: ",
                            kNames, value)};
    for (std::size_t i = 0; i < kNames; ++i) {
      const std::string source = i ? "VAR " + names[i - 1] : value;
      sample.evidence.push_back(fmt::format("VAR {} = {}", names[i], source));
      lines.insert(lines.begin() + places[i] + static_cast<long>(i),
                   sample.evidence.back() + (i ? " " : ""));
    }
    sample.context = fmt::format(
        "Memorize and track the chain(s) of variable assignment hidden in the following "
        "text.\n\n{}",
        join(lines, "\n"));
    sample.question = fmt::format(
        "\nQuestion: Find all variables that are assigned the value {} in the text above.", value);
    sample.expected = std::move(names);
    sample.answer_text = " " + join(sample.expected, " ");
    return sample;
  }

  /// Puts the example before the question, with new names and another value.
  void complete(TaskSample& sample) override {
    if (example_.empty()) return;
    std::string example = example_;
    for (const std::string& name : example_names_)
      replace_all(example, name, random_letters(random_, name.size(), 'A'));
    replace_all(example, kExampleValue, std::to_string(random_value()));
    sample.context = example + '\n' + sample.context;
  }

  std::uint32_t example_tokens() const { return tokens(example_); }

 private:
  static constexpr std::size_t kNames = 5;  // a chain of four hops
  static constexpr std::string_view kExampleValue = "12345";

  std::uint32_t random_value() { return numbers_.whole(10000, 99999); }

  /// Samples the example, which precedes each question: a question with its answer, in at most 500
  /// tokens.
  void find_example() {
    constexpr std::uint32_t kLength = 500, kStep = 5;
    const SizeSearch search{
        .length = kLength, .step = kStep, .max_size = largest_tried(*this, kLength, kStep)};
    const auto sample = fitting(*this, search, largest_size(*this, search, 0));
    if (!sample)
      throw std::invalid_argument(
          "vt: its example does not fit 500 tokens of this tokenizer; leave the task out");
    example_names_ = sample->expected;
    example_ = fmt::format("{}{}{}{}\n", sample->context, sample->question, sample->lead,
                           sample->answer_text);
  }

  PythonRandom random_;
  NumpyRandom numbers_;
  std::string example_;
  std::vector<std::string> example_names_;
};

// --- Common words --------------------------------------------------------------------------------

class CommonWordsWriter : public Writer {
 public:
  CommonWordsWriter(const RulerSources& sources, std::uint32_t length, std::uint32_t seed)
      : Writer(sources), seed_(seed), is_short_(length < kShort), random_(seed) {
    words_ = distinct({&sources.words.nouns, &sources.words.adjectives, &sources.words.verbs});
    if (words_.size() < kMinWords)
      throw std::invalid_argument(
          fmt::format("--word-lists: has {} different words, but cwe needs at least {}",
                      words_.size(), kMinWords));
    PythonRandom(seed).shuffle(words_);
  }

  TaskSample draft(std::uint32_t size) override {
    // RULER puts the model's template around the example too.
    const TaskSample example = is_short_ ? list(20, 3, 1) : list(40, 10, 3);
    TaskSample sample = is_short_ ? list(size, 6, 1) : list(size, 30, 3);
    sample.context = fmt::format("{}{}\n{}{}", text(example).substr(before().size()),
                                 example.answer_text, before(), sample.context);
    return sample;
  }

  std::uint32_t num_words() const { return static_cast<std::uint32_t>(words_.size()); }
  std::uint32_t largest_tried(std::uint32_t length, std::uint32_t step) {
    const auto estimated = static_cast<std::uint32_t>(units(length, 4096));
    return std::min(std::max(2 * estimated, 2 * step), num_words());
  }

 private:
  static constexpr std::uint32_t kCommon = 10, kMinWords = 40;

  std::string_view before() const {
    return sources_.chat ? std::string_view(sources_.chat->before) : std::string_view();
  }

  /// A list of `size` different words. Ten of them occur `often` times each, and the others
  /// `rarely` times each.
  TaskSample list(std::uint32_t size, std::uint32_t often, std::uint32_t rarely) {
    std::vector<std::string> common, others, all;
    for (const std::uint32_t i : random_.sample(num_words(), std::min(size, num_words())))
      (common.size() < kCommon ? common : others).push_back(words_[i]);
    const auto add = [&](const std::vector<std::string>& words, std::uint32_t times) {
      for (std::uint32_t i = 0; i < times; ++i) all.insert(all.end(), words.begin(), words.end());
    };
    add(common, often);
    add(others, rarely);
    PythonRandom(seed_).shuffle(all);
    return {.context = fmt::format("Below is a numbered list of words. In these words, some appear "
                                   "more often than others. Memorize the ones that appear most "
                                   "often.\n{}",
                                   number_words(all)),
            .question = "\nQuestion: What are the 10 most common words in the above list?",
            .lead = " Answer: The top 10 words that appear most often in the list are:",
            .expected = common,
            .answer_text = " " + number_words(common)};
  }

  std::uint32_t seed_;
  bool is_short_;
  PythonRandom random_;
  std::vector<std::string> words_;
};

// --- Frequent words ------------------------------------------------------------------------------

/// Made-up words whose frequencies follow a zeta distribution. The most frequent one, "...", is
/// noise. The next three are the answer.
class FrequentWordsWriter : public Writer {
 public:
  /// `limit`: maximum number of tokens of a question.
  FrequentWordsWriter(const RulerSources& sources, std::uint32_t limit, std::uint32_t seed)
      : Writer(sources), limit_(limit), seed_(seed), random_(seed) {}

  static constexpr std::uint32_t kWordLetters = 6;
  static constexpr std::uint32_t kMinLimit = 4 * 50;  // the three words of the answer, and "..."

  void renew_words() {
    words_ = random_names(random_, limit_ / 50, kWordLetters, 'a');
    words_ = distinct({&words_});
    PythonRandom(seed_).shuffle(words_);
    words_.front() = "...";
  }

  TaskSample draft(std::uint32_t size) override {
    constexpr double kZetaOf2 = std::numbers::pi * std::numbers::pi / 6;
    std::vector<std::string> text;
    for (std::size_t i = 0; i < words_.size(); ++i) {
      const auto rank = static_cast<double>(i + 1);
      text.insert(text.end(), static_cast<std::size_t>(size / (rank * rank) / kZetaOf2), words_[i]);
    }
    PythonRandom(seed_).shuffle(text);
    return {.context = fmt::format(
                "Read the following coded text and track the frequency of each coded word. Find "
                "the three most frequently appeared coded words. {}",
                join(text, " ")),
            .question =
                "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
                "What are the three most frequently appeared words in the above coded "
                "text?",
            .lead =
                " Answer: According to the coded text above, the three most frequently "
                "appeared words are:",
            .expected = {words_.begin() + 1, words_.begin() + 4}};
  }

 private:
  std::uint32_t limit_, seed_;
  PythonRandom random_;
  std::vector<std::string> words_;
};

// --- Samplers ------------------------------------------------------------------------------------

/// A sample with what all questions of a task have in common.
TaskSample finish_sample(TaskSample sample, const RulerTask& task) {
  sample.before_lead = "";
  sample.matching = Matching::strings;
  sample.max_new_tokens = task.max_new_tokens;
  return sample;
}

/// Needles, variables and common words: a haystack of the largest size that fits.
class HaystackSampler : public RulerSampler {
 public:
  HaystackSampler(const RulerTask& task, const RulerSources& sources, std::uint32_t length,
                  std::uint32_t seed)
      : task_(task), length_(length) {
    search_.length = length - task.max_new_tokens;
    const bool is_short = length < kShort;
    switch (task.kind) {
      case RulerKind::needles:
        writer_ = std::make_unique<NeedleWriter>(task, sources, seed);
        search_.step = task.haystack == RulerHaystack::text ? 500 : is_short ? 5 : 25;
        search_.max_size = largest_tried(*writer_, length, search_.step);
        size_ = largest_size(*writer_, search_, 0);
        return;
      case RulerKind::variables: {
        auto writer = std::make_unique<VariableWriter>(sources, seed);
        search_.step = is_short ? 5 : 10;
        search_.max_size = largest_tried(*writer, length, search_.step);
        size_ = largest_size(*writer, search_, writer->example_tokens());
        writer_ = std::move(writer);
        return;
      }
      default: {
        auto writer = std::make_unique<CommonWordsWriter>(sources, length, seed);
        search_.step = 10;
        search_.max_size = writer->largest_tried(length, search_.step);
        size_ = largest_size(*writer, search_, 0);
        if (size_ == writer->num_words()) throw too_few_words(length, size_);
        writer_ = std::move(writer);
      }
    }
  }

  TaskSample next() override {
    if (auto sample = fitting(*writer_, search_, size_))
      return finish_sample(std::move(*sample), task_);
    throw too_short(task_, length_);
  }

 private:
  const RulerTask& task_;
  std::uint32_t length_, size_ = 0;
  std::unique_ptr<Writer> writer_;
  SizeSearch search_{};
};

class FrequentWordsSampler : public RulerSampler {
 public:
  FrequentWordsSampler(const RulerTask& task, const RulerSources& sources, std::uint32_t length,
                       std::uint32_t seed)
      : task_(task),
        length_(length),
        limit_(length - task.max_new_tokens),
        writer_(sources, limit_, seed) {
    if (limit_ < FrequentWordsWriter::kMinLimit) throw too_short(task, length);
    writer_.renew_words();
    size_ = limit_ / FrequentWordsWriter::kWordLetters;
    while (tokens(size_) < limit_) size_ += step();
    size_ -= std::min(size_, step());
  }

  TaskSample next() override {
    writer_.renew_words();
    std::uint32_t size = size_;
    while (tokens(size) > limit_) {
      if (size <= step()) throw too_short(task_, length_);
      size -= step();
    }
    return finish_sample(writer_.draft(size), task_);
  }

 private:
  std::uint32_t step() const { return limit_ / 32; }
  std::uint32_t tokens(std::uint32_t size) { return writer_.tokens(writer_.draft(size)); }

  const RulerTask& task_;
  std::uint32_t length_, limit_, size_ = 0;
  FrequentWordsWriter writer_;
};

std::vector<std::string> read_words(const std::filesystem::path& file) {
  constexpr std::size_t kMaxBytes = std::size_t{16} << 20;
  std::istringstream in(read_text_file(file, kMaxBytes));
  std::vector<std::string> words;
  for (std::string line; std::getline(in, line);) {
    const std::size_t end = line.find_last_not_of(" \t\r");
    if (end != std::string::npos) words.push_back(line.substr(0, end + 1));
  }
  if (words.empty())
    throw std::runtime_error(
        fmt::format("{}: has no words; it should have a word on each line", file.string()));
  return words;
}

}  // namespace

std::span<const RulerTask> ruler_tasks() { return kTasks; }

const RulerTask& ruler_task(std::string_view name) {
  if (const auto found = std::ranges::find(kTasks, name, &RulerTask::name); found != kTasks.end())
    return *found;
  std::vector<std::string> known;
  for (const RulerTask& task : kTasks) known.emplace_back(task.name);
  const auto near = nearest_name(name, known);
  throw std::invalid_argument(fmt::format("--tasks: {} should be one of {}{}", json_quoted(name),
                                          join(known, ", "),
                                          near ? fmt::format("; did you mean {}?", *near) : ""));
}

WordLists read_word_lists(const std::filesystem::path& directory) {
  return {read_words(directory / "nounlist.txt"), read_words(directory / "adjectivelist.txt"),
          read_words(directory / "verblist.txt")};
}

std::unique_ptr<RulerSampler> ruler_sampler(const RulerTask& task, const RulerSources& sources,
                                            std::uint32_t length, std::uint32_t seed) {
  if (length <= task.max_new_tokens) throw too_short(task, length);
  if (task.kind == RulerKind::frequent_words)
    return std::make_unique<FrequentWordsSampler>(task, sources, length, seed);
  return std::make_unique<HaystackSampler>(task, sources, length, seed);
}

}  // namespace kvlab
