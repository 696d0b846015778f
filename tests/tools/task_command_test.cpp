// `kvlab task`: its tables, and one line for what is wrong.
#include <filesystem>
#include <stdexcept>

#include "sim/run/csv.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "tools/command.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

const std::string kTiny = KVLAB_SOURCE_DIR "/engine/models/tiny";

int task(const std::vector<std::string>& words) { return run_command(task_command(), words); }
std::string refusal(const std::vector<std::string>& words) {
  return test::error_of<std::invalid_argument>([&] { task(words); });
}

TEST_CASE("A run leaves a figure a row, an answer a row, and what was asked") {
  const test::TemporaryFolder folder;
  const std::string out = (folder / "run").string();
  CHECK(task({"needle",      "--kind",
              "multi-key",   "--model",
              kTiny,         "--policy",
              "window,sink", "--budget",
              "24,32",       "--words",
              "20,30",       "--depth",
              "0%,100%",     "--draws",
              "2",           "--max-new-tokens",
              "4",           "--query-agnostic",
              "--device",    "cpu",
              "--out",       out}) == 0);
  const std::string answers = read_text_file(out + "/answers.csv", 1 << 20);
  CsvReader reader(answers);
  std::size_t rows = 0;
  while (const auto fields = reader.next()) {
    CHECK(fields->size() == 15);
    if (rows++ == 0) continue;
    CHECK((*fields)[0] == "needle:keys=4:values=1");
    CHECK((*fields)[7] == "query-agnostic");
  }
  CHECK(rows == 1 + 5 * 2 * 2 * 2);  // configurations, lengths, depths, draws
  const std::string figures = read_text_file(out + "/task.csv", 1 << 20);
  CHECK(figures.find("window,sinks=0:recent=0,24,dense,original,0,query-agnostic,20,100%,"
                     "exact_match,") != std::string::npos);
  const auto about = parse_json(read_text_file(out + "/task.json", 1 << 20), "task.json");
  CHECK(about.at("draws") == 2);
  CHECK(about.at("chat") == "none");
  CHECK_THROWS_AS(task({"recall", "--model", kTiny, "--out", out}), std::runtime_error);
}

TEST_CASE("The questions of a run are captured into a folder that is made") {
  const test::TemporaryFolder folder;
  const std::string traces = (folder / "traces").string();
  const std::vector<std::string> words{"passkey",   "--model",
                                       kTiny,       "--words",
                                       "20",        "--depth",
                                       "0%",        "--draws",
                                       "1",         "--max-new-tokens",
                                       "2",         "--query-aware",
                                       "--device",  "cpu",
                                       "--capture", traces};
  CHECK(task(words) == 0);
  CHECK(std::filesystem::exists(folder / "traces" / "20-0%-0-query-aware" / "manifest.json"));
  CHECK_THROWS_AS(task(words), std::runtime_error);
}

std::vector<std::string> one_question(const std::vector<std::string>& more,
                                      const std::string& model = kTiny) {
  std::vector<std::string> words{
      "passkey", "--model",          model, "--words",       "20",       "--depth", "0%", "--draws",
      "1",       "--max-new-tokens", "2",   "--query-aware", "--device", "cpu"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

TEST_CASE("Folders are made where there are none above them") {
  const test::TemporaryFolder folder;
  const auto out = folder / "no" / "run", traces = folder / "no" / "such" / "traces";
  CHECK(task(one_question({"--out", out.string(), "--capture", traces.string()})) == 0);
  CHECK(std::filesystem::exists(traces / "20-0%-0-query-aware" / "manifest.json"));
  CHECK(std::filesystem::exists(out / "task.json"));
}

TEST_CASE("A folder that something else fills is left alone, and refused for answers") {
  const test::TemporaryFolder folder;
  const std::string out = (folder / "out").string(), capture = (folder / "capture").string();
  for (const std::string& path : {out, capture})
    std::filesystem::create_directories(path + ".part/trace");
  CHECK(test::error_of([&] {
          task(one_question({"--out", out}));
        }).starts_with(out + ".part/trace: was not made by `kvlab task`"));
  CHECK(task(one_question({"--capture", capture})) == 0);
  for (const std::string& path : {out, capture})
    CHECK(std::filesystem::exists(path + ".part/trace"));
}

TEST_CASE("What a task of something else has left is named, and thrown away if that is asked for") {
  const test::TemporaryFolder folder;
  const std::string out = (folder / "run").string();
  std::filesystem::create_directory(out + ".part");
  write_file_atomically(out + ".part/job.json", R"({"seed": 7})");
  write_file_atomically(out + ".part/trace0-unit0.unit", "answers");
  auto words = one_question({"--out", out});
  const std::string error = test::error_of([&] { task(words); });
  CHECK(error.starts_with(out + ".part: holds what a task of something else has finished"));
  CHECK(std::filesystem::exists(out + ".part/trace0-unit0.unit"));
  words.emplace_back("--fresh");
  CHECK(task(words) == 0);
  CHECK(std::filesystem::exists(out + "/answers.csv"));
  CHECK_FALSE(std::filesystem::exists(out + ".part"));
}

TEST_CASE("A folder for tables in one for traces is refused, and the other way round") {
  const test::TemporaryFolder folder;
  const std::string outer = (folder / "run").string(), inner = (folder / "." / "run/in").string();
  for (const auto& [out, traces] : {std::pair{outer, inner}, {inner, outer}, {outer, outer}}) {
    CHECK(refusal(one_question({"--out", out, "--capture", traces}, "no model"))
              .starts_with("--capture: " + traces + " and --out "));
    CHECK_FALSE(std::filesystem::exists(outer));
  }
}

TEST_CASE("What is wrong is named, with what would be right") {
  CHECK(refusal({}).starts_with("--task: missing; "));
  CHECK(refusal({"pass", "--model", kTiny}) ==
        "--task: \"pass\" should be passkey, needle or recall");
  CHECK(refusal({"passkey", "--words", "250,x"}) ==
        "--words: \"x\" should be a list such as 250,500,1000, each between 0 and 1000000");
  CHECK(refusal({"passkey", "--words", "0"}) == "--words: 0 should be a whole number, at least 1");
  CHECK(refusal({"passkey", "--depth", "50"}) ==
        "--depth: \"50\" should be a list such as 0%,50%,100%, each between 0% and 100%");
  CHECK(refusal({"passkey", "--depth", "101%"}).starts_with("--depth: \"101%\" should be"));
  CHECK(refusal({"passkey", "--draws", "0"}) == "--draws: 0 should be between 1 and 100000");
  CHECK(refusal({"passkey", "--keys", "2"}) == "--keys: is for kvlab task needle; leave it out");
  CHECK(refusal({"needle", "--reassigned"}) ==
        "--reassigned: is for kvlab task recall; leave it out");
  CHECK(refusal({"needle", "--kind", "many"}) ==
        "--kind: \"many\" should be single, multi-key or multi-value");
  CHECK(refusal({"passkey"}).starts_with("--model: missing; "));
  CHECK(refusal({"passkey", "--model", kTiny, "--budget", "64"}).starts_with("--budget: "));
  CHECK(refusal({"recall", "--text", "f", "--model", kTiny}) ==
        "--text: recall has no text to hide in; leave it out");
}

}  // namespace
}  // namespace kvlab
