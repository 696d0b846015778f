// Runs the commands one after another as a user does: capture, replay, report, deploy and generate.
// Also tests the demo, which runs all of them.
#include <algorithm>
#include <array>
#include <cstdio>

#include "engine/evaluation/policy_file.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "sim/budgets/budget_file.hpp"
#include "sim/run/run.hpp"
#include "tests/catch.hpp"
#include "tests/tools/command_line.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"

using namespace kvlab;
using namespace kvlab::test;
using Catch::Matchers::ContainsSubstring;

namespace {

const std::string kNight =
    "--model " + kTiny + " --prompt 'It was a dark and stormy night, and the wind'";

/// A short trace of the bundled model.
void capture(const std::filesystem::path& trace, const std::string& seed = "1") {
  REQUIRE(call("capture " + kNight + " --max-new-tokens 40 --temperature 0.8 --seed " + seed +
               " --out " + trace.string()) == 0);
}

/// The command line that replays the trace.
std::string sweep(const std::filesystem::path& trace, const std::filesystem::path& out,
                  const std::string& more = "") {
  return "replay --trace " + trace.string() + " --policy window,sink,h2o --budget 8,16,50% --out " +
         out.string() + " " + more;
}

}  // namespace

TEST_CASE("a replay writes the sweep and the oracles, with equal bytes for any number of threads") {
  const TemporaryFolder folder;
  capture(folder / "trace");
  REQUIRE(call(sweep(folder / "trace", folder / "a", "--threads 1")) == 0);
  REQUIRE(call(sweep(folder / "trace", folder / "b", "--threads 3")) == 0);
  for (const char* file : {"results.csv", "run.json", "kept.json"})
    CHECK(read_bytes(folder / "a" / file) == read_bytes(folder / "b" / file));

  const Run run = load_run(folder / "a");
  CHECK(run.info.sweep.size() == 3 * 3 + 2 * 3 + 1);
  CHECK(run.info.traces.at(0).name == "trace");
  CHECK(run.info.traces.at(0).hash == TraceReader::open(folder / "trace").hash());
  for (const ResultRow& row : run.rows) {
    if (row.layer >= 0) continue;
    if (row.policy == "full" && row.metric == "recall") CHECK(row.value == 1);
    if (row.policy == "full") CHECK(row.budget == "all");
    if (row.budget == "50%") CHECK(row.budget_tokens == run.info.traces[0].tokens / 2);
  }
  REQUIRE(run.kept);
  CHECK(run.kept->heads.front().series.size() == 4);  // three policies and oracle_attention
}

TEST_CASE("a replay writes no oracles if they are disabled, and only the requested layers") {
  const TemporaryFolder folder;
  capture(folder / "trace");
  REQUIRE(call(sweep(folder / "trace", folder / "run", "--no-references --layers 2,0,2")) == 0);
  const Run run = load_run(folder / "run");
  CHECK(run.info.layers == std::vector<std::uint32_t>{0, 2});
  for (const ResultRow& row : run.rows) {
    CHECK((row.policy == "window" || row.policy == "sink" || row.policy == "h2o"));
    CHECK((row.layer == -1 || row.layer == 0 || row.layer == 2));
  }
}

TEST_CASE("unsupported replays are refused, and leave no files") {
  const TemporaryFolder folder;
  capture(folder / "trace");
  std::filesystem::create_directory(folder / "other");
  std::filesystem::copy(folder / "trace", folder / "other" / "trace",
                        std::filesystem::copy_options::recursive);
  const auto refused = [&](const std::string& more) {
    return refusal(sweep(folder / "trace", folder / "run", more));
  };
  const auto trace = [&](const std::filesystem::path& path) {
    return "--trace '" + path.string() + "'";
  };
  CHECK_THAT(refused(trace(folder / "other" / "trace")), ContainsSubstring("called trace"));
  std::filesystem::copy(folder / "trace", folder / "other" / "tr\nx",
                        std::filesystem::copy_options::recursive);
  for (const auto& [more, says] : std::vector<std::pair<std::string, std::string>>{
           {trace(folder / "other" / "tr\nx"), "the name of the directory \"tr\\nx\""},
           {trace(folder / "nowhere"), "nowhere"},
           {"--layers 0,x", "--layers: 'x'"},
           {"--layers 9", "layer 9"},
           {"--queries some", "queries: 'some'"},
           {"--output-error none", "--output-error: 'none'"},
           {"--request-threshold 2", "--request-threshold: 2"}})
    CHECK_THAT(refused(more), ContainsSubstring(says));
  CHECK_THAT(refusal(sweep(folder / "trace", folder / "no" / "run")),
             ContainsSubstring("parent directory"));

  std::string shard = read_bytes(folder / "trace" / "shard-00000.safetensors");
  shard[shard.size() / 2] = static_cast<char>(shard[shard.size() / 2] ^ 64);
  write_bytes(folder / "trace" / "shard-00000.safetensors", shard);
  CHECK_THAT(refused(""),
             ContainsSubstring("fails verification") && ContainsSubstring("shard-00000"));

  CHECK(names_in(folder.path()) == std::vector<std::string>{"other", "trace"});
  std::filesystem::create_directory(folder / "run");
  CHECK_THAT(refused(""), ContainsSubstring("exists"));
}

TEST_CASE("a run is deployed and generates, and the end-to-end evaluation can confirm the choice") {
  const TemporaryFolder folder;
  capture(folder / "first", "1");
  capture(folder / "second", "2");
  const std::string run = (folder / "run").string(), policy = (folder / "policy.json").string();
  const std::string deploy = "deploy " + run + " --out " + policy + " --budget ";
  REQUIRE(call(sweep(folder / "first", run, "--trace " + (folder / "second").string())) == 0);
  CHECK(load_run(run).info.traces.size() == 2);
  REQUIRE(call(deploy + "16") == 0);
  const PolicyFile open = read_policy_file(policy);
  CHECK(open.cache.budget.text() == "16");
  CHECK(open.run["hash"] == load_run(run).hash);
  CHECK(open.run["traces"].size() == 2);
  CHECK_FALSE(open.run.contains("confirmed"));

  const std::string confirm = deploy + "16 --confirm 2 --max-tokens 200 --model " + kTiny +
                              " --text " KVLAB_SOURCE_DIR "/tools/demo/prompt.txt";
  REQUIRE(call(confirm) == 0);
  const PolicyFile closed = read_policy_file(policy);
  const auto& confirmed = closed.run["confirmed"];
  REQUIRE(confirmed.size() == 2);
  CHECK(confirmed[0]["kl"] <= confirmed[1]["kl"]);
  CHECK(confirmed[0]["not_significantly_different"] == true);
  const auto deployed = std::ranges::find_if(
      confirmed, [&](const auto& entry) { return entry["policy"] == closed.cache.policy.name; });
  REQUIRE(deployed != confirmed.end());
  CHECK((*deployed)["not_significantly_different"] == true);
  // The policy file has both criteria, or it says that only one was evaluated.
  CHECK(open.run["criteria"]["why"] ==
        "Task accuracy was not evaluated; add --confirm K to evaluate the best K");
  CHECK(closed.run["criteria"]["deployed"] == closed.cache.policy.text());
  CHECK(closed.run["criteria"]["evaluated"].size() == 2);
  REQUIRE(call(confirm + " --task none") == 0);
  CHECK(read_policy_file(policy).run["criteria"]["why"] == "task accuracy was not measured");

  CHECK(call("generate " + kNight + " --max-new-tokens 30 --policy-file " + policy) == 0);
  CHECK_THAT(refusal(deploy + "9"), ContainsSubstring("8, 16, 50%"));
  CHECK_THAT(refusal(deploy + "16 --confirm 2"), ContainsSubstring("--model: missing"));
}

TEST_CASE("a run records the hash of the centre file that its sweep names") {
  const TemporaryFolder folder;
  capture(folder / "trace");
  const auto path = [&](const char* name) { return (folder / name).string(); };
  REQUIRE(call("plan --trace " + path("trace") + " --centre-out " + path("c")) == 0);
  const std::string replay = "replay --trace " + path("trace") + " --policy full --tiers 4 --out ";
  REQUIRE(call(replay + path("with") + " --centre @" + path("c")) == 0);
  REQUIRE(call(replay + path("without")) == 0);
  const auto files = load_run(folder / "with").info.centre_files;
  REQUIRE(files.size() == 1);
  CHECK(files[0].path == path("c"));
  CHECK(files[0].xxh3 == xxh3_hex(read_bytes(path("c"))));
  CHECK(load_run(folder / "without").info.centre_files.empty());
}

TEST_CASE("a plan of formats is confirmed end to end, and its file has the better choice") {
  const TemporaryFolder folder;
  capture(folder / "trace");
  const auto path = [&](const char* name) { return (folder / name).string(); };
  const std::string text = KVLAB_SOURCE_DIR "/tools/texts/carroll-alice.txt";
  const std::string plan = "plan --trace " + path("trace") + " --budget 5bits --out " + path("p");
  const std::string confirm = plan + " --confirm --text " + text + " --max-tokens 128";
  REQUIRE(call(confirm + " --formats llama.cpp --model " + kTiny) == 0);
  CHECK(nlohmann::json::parse(read_bytes(path("p")))["plan"]["measured_kl"] > 0);

  REQUIRE(call(confirm + " --model " + kTiny) == 0);
  const auto json = nlohmann::json::parse(read_bytes(path("p")));
  const double own = json["plan"]["measured_kl"], uniform = json["uniform"]["measured_kl"];
  CHECK(own > 0);
  CHECK(uniform > 0);
  CHECK(json["tiers"] == json[own <= uniform ? "plan" : "uniform"]["tiers"]);
  // --confirm measures the same KL as `kvlab eval`.
  REQUIRE(call("eval --model " + kTiny + " --text " + text +
               " --window 128 --max-tokens 128 --device cpu --policy full --tiers " +
               json["plan"]["tiers"].get<std::string>() + " --out " + path("e")) == 0);
  const auto eval = nlohmann::json::parse(read_bytes(path("e") + "/eval.json"));
  CHECK(eval["configurations"].back()["kl"] == own);

  CHECK_THAT(refusal(plan + " --model " + kTiny), ContainsSubstring("requires --confirm"));
  CHECK_THAT(refusal(plan + " --confirm --model " + kTiny), ContainsSubstring("--text: missing"));
  CHECK_THAT(refusal(confirm), ContainsSubstring("--model: missing"));
  std::filesystem::copy(kTiny, folder / "other");
  std::string weights = read_bytes(folder / "other" / "model.safetensors");
  weights.back() ^= 1;
  write_bytes(folder / "other" / "model.safetensors", weights);
  CHECK_THAT(refusal(confirm + " --model " + path("other")),
             ContainsSubstring("has other weights"));
}

TEST_CASE(
    "budgets by head from a run's errors work in a file, a replay, a deployment and the "
    "engine") {
  const TemporaryFolder folder;
  capture(folder / "trace");
  const auto path = [&](const char* name) { return (folder / name).string(); };
  const auto replay_with = [&](const std::string& budget, const char* out) {
    return "replay --policy h2o --trace " + path("trace") + " --budget " + budget + " --out " +
           path(out);
  };
  REQUIRE(call(replay_with("4,8,16,32", "curves")) == 0);
  REQUIRE(call("plan --by head " + path("curves") + " --budget 12 --out " + path("b")) == 0);
  const Budget by_head = read_budget("@" + path("b"));
  CHECK(by_head.heads.size() == 4);
  CHECK(by_head.resolve(100, 0) == 12);

  const std::string budgets = "12,@" + path("b") + ",pyramid(12)";
  REQUIRE(call(replay_with(budgets, "run")) == 0);
  const Run run = load_run(folder / "run");
  CHECK(run.info.sweep.at(1).budgets == by_head.heads);
  CHECK(run.info.sweep.at(2).budgets.empty());
  // At the last query, every head keeps as many tokens as its budget.
  for (const ResultRow& row : run.rows) {
    if (row.policy != "full") CHECK(row.budget_tokens == 12);
    if (row.policy != "h2o" || row.metric != "kv_bytes" || row.head < 0) continue;
    const auto layer = static_cast<std::size_t>(row.layer),
               head = static_cast<std::size_t>(row.head);
    const std::size_t tokens = row.budget == "12"            ? 12
                               : row.budget == "pyramid(12)" ? std::array{23, 16, 8, 1}.at(layer)
                                                             : by_head.heads.at(layer).at(head);
    CHECK(row.value == static_cast<double>(tokens * 2 * 64 * 2));
  }
  for (const std::string& budget : {"@" + path("b"), std::string("pyramid(12)")}) {
    REQUIRE(call("deploy " + path("run") + " --budget " + budget + " --out " +
                 path("policy.json")) == 0);
    const PolicyFile file = read_policy_file(path("policy.json"));
    CHECK(file.cache.budget.heads == (budget.starts_with('@') ? by_head.heads : HeadBudgets{}));
    CHECK(file.cache.budget.text() == (budget.starts_with('@') ? "by head" : budget));
    CHECK(call("generate " + kNight + " --max-new-tokens 30 --policy-file " +
               path("policy.json")) == 0);
  }
  CHECK(call("verify " + kNight + " --max-new-tokens 30 --policy h2o --budget " + budgets) == 0);

  // An unfinished replay does not continue with another budget file.
  RunInfo other = run.info;
  other.sweep.at(1).budgets.at(3).at(1) += 1;
  CHECK(job_of(run.info, "") == job_of(load_run(folder / "run").info, ""));
  CHECK(job_of(run.info, "") != job_of(other, ""));
  write_bytes(folder / "b", "[[9, 9], [9, 9], [9, 9]]");
  CHECK_THAT(refusal(replay_with(budgets, "other")),
             ContainsSubstring("budgets for 3 layers x 2 KV heads; the model has 4 x 2"));
  CHECK_FALSE(std::filesystem::exists(folder / "other"));
  CHECK_FALSE(std::filesystem::exists(folder / "other.part"));
}

TEST_CASE(
    "a prompt over the trained context is refused with the length that fits, unless allowed") {
  const TemporaryFolder folder;
  std::string text;
  while (text.size() < 9000) text += "It was a dark and stormy night, and the wind blew. ";
  write_bytes(folder / "text.txt", text);
  const std::string given =
      " --model " + kTiny + " --prompt-file " + (folder / "text.txt").string();
  const std::string generate = "generate" + given + " --max-new-tokens ",
                    capture = "capture" + given + " --out " + (folder / "trace").string(),
                    forced = capture + " --teacher-forced --prompt-tokens 1025";
  for (const std::string& line : {generate + "5", capture + " --max-new-tokens 5", forced})
    CHECK_THAT(refusal(line),
               ContainsSubstring("positions, but tiny was trained with a context of only 1024") &&
                   ContainsSubstring("--beyond-context"));
  CHECK_FALSE(std::filesystem::exists(folder / "trace"));

  CHECK(call(forced + " --max-tokens 1030 --beyond-context") == 0);
  CHECK(call(generate + "2 --policy sink --budget 64 --prefill stream") == 0);
}

TEST_CASE("a capture records the tokens of a text in the prompt as a passage") {
  const TemporaryFolder folder;
  const std::string capture =
      "capture --max-new-tokens 3 --prompt 'The pass key is 52417.' --model " + kTiny + " --out " +
      (folder / "trace").string() + " --passage ";
  CHECK_THAT(refusal(capture + "dog"),
             ContainsSubstring("--passage: \"dog\" is not in the prompt"));
  CHECK_THAT(refusal(capture + "s"), ContainsSubstring("more than once"));
  CHECK_THAT(refusal(capture + "key --passage key"),
             ContainsSubstring("--passage: \"key\" is given twice"));
  CHECK_FALSE(std::filesystem::exists(folder / "trace"));

  REQUIRE(call(capture + "'key is 52417' --passage The") == 0);
  const TraceReader reader = TraceReader::open(folder / "trace");
  const std::vector<Passage>& passages = reader.header().passages;
  REQUIRE(passages.size() == 2);
  const Tokenizer tokenizer = Tokenizer::load(kTiny + "/tokenizer.json");
  for (const Passage& passage : passages) {
    const std::span<const std::int32_t> ids = reader.ids();
    CHECK_THAT(tokenizer.decode(ids.subspan(passage.start, passage.tokens)),
               ContainsSubstring(passage.name));
  }
  CHECK(passages[0].name == "key is 52417");
  CHECK(passages[1] == Passage{"The", passages[1].start, 1});
}

TEST_CASE("the demo runs the whole loop, and replaces only its own folder") {
  const TemporaryFolder folder;
  const std::string demo = "demo --out " + (folder / "demo").string();
  REQUIRE(call(demo) == 0);
  for (const char* file : {"trace/manifest.json", "run/results.csv", "report.html", "policy.json"})
    CHECK(std::filesystem::exists(folder / "demo" / file));
  const std::string results = read_bytes(folder / "demo" / "run" / "results.csv");
  write_bytes(folder / "demo" / "stale", "x");
  REQUIRE(call(demo) == 0);
  CHECK_FALSE(std::filesystem::exists(folder / "demo" / "stale"));
  CHECK(read_bytes(folder / "demo" / "run" / "results.csv") == results);

  std::filesystem::create_directory(folder / "mine");
  write_bytes(folder / "mine" / "work", "x");
  CHECK_THAT(refusal("demo --out " + (folder / "mine").string()),
             ContainsSubstring("was not made by"));
  CHECK(read_bytes(folder / "mine" / "work") == "x");
}
