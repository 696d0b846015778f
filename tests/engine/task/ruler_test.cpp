// Compares RULER's tasks with prompts of RULER's own generator, and checks their lengths, answers
// and scores.
#include "engine/evaluation/task/ruler.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "engine/backend.hpp"
#include "engine/evaluation/task/answers.hpp"
#include "engine/evaluation/task/python_random.hpp"
#include "engine/evaluation/task/run.hpp"
#include "tests/catch.hpp"
#include "tests/engine/tiny.hpp"
#include "tests/error_of.hpp"
#include "tests/skip.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/files.hpp"

namespace kvlab {
namespace {

using test::error_of;

const std::optional<ChatFrame> kNoChat;

const Tokenizer& ruler_tokenizer() {
  static const Tokenizer tokenizer = Tokenizer::load(kTinyModel + "/tokenizer.json");
  return tokenizer;
}

/// Lists with more than 4,096 words, which RULER's generator of the task cwe needs. They have two
/// special cases: one adjective is the beginning of another one, and two pairs of an adjective and
/// a noun give the same key.
WordLists many_words() {
  WordLists lists;
  for (int i = 0; i < 4500; ++i) lists.nouns.push_back(fmt::format("noun{:04}", i));
  for (int i = 0; i < 40; ++i) lists.adjectives.push_back(fmt::format("adjective{:02}", i));
  for (int i = 0; i < 400; ++i) lists.verbs.push_back(fmt::format("verb{:03}", i));
  lists.nouns.push_back("b-noun0000");
  lists.adjectives.push_back("adjective38-b");
  return lists;
}

std::string text_of(const TaskSample& sample) {
  return sample.context + sample.question + sample.lead;
}

std::size_t tokens_of(const TaskSample& sample) {
  return ruler_tokenizer().encode(text_of(sample), false).size();
}

std::vector<TaskSample> sampled(std::string_view task, const WordLists& words, std::uint32_t length,
                                std::uint32_t seed, std::size_t count) {
  const RulerSources sources{ruler_tokenizer(), kNoChat, bundled_haystack(), words};
  const auto sampler = ruler_sampler(ruler_task(task), sources, length, seed);
  std::vector<TaskSample> samples;
  while (samples.size() < count) samples.push_back(sampler->next());
  return samples;
}

TEST_CASE("Random numbers are those of Python and NumPy") {
  PythonRandom random(42);
  CHECK(random.bits(32) == 2746317213u);
  CHECK(random.bits(32) == 478163327u);
  CHECK(random.bits(32) == 107420369u);
  std::vector<std::uint32_t> below;
  for (int i = 0; i < 8; ++i) below.push_back(random.below(10));
  CHECK(below == std::vector<std::uint32_t>{4, 3, 3, 2, 1, 8, 1, 9});
  CHECK(random.share() == 0.4219218196852704);
  PythonRandom seven(7);
  std::vector<int> values(10);
  std::iota(values.begin(), values.end(), 0);
  seven.shuffle(values);
  CHECK(values == std::vector<int>{8, 3, 1, 4, 7, 0, 9, 6, 2, 5});
  CHECK(seven.sample(100, 5) == std::vector<std::uint32_t>{64, 27, 4, 11, 55});
  CHECK(seven.sample(6, 4) == std::vector<std::uint32_t>{3, 0, 1, 4});
  auto many = seven.sample(5000, 40);
  many.resize(8);
  CHECK(many == std::vector<std::uint32_t>{4514, 3477, 484, 4632, 1014, 1828, 4775, 506});
  CHECK(PythonRandom(0).bits(32) == 3626764237u);
  CHECK(PythonRandom((std::uint64_t{1} << 40) + 5).bits(32) == 2166296868u);
  NumpyRandom numpy(42);
  std::vector<std::uint32_t> whole;
  for (int i = 0; i < 4; ++i) whole.push_back(numpy.whole(10000, 99999));
  CHECK(whole == std::vector<std::uint32_t>{25795, 10860, 86820, 64886});
}

// The hashes are those of prompts and answers that RULER's own scripts wrote
// (scripts/data/synthetic/, commit c3f5e3b, Python 3.11, NumPy 2.4). The scripts used the bundled
// model's tokenizer, the template "base", the word lists of many_words(), and the bundled text in
// place of the essays. The hashed text has a line break after each prompt (`input` followed by
// `answer_prefix`) and after each answer.
struct KnownPrompts {
  std::uint32_t length, seed;
  std::size_t samples;
  std::map<std::string_view, std::string_view> xxh3;
};

void check_known(const KnownPrompts& known) {
  const WordLists words = many_words();
  for (const auto& [task, hash] : known.xxh3) {
    std::string text;
    for (const TaskSample& sample : sampled(task, words, known.length, known.seed, known.samples)) {
      text += text_of(sample) + '\n';
      for (const std::string& value : sample.expected) text += value + '\n';
    }
    INFO(task << ", length " << known.length);
    CHECK(xxh3_hex(text) == hash);
  }
}

TEST_CASE("Prompts and answers equal those of RULER's own generator") {
  check_known({.length = 2048,
               .seed = 42,
               .samples = 200,
               .xxh3 = {{"niah_single_1", "0748e36932e1eb38"},
                        {"niah_single_2", "c8294561b4c1e47b"},
                        {"niah_single_3", "ce2b316eae81a76c"},
                        {"niah_multikey_1", "2278e98564871a03"},
                        {"niah_multikey_2", "5ba8e46df1ce02c9"},
                        {"niah_multikey_3", "d611036fd54d8cee"},
                        {"niah_multivalue", "a52875535ad6bc4e"},
                        {"niah_multiquery", "0efbfeb4060ddba4"},
                        {"vt", "88bc80436b65289e"},
                        {"cwe", "f59cf49405c24552"},
                        {"fwe", "745a06d8c527f099"}}});
  check_known({.length = 8192,
               .seed = 7,
               .samples = 20,
               .xxh3 = {{"niah_single_1", "bfc92629431ee9aa"},
                        {"niah_single_2", "874e83ffea662e07"},
                        {"niah_single_3", "306849bae83e2c18"},
                        {"niah_multikey_1", "c3537de76a929628"},
                        {"niah_multikey_2", "12c3feba230436ae"},
                        {"niah_multikey_3", "8ed863106f1a431e"},
                        {"niah_multivalue", "b2e9ca064933b9e0"},
                        {"niah_multiquery", "23299347144ee042"},
                        {"vt", "d2803e01e53b2dea"},
                        {"cwe", "8b73eb6a1baa3d86"},
                        {"fwe", "b1b9b29c980c34a7"}}});
}

TEST_CASE("Questions fit the length, and contain their answers and evidence") {
  const WordLists words = bundled_word_lists();
  for (const RulerTask& task : ruler_tasks())
    for (const std::uint32_t length : {1536u, 5000u}) {
      INFO(task.name << ", length " << length);
      const auto samples = sampled(task.name, words, length, 3, 4);
      std::size_t longest = 0;
      for (const TaskSample& sample : samples) {
        longest = std::max(longest, tokens_of(sample) + task.max_new_tokens);
        CHECK(sample.max_new_tokens == task.max_new_tokens);
        CHECK(sample.matching == Matching::strings);
        for (const std::string& value : sample.expected)
          CHECK(sample.context.find(value) != std::string::npos);
        for (const std::string& evidence : sample.evidence) {
          const std::size_t at = sample.context.find(evidence);
          CHECK(at != std::string::npos);
          CHECK(sample.context.find(evidence, at + 1) == std::string::npos);
        }
        CHECK(found_share(sample.answer(), sample.expected) == 1);
      }
      CHECK(longest <= length);
      CHECK(longest > length / 2);
    }
}

TEST_CASE("The same seed gives the same questions, and another seed others") {
  const WordLists words = bundled_word_lists();
  for (const RulerTask& task : ruler_tasks()) {
    const auto one = sampled(task.name, words, 1536, 5, 3),
               again = sampled(task.name, words, 1536, 5, 3),
               other = sampled(task.name, words, 1536, 6, 1);
    for (std::size_t i = 0; i < one.size(); ++i) CHECK(text_of(one[i]) == text_of(again[i]));
    CHECK(text_of(one[0]) != text_of(one[1]));
    CHECK(text_of(one[0]) != text_of(other[0]));
  }
}

TEST_CASE("With a chat template, the question is a user's message, and so is the example of cwe") {
  const std::optional<ChatFrame> chat = ChatFrame{.before = "<user>", .after = "<assistant>"};
  const WordLists words = bundled_word_lists();
  const RulerSources sources{ruler_tokenizer(), chat, bundled_haystack(), words};
  for (const RulerTask& task : ruler_tasks()) {
    const TaskSample sample = ruler_sampler(task, sources, 1536, 0)->next();
    const std::string text =
        chat->before + sample.context + sample.question + chat->after + sample.lead;
    CHECK(ruler_tokenizer().encode(text, false).size() + task.max_new_tokens <= 1536);
    std::size_t users = 0;
    for (std::size_t at = text.find("<user>"); at != std::string::npos;
         at = text.find("<user>", at + 1))
      ++users;
    CHECK(users == (task.name == "cwe" ? 2u : 1u));
  }
}

TEST_CASE("Answers score the share of strings that they contain, in upper or lower case") {
  const std::vector<std::string> expected{"ABCDE", "fghij", "1234", "xyz"};
  CHECK(found_share("", expected) == 0);
  CHECK(found_share(" abcde and FGHIJ", expected) == 0.5);
  CHECK(found_share("x12345, abcdefghij, XYZ", expected) == 1);
}

TEST_CASE("Lengths and word lists that are too short are refused") {
  const WordLists words = bundled_word_lists();
  const auto refusal = [&](std::string_view task, std::uint32_t length, const WordLists& lists) {
    return error_of<std::invalid_argument>([&] { sampled(task, lists, length, 0, 1); });
  };
  CHECK(refusal("vt", 20, words) ==
        "--length 20: no question of vt fits, together with its answer of 30 tokens; give a longer "
        "--length");
  for (const char* task : {"niah_single_2", "niah_multikey_3", "vt", "cwe", "fwe"})
    CHECK(refusal(task, 200, words).find("no question of") != std::string::npos);
  CHECK(refusal("cwe", 100'000, words).find("cwe needs more than the 958 different words") !=
        std::string::npos);
  CHECK(refusal("cwe", 1024, {{"one"}, {"two"}, {"three"}}).find("cwe needs at least 40") !=
        std::string::npos);
  CHECK(error_of<std::invalid_argument>([] {
          ruler_task("niah_singel_1");
        }).find("did you mean niah_single_1?") != std::string::npos);
}

TEST_CASE("Word lists are read from a directory, with a word on each line") {
  const test::TemporaryFolder folder;
  CHECK_THROWS_AS(read_word_lists(folder.path()), std::runtime_error);
  write_file_atomically(folder / "nounlist.txt", "tree\r\nbird \n\n");
  write_file_atomically(folder / "adjectivelist.txt", "old\n");
  write_file_atomically(folder / "verblist.txt", "\n");
  CHECK(error_of<std::runtime_error>([&] {
          read_word_lists(folder.path());
        }).find("verblist.txt: has no words") != std::string::npos);
  write_file_atomically(folder / "verblist.txt", "go");
  const WordLists lists = read_word_lists(folder.path());
  CHECK(lists.nouns == std::vector<std::string>{"tree", "bird"});
  CHECK(lists.verbs == std::vector<std::string>{"go"});
}

TEST_CASE("A run of several tasks has metrics for each task and for all") {
  auto backend = load_backend(Device::cpu, kTinyModel, 1);
  TaskRequest request{.spec = {.kind = TaskKind::ruler},
                      .ruler = {&ruler_task("vt"), &ruler_task("niah_single_1")},
                      .word_lists = bundled_word_lists(),
                      .words = {900},
                      .samples = 1,
                      .modes = {QueryMode::agnostic},
                      .configs = {CacheConfig{}},
                      .beyond_context = true};
  const TaskRun run = run_task(*backend, ruler_tokenizer(), request);
  CHECK(run.task == "ruler");
  const auto metrics = task_metrics(run.answers, run.points, run.modes);
  const auto count = [&](std::optional<std::string_view> task) {
    return std::ranges::count_if(metrics, [&](const TaskMetric& entry) {
      return entry.metric == "string_match" && entry.task == task && !entry.words && !entry.depth;
    });
  };
  CHECK(count(std::nullopt) == 1);
  CHECK(count("vt") == 1);
  CHECK(count("niah_single_1") == 1);
  CHECK(task_answers_csv(run).find("\nvt,full") != std::string::npos);
  CHECK(task_trace_name(run, 0, QueryMode::agnostic) == "vt-900-0-query-agnostic");
  request.ruler.resize(1);
  CHECK(request.name() == "vt");
}

TEST_CASE("SmolLM2 finds needles in noise with the full cache") {
  const std::filesystem::path directory = KVLAB_SOURCE_DIR "/engine/models/smollm2";
  if (!std::filesystem::exists(directory / "model.safetensors"))
    return skip("no SmolLM2, which ./dev model smollm2 fetches");
  auto backend = load_backend(Device::cpu, directory, 2);
  const Tokenizer own = Tokenizer::load(directory / "tokenizer.json");
  const TaskRun run = run_task(*backend, own,
                               {.spec = {.kind = TaskKind::ruler},
                                .ruler = {&ruler_task("niah_single_1")},
                                .word_lists = bundled_word_lists(),
                                .words = {512},
                                .samples = 2,
                                .modes = {QueryMode::agnostic},
                                .configs = {CacheConfig{}},
                                .chat = read_chat_frame(directory)});
  for (const auto& prompt : run.answers) CHECK(prompt[0][0].found == 1);
}

}  // namespace
}  // namespace kvlab
