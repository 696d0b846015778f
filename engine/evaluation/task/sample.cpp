#include "engine/evaluation/task/sample.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <set>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "engine/evaluation/conversation.hpp"
#include "policies/catalogue.hpp"
#include "traces/base/json.hpp"
#include "traces/base/split_mix.hpp"

namespace kvlab {
namespace {

void append(std::string& text, std::string_view sentence) {
  if (!text.empty()) text += ' ';
  text += sentence;
}

constexpr std::array<std::string_view, 32> kAdjectives{
    "amber", "bitter", "brass",  "broken", "copper", "crimson", "crooked", "dusty",
    "faded", "gentle", "golden", "hollow", "humble", "hungry",  "ivory",   "jagged",
    "lunar", "marble", "mellow", "misty",  "narrow", "painted", "patient", "purple",
    "quiet", "rusty",  "silent", "silver", "sleepy", "stormy",  "velvet",  "wooden"};
constexpr std::array<std::string_view, 48> kNouns{
    "anchor",  "badger", "barrel", "basket",  "beacon", "bottle",  "bridge",  "button",
    "candle",  "carpet", "castle", "cellar",  "chapel", "cradle",  "dragon",  "falcon",
    "feather", "fiddle", "garden", "goblet",  "hammer", "harbour", "helmet",  "island",
    "jacket",  "kettle", "ladder", "lantern", "magnet", "meadow",  "mirror",  "needle",
    "orchard", "oyster", "parcel", "pillow",  "pocket", "ribbon",  "saddle",  "shovel",
    "spider",  "statue", "teapot", "ticket",  "turnip", "violin",  "whistle", "window"};
constexpr std::uint32_t kWordsOfPair = 3;  // "amber lantern: 4821"

/// SplitMix64, seeded with a hash of the arguments.
class Random {
 public:
  explicit Random(std::initializer_list<std::uint64_t> seeds) {
    for (const std::uint64_t seed : seeds) state_ = next() ^ seed;
  }
  std::uint64_t next() { return split_mix(std::exchange(state_, state_ + kSplitMixStep)); }
  std::uint64_t below(std::uint64_t count) { return next() % count; }
  double share() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  /// A number of `digits` digits that does not start with 0.
  std::string number(std::uint32_t digits) {
    std::string text(1, static_cast<char>('1' + below(9)));
    while (text.size() < digits) text += static_cast<char>('0' + below(10));
    return text;
  }

 private:
  std::uint64_t state_ = 0;
};

/// Samples different keys, each an adjective and a noun.
std::vector<std::string> sample_keys(std::size_t count, Random& random) {
  std::vector<std::size_t> order(kAdjectives.size() * kNouns.size());
  if (count > order.size())
    throw std::invalid_argument(
        fmt::format("{} keys: only {} different ones exist; give fewer --keys or --words", count,
                    order.size()));
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::vector<std::string> keys;
  for (std::size_t i = 0; i < count; ++i) {
    std::swap(order[i], order[i + random.below(order.size() - i)]);
    keys.push_back(fmt::format("{} {}", kAdjectives[order[i] / kNouns.size()],
                               kNouns[order[i] % kNouns.size()]));
  }
  return keys;
}

/// Samples different numbers.
std::vector<std::string> sample_numbers(std::size_t count, std::uint32_t digits, Random& random) {
  std::set<std::string> known;
  std::vector<std::string> numbers;
  while (numbers.size() < count)
    if (std::string number = random.number(digits); known.insert(number).second)
      numbers.push_back(std::move(number));
  return numbers;
}

std::string add_introduction(std::string_view text) {
  return fmt::format("Read the following text. A question about it comes later.\n\n{}\n", text);
}

TaskSample sample_passkey(const Haystack& haystack, TaskPoint point, Random& random) {
  const std::string key = random.number(5);
  const Hidden hidden{
      *point.depth, fmt::format("The pass key is {}. Remember it. {} is the pass key.", key, key)};
  return {.context = add_introduction(
              haystack.with(point.words, random.below(haystack.sentences()), {&hidden, 1})),
          .question = "\nWhat is the pass key in the text?",
          .lead = "The pass key is the number",
          .expected = {key},
          .evidence = {hidden.sentence}};
}

/// A needle question. The first number of the requested key is at `point`; all other numbers are at
/// random places.
TaskSample sample_needle(const TaskSpec& spec, const Haystack& haystack, TaskPoint point,
                         Random& random) {
  constexpr std::uint32_t kDigits = 6;
  const bool single = spec.values == 1;
  const std::vector<std::string> keys = sample_keys(spec.keys, random);
  const std::vector<std::string> numbers =
      sample_numbers(std::size_t{spec.keys} * spec.values, kDigits, random);
  std::vector<Hidden> hidden;
  for (std::size_t i = 0; i < numbers.size(); ++i)
    hidden.push_back({i == 0 ? *point.depth : random.share(),
                      fmt::format("{} of the {} is {}.",
                                  single ? "The secret number" : "One of the secret numbers",
                                  keys[i / spec.values], numbers[i])});
  std::vector<std::size_t> requested(spec.values);
  for (std::size_t i = 0; i < requested.size(); ++i) requested[i] = i;
  std::ranges::stable_sort(requested, {}, [&](std::size_t i) { return hidden[i].depth; });
  TaskSample sample{
      .context =
          add_introduction(haystack.with(point.words, random.below(haystack.sentences()), hidden)),
      .question = fmt::format("\nWhat {} of the {}?",
                              single ? "is the secret number" : "are all secret numbers", keys[0]),
      .lead = fmt::format("The secret {} of the {} {}", single ? "number" : "numbers", keys[0],
                          single ? "is" : "are")};
  for (const std::size_t i : requested) {
    sample.expected.push_back(numbers[i]);
    sample.evidence.push_back(hidden[i].sentence);
  }
  return sample;
}

/// A recall question: lines with a key and a number. With `reassigned`, every fourth line assigns a
/// new number to an earlier key, and the question asks for one of these keys.
TaskSample sample_recall(const TaskSpec& spec, TaskPoint point, Random& random) {
  constexpr std::uint32_t kDigits = 4;
  const std::uint32_t min_lines = spec.reassigned ? 2 : 1;
  const std::uint32_t lines = std::max(min_lines, point.words / kWordsOfPair);
  const std::vector<std::string> keys = sample_keys(lines, random);
  const std::vector<std::string> numbers = sample_numbers(lines, kDigits, random);
  auto requested = static_cast<std::uint32_t>(std::lround(*point.depth * (lines - 1)));
  if (spec.reassigned) requested = std::max(requested, 1u);
  std::vector<std::size_t> key_of(lines);
  for (std::uint32_t i = 0; i < lines; ++i) key_of[i] = i;
  if (spec.reassigned) {
    const std::size_t outdated = key_of[requested] = random.below(requested);
    for (std::uint32_t i = 3; i < lines; i += 4) {
      const std::size_t again = key_of[random.below(i)];
      if (i != requested && i != outdated && again != outdated) key_of[i] = again;
    }
  }
  std::string list;
  for (std::uint32_t i = 0; i < lines; ++i)
    list += fmt::format("{}: {}\n", keys[key_of[i]], numbers[i]);
  const std::string& key = keys[key_of[requested]];
  return {
      .context = fmt::format("Read the following list. A question about it comes later.{}\n\n{}",
                             spec.reassigned ? " Where a name comes again, its last number "
                                               "counts."
                                             : "",
                             list),
      .question = fmt::format("\nWhich number does the list give for {}?", key),
      .lead = fmt::format("{}:", key),
      .expected = {numbers[requested]},
      .evidence = {fmt::format("{}: {}", key, numbers[requested])}};
}

}  // namespace

bool ends_sentence(std::string_view word) {
  while (!word.empty() && (word.back() == '"' || word.back() == '\'' || word.back() == ')'))
    word.remove_suffix(1);
  return !word.empty() && (word.back() == '.' || word.back() == '!' || word.back() == '?');
}

Haystack::Haystack(std::string_view text) {
  constexpr std::uint32_t kMaxWords =
      60;  // maximum number of words of a sentence, so that texts without full stops are also split
  std::istringstream in{std::string(text)};
  Sentence sentence{"", 0};
  for (std::string word; in >> word;) {
    append(sentence.text, word);
    if (++sentence.words < kMaxWords && !ends_sentence(word)) continue;
    sentences_.push_back(std::move(sentence));
    sentence = {"", 0};
  }
  if (sentence.words > 0) sentences_.push_back(std::move(sentence));
  if (sentences_.empty())
    throw std::invalid_argument("--text: has no words; give a text of some sentences");
}

std::string Haystack::with(std::uint32_t words, std::size_t start,
                           std::span<const Hidden> hidden) const {
  std::vector<const Sentence*> taken;
  std::vector<double> words_before{0};  // number of words before each border between sentences
  while (words_before.back() < words) {
    taken.push_back(&sentences_[(start + taken.size()) % sentences_.size()]);
    words_before.push_back(words_before.back() + taken.back()->words);
  }
  std::vector<std::string> at_border(words_before.size());
  for (const Hidden& one : hidden) {
    const double wanted = one.depth * words_before.back();
    std::size_t nearest = 0;
    for (std::size_t b = 1; b < words_before.size(); ++b)
      if (std::abs(words_before[b] - wanted) < std::abs(words_before[nearest] - wanted))
        nearest = b;
    append(at_border[nearest], one.sentence);
  }
  std::string text = at_border[0];
  for (std::size_t i = 0; i < taken.size(); ++i) {
    append(text, taken[i]->text);
    if (!at_border[i + 1].empty()) append(text, at_border[i + 1]);
  }
  return text;
}

TaskKind parse_task_kind(std::string_view name, std::string_view what) {
  if (name == "passkey") return TaskKind::passkey;
  if (name == "needle") return TaskKind::needle;
  if (name == "recall") return TaskKind::recall;
  if (name == "ruler") return TaskKind::ruler;
  const std::vector<std::string> known{"passkey", "needle", "recall", "ruler"};
  const auto near = nearest_name(name, known);
  throw std::invalid_argument(fmt::format("{}: {} should be passkey, needle, recall or ruler{}",
                                          what, json_quoted(name),
                                          near ? fmt::format("; did you mean {}?", *near) : ""));
}

std::string TaskSpec::text() const {
  switch (kind) {
    case TaskKind::passkey:
      return "passkey";
    case TaskKind::needle:
      return fmt::format("needle:keys={}:values={}", keys, values);
    case TaskKind::recall:
      return reassigned ? "recall:reassigned" : "recall";
    case TaskKind::ruler:
      return "ruler";
  }
  return "";
}

std::string TaskSample::answer() const {
  return answer_text.empty() ? fmt::format(" {}", fmt::join(expected, ", ")) : answer_text;
}

TaskSample sample_task(const TaskSpec& spec, const Haystack& haystack, TaskPoint point,
                       std::uint64_t seed, std::uint32_t sample) {
  Random random{seed, static_cast<std::uint64_t>(spec.kind), point.words,
                std::bit_cast<std::uint64_t>(point.depth.value()), sample};
  switch (spec.kind) {
    case TaskKind::passkey:
      return sample_passkey(haystack, point, random);
    case TaskKind::needle:
      return sample_needle(spec, haystack, point, random);
    case TaskKind::recall:
      return sample_recall(spec, point, random);
    case TaskKind::ruler:
      break;  // ruler_sampler() samples these
  }
  throw std::logic_error("task: no such kind");
}

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
                       const TaskSample& sample) {
  TaskPrompt prompt;
  // A chat template writes all special tokens itself.
  prompt.context = chat ? tokenizer.encode(chat->before + sample.context, false)
                        : encode_prompt(tokenizer, sample.context);
  const std::string question =
      sample.question + (chat ? chat->after : sample.before_lead) + sample.lead;
  // The answer begins at the first id that changes when the answer's text is added.
  prompt.question = tokenizer.encode(question, false);
  const std::vector<std::int32_t> answered = tokenizer.encode(question + sample.answer(), false);
  const auto border = std::ranges::mismatch(prompt.question, answered);
  prompt.answer.assign(border.in2, answered.end());
  prompt.question.erase(border.in1, prompt.question.end());
  prompt.expected = sample.expected;
  prompt.evidence = sample.evidence;
  prompt.matching = sample.matching;
  prompt.max_new_tokens = sample.max_new_tokens;
  return prompt;
}

}  // namespace kvlab
