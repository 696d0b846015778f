// The commands, one after another, as a person would type them: capture, replay, report, deploy,
// generate, and the demo that strings them together.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>

#include "engine/loop/policy_file.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "sim/budgets/budget_file.hpp"
#include "sim/run/run.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/skip.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "tools/command.hpp"
#include "traces/base/json.hpp"

using namespace kvlab;
using namespace kvlab::test;
using Catch::Matchers::ContainsSubstring;
using Words = std::vector<std::string>;

namespace {

const std::string kModel = KVLAB_SOURCE_DIR "/engine/models/tiny";

/// A short trace of the bundled model.
void capture(const std::filesystem::path& trace, const std::string& seed = "1") {
  REQUIRE(run_command(capture_command(),
                      {"--model", kModel, "--prompt",
                       "It was a dark and stormy night, and the wind", "--max-new-tokens", "40",
                       "--temperature", "0.8", "--seed", seed, "--out", trace.string()}) == 0);
}

Words replay_words(const std::filesystem::path& trace, const std::filesystem::path& out,
                   Words more = {}) {
  Words words{"--trace",  trace.string(), "--policy", "window,sink,h2o",
              "--budget", "8,16,50%",     "--out",    out.string()};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

/// The message that a command is refused with; empty if it runs.
std::string refusal(const Command& command, const Words& words) {
  return error_of<std::exception>([&] { run_command(command, words); });
}

}  // namespace

TEST_CASE("a replay leaves the grid and the references, the same for any number of threads") {
  const TemporaryFolder folder;
  capture(folder / "trace");
  REQUIRE(run_command(replay_command(),
                      replay_words(folder / "trace", folder / "a", {"--threads", "1"})) == 0);
  REQUIRE(run_command(replay_command(),
                      replay_words(folder / "trace", folder / "b", {"--threads", "3"})) == 0);
  for (const char* file : {"results.csv", "run.json", "kept.json"})
    CHECK(read_bytes(folder / "a" / file) == read_bytes(folder / "b" / file));

  const Run run = load_run(folder / "a");
  CHECK(run.info.grid.size() == 3 * 3 + 2 * 3 + 1);
  CHECK(run.info.traces.at(0).name == "trace");
  CHECK(run.info.traces.at(0).hash == TraceReader::open(folder / "trace").hash());
  for (const ResultRow& row : run.rows) {
    if (row.layer >= 0) continue;
    if (row.policy == "full" && row.metric == "recall") CHECK(row.value == 1);
    if (row.policy == "full") CHECK(row.budget == "all");
    if (row.budget == "50%") CHECK(row.budget_tokens == run.info.traces[0].tokens / 2);
  }
  REQUIRE(run.kept);
  CHECK(run.kept->heads.front().series.size() == 4);  // three policies and oracle_mass
}

TEST_CASE("a replay without references has none, and only the layers asked for") {
  const TemporaryFolder folder;
  capture(folder / "trace");
  REQUIRE(run_command(replay_command(), replay_words(folder / "trace", folder / "run",
                                                     {"--no-references", "--layers", "2,0,2"})) ==
          0);
  const Run run = load_run(folder / "run");
  CHECK(run.info.layers == std::vector<std::uint32_t>{0, 2});
  for (const ResultRow& row : run.rows) {
    CHECK((row.policy == "window" || row.policy == "sink" || row.policy == "h2o"));
    CHECK((row.layer == -1 || row.layer == 0 || row.layer == 2));
  }
}

TEST_CASE("what a replay cannot do is refused, and nothing is left behind") {
  const TemporaryFolder folder;
  capture(folder / "trace");
  std::filesystem::create_directory(folder / "other");
  std::filesystem::copy(folder / "trace", folder / "other" / "trace",
                        std::filesystem::copy_options::recursive);
  const auto refused = [&](Words more) {
    return refusal(replay_command(),
                   replay_words(folder / "trace", folder / "run", std::move(more)));
  };
  CHECK_THAT(refused({"--trace", (folder / "other" / "trace").string()}),
             ContainsSubstring("called trace"));
  std::filesystem::copy(folder / "trace", folder / "other" / "tr\nx",
                        std::filesystem::copy_options::recursive);
  CHECK_THAT(refused({"--trace", (folder / "other" / "tr\nx").string()}),
             ContainsSubstring("\"tr\\nx\" gives its name"));
  CHECK_THAT(refused({"--trace", (folder / "nowhere").string()}), ContainsSubstring("nowhere"));
  CHECK_THAT(refused({"--layers", "0,x"}), ContainsSubstring("--layers: 'x'"));
  CHECK_THAT(refused({"--layers", "9"}), ContainsSubstring("layer 9"));
  CHECK_THAT(refused({"--span", "some"}), ContainsSubstring("span: 'some'"));
  CHECK_THAT(refused({"--output-error", "none"}), ContainsSubstring("--output-error: 'none'"));
  CHECK_THAT(refused({"--request-threshold", "2"}), ContainsSubstring("--request-threshold: 2"));
  CHECK_THAT(
      refusal(replay_command(), {"--trace", (folder / "trace").string(), "--policy", "window",
                                 "--budget", "8", "--out", (folder / "no" / "run").string()}),
      ContainsSubstring("lies in no folder"));

  std::string shard = read_bytes(folder / "trace" / "shard-00000.safetensors");
  shard[shard.size() / 2] = static_cast<char>(shard[shard.size() / 2] ^ 64);
  write_bytes(folder / "trace" / "shard-00000.safetensors", shard);
  CHECK_THAT(refused({}), ContainsSubstring("does not verify") && ContainsSubstring("shard-00000"));

  std::set<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    left.insert(entry.path().filename().string());
  CHECK(left == std::set<std::string>{"trace", "other"});
  std::filesystem::create_directory(folder / "run");
  CHECK_THAT(refused({}), ContainsSubstring("exists"));
}

TEST_CASE("a run is deployed and generates, and the closed loop can settle it") {
  const TemporaryFolder folder;
  capture(folder / "first", "1");
  capture(folder / "second", "2");
  const std::string run = (folder / "run").string(), policy = (folder / "policy.json").string();
  REQUIRE(run_command(
              replay_command(),
              replay_words(folder / "first", run, {"--trace", (folder / "second").string()})) == 0);
  CHECK(load_run(run).info.traces.size() == 2);
  REQUIRE(run_command(deploy_command(), {run, "--budget", "16", "--out", policy}) == 0);
  const PolicyFile open = read_policy_file(policy);
  CHECK(open.cache.budget.text() == "16");
  CHECK(open.run["hash"] == load_run(run).hash);
  CHECK(open.run["traces"].size() == 2);
  CHECK_FALSE(open.run.contains("confirmed"));

  write_bytes(folder / "text.txt", read_bytes(KVLAB_SOURCE_DIR "/tools/demo/prompt.txt"));
  REQUIRE(run_command(deploy_command(), {run, "--budget", "16", "--confirm", "2", "--model", kModel,
                                         "--text", (folder / "text.txt").string(), "--max-tokens",
                                         "200", "--out", policy}) == 0);
  const PolicyFile closed = read_policy_file(policy);
  const auto& confirmed = closed.run["confirmed"];
  REQUIRE(confirmed.size() == 2);
  CHECK(confirmed[0]["kl"] <= confirmed[1]["kl"]);
  CHECK(confirmed[0]["ties_with_first"] == true);
  const auto deployed = std::ranges::find_if(
      confirmed, [&](const auto& entry) { return entry["policy"] == closed.cache.policy.name; });
  REQUIRE(deployed != confirmed.end());
  CHECK((*deployed)["ties_with_first"] == true);
  // Both truths, or that there is but one.
  CHECK(open.run["truths"]["why"] == "answers were not asked (--confirm asks)");
  CHECK(closed.run["truths"]["deployed"] == closed.cache.policy.text());
  CHECK(closed.run["truths"]["asked"].size() == 2);
  REQUIRE(run_command(deploy_command(), {run, "--budget", "16", "--confirm", "2", "--model", kModel,
                                         "--text", (folder / "text.txt").string(), "--max-tokens",
                                         "200", "--task", "none", "--out", policy}) == 0);
  CHECK(read_policy_file(policy).run["truths"]["why"] == "answers were not asked");

  CHECK(run_command(generate_command(), {"--model", kModel, "--prompt", "It was",
                                         "--max-new-tokens", "30", "--policy-file", policy}) == 0);
  CHECK_THAT(refusal(deploy_command(), {run, "--budget", "9", "--out", policy}),
             ContainsSubstring("8, 16, 50%"));
  CHECK_THAT(refusal(deploy_command(), {run, "--budget", "16", "--confirm", "2", "--out", policy}),
             ContainsSubstring("--model: missing"));
}

TEST_CASE(
    "budgets by head go from a run's errors to a file, a replay, a deployment and the engine") {
  const TemporaryFolder folder;
  capture(folder / "trace");
  const auto path = [&](const char* name) { return (folder / name).string(); };
  const auto replay_with = [&](const std::string& budget, const char* out, Words more = {}) {
    Words words{"--trace",  path("trace"), "--policy", "h2o",
                "--budget", budget,        "--out",    path(out)};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  REQUIRE(run_command(replay_command(), replay_with("4,8,16,32", "curves")) == 0);
  REQUIRE(run_command(allocate_command(), {path("curves"), "--budget", "12", "--out", path("b")}) ==
          0);
  const Budget by_head = read_budget("@" + path("b"));
  CHECK(by_head.heads.size() == 4);
  CHECK(by_head.resolve(100, 0) == 12);

  const std::string budgets = "12,@" + path("b") + ",pyramid(12)";
  REQUIRE(run_command(replay_command(), replay_with(budgets, "run")) == 0);
  const Run run = load_run(folder / "run");
  CHECK(run.info.grid.at(1).budgets == by_head.heads);
  CHECK(run.info.grid.at(2).budgets.empty());
  // What is kept at the end is what every head may keep.
  for (const ResultRow& row : run.rows) {
    if (row.policy != "full") CHECK(row.budget_tokens == 12);
    if (row.policy != "h2o" || row.metric != "kv_bytes" || row.head < 0) continue;
    const auto layer = static_cast<std::size_t>(row.layer),
               head = static_cast<std::size_t>(row.head);
    const std::size_t tokens = row.budget == "12"            ? 12
                               : row.budget == "pyramid(12)" ? std::array{23, 16, 8, 1}.at(layer)
                                                             : by_head.heads.at(layer).at(head);
    CHECK(row.value == static_cast<double>(tokens * 2 * 64 * 4));
  }
  for (const std::string& budget : {"@" + path("b"), std::string("pyramid(12)")}) {
    REQUIRE(run_command(deploy_command(),
                        {path("run"), "--budget", budget, "--out", path("policy.json")}) == 0);
    const PolicyFile file = read_policy_file(path("policy.json"));
    CHECK(file.cache.budget.heads == (budget.starts_with('@') ? by_head.heads : HeadBudgets{}));
    CHECK(file.cache.budget.text() == (budget.starts_with('@') ? "by head" : budget));
    CHECK(run_command(generate_command(),
                      {"--model", kModel, "--prompt", "It was", "--max-new-tokens", "30",
                       "--policy-file", path("policy.json")}) == 0);
  }
  CHECK(run_command(verify_command(),
                    {"--model", kModel, "--prompt", "It was a dark and stormy night, and the wind",
                     "--max-new-tokens", "30", "--policy", "h2o", "--budget", budgets}) == 0);

  // An unfinished replay does not go on under another file's budgets.
  RunInfo other = run.info;
  other.grid.at(1).budgets.at(3).at(1) += 1;
  CHECK(job_of(run.info, "") == job_of(load_run(folder / "run").info, ""));
  CHECK(job_of(run.info, "") != job_of(other, ""));
  write_bytes(folder / "b", "[[9, 9], [9, 9], [9, 9]]");
  CHECK_THAT(refusal(replay_command(), replay_with(budgets, "other")),
             ContainsSubstring("budgets for 3 layers x 2 KV heads; the model has 4 x 2"));
  CHECK_FALSE(std::filesystem::exists(folder / "other"));
  CHECK_FALSE(std::filesystem::exists(folder / "other.part"));
}

TEST_CASE(
    "a prompt over the trained context is refused, with what would fit, unless it is wanted") {
  const TemporaryFolder folder;
  std::string text;
  while (text.size() < 9000) text += "It was a dark and stormy night, and the wind blew. ";
  write_bytes(folder / "text.txt", text);
  const Words given{"--model", kModel, "--prompt-file", (folder / "text.txt").string()};
  const auto with = [&](Words more) {
    more.insert(more.begin(), given.begin(), given.end());
    return more;
  };
  const std::string trace = (folder / "trace").string();
  const auto check_refused = [&](const Command& command, Words more) {
    CHECK_THAT(refusal(command, with(std::move(more))),
               ContainsSubstring("positions; tiny was trained on 1024") &&
                   ContainsSubstring("--beyond-context"));
  };
  check_refused(generate_command(), {"--max-new-tokens", "5"});
  check_refused(capture_command(), {"--max-new-tokens", "5", "--out", trace});
  check_refused(capture_command(), {"--teacher-forced", "--prompt-tokens", "1025", "--out", trace});
  CHECK_FALSE(std::filesystem::exists(folder / "trace"));

  CHECK(run_command(capture_command(),
                    with({"--teacher-forced", "--prompt-tokens", "1025", "--max-tokens", "1030",
                          "--beyond-context", "--out", trace})) == 0);
  CHECK(run_command(generate_command(), with({"--max-new-tokens", "2", "--policy", "sink",
                                              "--budget", "64", "--prefill", "stream"})) == 0);
}

TEST_CASE("a capture records the tokens of a text in the prompt as a span") {
  const TemporaryFolder folder;
  const std::string trace = (folder / "trace").string();
  const auto with = [&](Words more) {
    const Words given{"--model", kModel,     "--max-new-tokens",
                      "3",       "--prompt", "The pass key is 52417.",
                      "--out",   trace,      "--span-of"};
    more.insert(more.begin(), given.begin(), given.end());
    return more;
  };
  CHECK_THAT(refusal(capture_command(), with({"dog"})),
             ContainsSubstring("--span-of: \"dog\" is not in the prompt"));
  CHECK_THAT(refusal(capture_command(), with({"s"})), ContainsSubstring("more than once"));
  CHECK_THAT(refusal(capture_command(), with({"key", "--span-of", "key"})),
             ContainsSubstring("--span-of: \"key\" is given twice"));
  CHECK_FALSE(std::filesystem::exists(folder / "trace"));

  REQUIRE(run_command(capture_command(), with({"key is 52417", "--span-of", "The"})) == 0);
  const TraceReader reader = TraceReader::open(folder / "trace");
  const std::vector<NamedSpan>& spans = reader.header().spans;
  REQUIRE(spans.size() == 2);
  const Tokenizer tokenizer = Tokenizer::load(kModel + "/tokenizer.json");
  for (const NamedSpan& span : spans) {
    const std::span<const std::int32_t> ids = reader.ids();
    CHECK_THAT(tokenizer.decode(ids.subspan(span.start, span.tokens)),
               ContainsSubstring(span.name));
  }
  CHECK(spans[0].name == "key is 52417");
  CHECK(spans[1] == NamedSpan{"The", spans[1].start, 1});
}

TEST_CASE("the demo runs the whole loop, and replaces its own folder only") {
  const TemporaryFolder folder;
  const std::string out = (folder / "demo").string();
  REQUIRE(run_command(demo_command(), {"--out", out}) == 0);
  for (const char* file : {"trace/manifest.json", "run/results.csv", "report.html", "policy.json"})
    CHECK(std::filesystem::exists(folder / "demo" / file));
  const std::string results = read_bytes(folder / "demo" / "run" / "results.csv");
  write_bytes(folder / "demo" / "stale", "x");
  REQUIRE(run_command(demo_command(), {"--out", out}) == 0);
  CHECK_FALSE(std::filesystem::exists(folder / "demo" / "stale"));
  CHECK(read_bytes(folder / "demo" / "run" / "results.csv") == results);

  std::filesystem::create_directory(folder / "mine");
  write_bytes(folder / "mine" / "work", "x");
  CHECK_THAT(refusal(demo_command(), {"--out", (folder / "mine").string()}),
             ContainsSubstring("was not made by"));
  CHECK(read_bytes(folder / "mine" / "work") == "x");
}
