// Tests of `kvlab task`: its tables, and its one-line errors.
#include <filesystem>
#include <sstream>
#include <stdexcept>

#include "sim/run/results.hpp"
#include "tests/catch.hpp"
#include "tests/tools/command_line.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using test::call;
using test::kTiny;
using test::refusal;

const std::string kTask =
    "task passkey --device cpu --words 20 --depth 0% --samples 1 "
    "--max-new-tokens 2 --query-aware ";
const std::string kQuestion = kTask + "--model " + kTiny;

TEST_CASE("A run writes a row per metric, a row per answer, and the questions") {
  const test::TemporaryFolder folder;
  const std::string out = (folder / "run").string();
  CHECK(
      call("task needle --kind multi-key --policy window,sink --budget 24,32 --words 20,30 "
           "--depth 0%,100% --samples 2 --max-new-tokens 4 --query-agnostic --device cpu --model " +
           kTiny + " --out " + out) == 0);
  const std::string answers = read_text_file(out + "/answers.csv", 1 << 20);
  CsvReader reader(answers);
  std::size_t rows = 0;
  while (const auto fields = reader.next()) {
    CHECK(fields->size() == 16);
    if (rows++ == 0) continue;
    CHECK((*fields)[0] == "needle:keys=4:values=1");
    CHECK((*fields)[7] == "query-agnostic");
  }
  // A header, and 5 configurations at 2 lengths and 2 depths with 2 samples each.
  CHECK(rows == 1 + 5 * 2 * 2 * 2);
  const std::string metrics = read_text_file(out + "/task.csv", 1 << 20);
  CHECK(metrics.find("window,sinks=0:recent=0,24,dense,original,0,query-agnostic,20,100%,"
                     "exact_match,") != std::string::npos);
  // A line for each sample at each length and depth.
  std::istringstream questions(read_text_file(out + "/questions.jsonl", 1 << 20));
  std::size_t count = 0;
  for (std::string line; std::getline(questions, line); ++count) {
    const auto question = parse_json(line, "questions.jsonl");
    CHECK(question["task"] == "needle:keys=4:values=1");
    CHECK(question["depth"] == (count / 2 % 2 == 0 ? 0.0 : 1.0));
    CHECK(question["sample"] == count % 2);
    CHECK(question["context"].size() > question["words"].get<std::size_t>());
    CHECK(!question["question"].empty());
    CHECK(!question["answer"].empty());
    CHECK(question["expected"].size() == 1);
    CHECK(question["matching"] == "numbers");
    CHECK(question["max_new_tokens"] == 4);
  }
  CHECK(count == 2 * 2 * 2);
  const auto about = parse_json(read_text_file(out + "/task.json", 1 << 20), "task.json");
  CHECK(about.at("samples") == 2);
  CHECK(about.at("chat") == "none");
  CHECK_THROWS_AS(call("task recall --model " + kTiny + " --out " + out), std::runtime_error);
}

TEST_CASE("A run of RULER's tasks has rows for each task and for all of them") {
  const test::TemporaryFolder folder;
  const std::string out = (folder / "run").string();
  CHECK(call("task ruler --tasks niah_single_1,vt --length 900 --samples 1 --policy window "
             "--budget 64 --beyond-context --device cpu --model " +
             kTiny + " --out " + out) == 0);
  const std::string metrics = read_text_file(out + "/task.csv", 1 << 20);
  for (const char* task : {"ruler", "niah_single_1", "vt"})
    CHECK(metrics.find(std::string("\n") + task + ",window,") != std::string::npos);
  CHECK(metrics.find(",900,all,string_match,") != std::string::npos);
  const auto about = parse_json(read_text_file(out + "/task.json", 1 << 20), "task.json");
  CHECK(about.at("tasks").size() == 2);
  CHECK(call("report " + out + " --out " + (folder / "page").string()) == 0);
}

TEST_CASE("The questions of a run are captured into a new folder") {
  const test::TemporaryFolder folder;
  const std::string line = kQuestion + " --capture " + (folder / "traces").string();
  CHECK(call(line) == 0);
  CHECK(std::filesystem::exists(folder / "traces" / "20-0%-0-query-aware" / "manifest.json"));
  CHECK_THROWS_AS(call(line), std::runtime_error);
}

TEST_CASE("Missing parent folders are created") {
  const test::TemporaryFolder folder;
  const auto out = folder / "no" / "run", traces = folder / "no" / "such" / "traces";
  CHECK(call(kQuestion + " --out " + out.string() + " --capture " + traces.string()) == 0);
  CHECK(std::filesystem::exists(traces / "20-0%-0-query-aware" / "manifest.json"));
  CHECK(std::filesystem::exists(out / "task.json"));
}

TEST_CASE("A folder with other files is not changed, and is refused for answers") {
  const test::TemporaryFolder folder;
  const std::string out = (folder / "out").string(), capture = (folder / "capture").string();
  for (const std::string& path : {out, capture})
    std::filesystem::create_directories(path + ".part/trace");
  CHECK(refusal(kQuestion + " --out " + out)
            .starts_with(out + ".part/trace: was not made by `kvlab task`"));
  CHECK(call(kQuestion + " --capture " + capture) == 0);
  for (const std::string& path : {out, capture})
    CHECK(std::filesystem::exists(path + ".part/trace"));
}

TEST_CASE("Files that a different task has left are named, and deleted on request") {
  const test::TemporaryFolder folder;
  const std::string out = (folder / "run").string();
  std::filesystem::create_directory(out + ".part");
  write_file_atomically(out + ".part/job.json", R"({"seed": 7})");
  write_file_atomically(out + ".part/trace0-unit0.unit", "answers");
  const std::string line = kQuestion + " --out " + out;
  CHECK(refusal(line).starts_with(out +
                                  ".part: holds the unfinished results of another task command"));
  CHECK(std::filesystem::exists(out + ".part/trace0-unit0.unit"));
  CHECK(call(line + " --fresh") == 0);
  CHECK(std::filesystem::exists(out + "/answers.csv"));
  CHECK_FALSE(std::filesystem::exists(out + ".part"));
}

TEST_CASE("Folders for tables and for traces must not contain each other") {
  const test::TemporaryFolder folder;
  const std::string outer = (folder / "run").string(), inner = (folder / "." / "run/in").string();
  for (const auto& [out, traces] : {std::pair{outer, inner}, {inner, outer}, {outer, outer}}) {
    CHECK(refusal(kTask + "--model 'no model' --out " + out + " --capture " + traces)
              .starts_with("--capture: " + traces + " and --out "));
    CHECK_FALSE(std::filesystem::exists(outer));
  }
}

TEST_CASE("Errors name what is wrong and what is expected") {
  for (const auto& [words, says] : std::vector<std::pair<std::string, std::string>>{
           {"", "--task: missing; "},
           {"pass --model " + kTiny, "task: \"pass\" should be passkey, needle, recall or ruler"},
           {"passkey --words 250,x",
            "--words: \"x\" should be a list such as 250,500,1000, each between 0 and 1000000"},
           {"passkey --words 0", "--words: 0 should be a whole number, at least 1"},
           {"passkey --depth 50",
            "--depth: \"50\" should be a list such as 0%,50%,100%, each between 0% and 100%"},
           {"passkey --depth 101%", "--depth: \"101%\" should be"},
           {"passkey --samples 0", "--samples: 0 should be between 1 and 100000"},
           {"passkey --keys 2", "--keys: is for kvlab task needle; leave it out"},
           {"needle --reassigned", "--reassigned: is for kvlab task recall; leave it out"},
           {"needle --kind many", "--kind: \"many\" should be single, multi-key or multi-value"},
           {"passkey --length 900", "--length: is for kvlab task ruler; leave it out"},
           {"ruler --words 9", "--words: task ruler takes a length in tokens; give --length"},
           {"ruler --depth 0%", "--depth: RULER's tasks define it themselves; leave it out"},
           {"ruler --tasks vt,qa_1", "--tasks: \"qa_1\" should be one of niah_single_1, "},
           {"ruler --length 1.5", "--length: 1.5 should be a whole number, at least 1"},
           {"ruler --seed 4294967296 --model " + kTiny, "--seed: 4294967296 is above "},
           {"passkey", "--model: missing; "},
           {"passkey --budget 64 --model " + kTiny, "--budget: "},
           {"recall --text f --model " + kTiny,
            "--text: task recall does not use a text; leave it out"}}) {
    INFO(words);
    CHECK_THAT(refusal("task " + words), Catch::Matchers::StartsWith(says));
  }
}

}  // namespace
}  // namespace kvlab
