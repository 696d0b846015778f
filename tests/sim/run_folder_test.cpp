// Tests of the folder in which a run is made, and of the head tasks that are stored in it.
#include "sim/run/run_folder.hpp"

#include <fmt/format.h>

#include "sim/run/replay_run.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/sim/run_fixture.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"

using namespace kvlab;
using Catch::Matchers::ContainsSubstring;
using kvlab::test::error_of;
using kvlab::test::TemporaryFolder;

namespace {

const nlohmann::json kJob{{"sweep", "a"}, {"queries", "decode"}};

Run small_run() { return made_up_run({{"window", "", 0.8, 0.01}, {"full", "", 0, 0}}); }

std::vector<CacheConfig> sweep() {
  return {{.policy = parse_policy("h2o"), .budget = parse_budget("16")},
          {.policy = parse_policy("oracle_topk", replay_oracles()), .budget = parse_budget("16")}};
}

/// All results as text, for comparisons.
std::string text_of(const ReplayResult& result, const std::vector<CacheConfig>& configs,
                    const ReplayOptions& options) {
  return results_csv(result_rows("trace", configs, options, result));
}

}  // namespace

TEST_CASE("packed head tasks in any order give the metrics of a replay in memory") {
  const TemporaryFolder folder;
  const TraceReader trace = write_random_trace(folder / "trace", {});
  const auto configs = sweep();
  const ReplayOptions options;
  const ReplayJob job(trace, 0, configs, options);
  REQUIRE(job.tasks() == 4);
  ReplayGathering gathering(job);
  for (std::size_t u = job.tasks(); u-- > 0;) {
    const HeadTaskId id{7, 0, u};
    gathering.put(u, unpack_head_task(id, pack_head_task(id, job.run(u)), "unit"));
  }
  CHECK(text_of(gathering.result(), configs, options) ==
        text_of(replay(trace, 0, configs, options), configs, options));
  CHECK(job.task(3).layer == 1);
  CHECK(job.task(3).kv_head == 1);
  std::vector<HeadOutcome> odd = job.run(0);
  odd[1].stats.errors.pop_back();
  ReplayGathering again(job);
  CHECK_THROWS_WITH(again.put(0, odd), ContainsSubstring("another replay"));
}

TEST_CASE("a replay says that it leaves out gradients of queries that it does not measure") {
  const TemporaryFolder folder;
  write_random_trace(folder / "trace", {});
  std::string said;
  ProcessGroup alone;
  for (const Queries queries : {Queries::decode, Queries::all}) {
    const std::string out = fmt::format("run-{}", name_of(queries));
    ReplayRequest request{.traces = {(folder / "trace").string()},
                          .sweep = sweep(),
                          .options = {.queries = queries},
                          .notice = [&](const std::string& line) { said += line; }};
    replay_to(request, folder / out, alone);
    CHECK(said.starts_with("no kl_estimate for ") == (queries == Queries::all));
  }
}

TEST_CASE("a replay in memory gives the same run as a replay to a folder") {
  const TemporaryFolder folder;
  std::vector<TraceReader> traces;
  ReplayRequest request{.sweep = add_references(sweep()), .options = {.threads = 2}};
  for (const char* name : {"one", "two"}) {
    traces.push_back(write_random_trace(folder / name, {}));
    request.traces.push_back((folder / name).string());
  }
  double done = 0;
  request.options.progress = [&](double fraction) { done = std::max(done, fraction); };
  Run run = replay_in_memory(request, std::vector<const TraceReader*>{&traces[0], &traces[1]});
  CHECK(done == 1);
  std::filesystem::create_directory(folder / "memory");
  save_run(run, folder / "memory");
  ProcessGroup alone;
  replay_to(request, folder / "run", alone);
  for (const char* file : {"results.csv", "run.json", "kept.json"})
    CHECK(test::read_bytes(folder / "memory" / file) == test::read_bytes(folder / "run" / file));
}

TEST_CASE("a head task file that is truncated, changed or from another run is refused by name") {
  const HeadTaskId id{7, 1, 2};
  HeadOutcome outcome{.evictions = 3};
  outcome.stats.quantiles = {{.value = 0.25, .without = {0.5}}};
  outcome.stats.errors = {1, 2, 3};
  const std::string bytes = pack_head_task(id, std::span(&outcome, 1));
  const auto refusal = [&](const HeadTaskId& wanted, const std::string& given) {
    return error_of([&] { unpack_head_task(wanted, given, "a.unit"); });
  };
  const auto back = unpack_head_task(id, bytes, "a.unit");
  REQUIRE(back.size() == 1);
  CHECK(back[0].evictions == 3);
  CHECK(back[0].stats.quantiles.at(0).without[0] == 0.5);
  CHECK(back[0].stats.errors == std::vector<double>{1, 2, 3});
  for (std::size_t size = 0; size < bytes.size(); ++size)
    CHECK_THAT(refusal(id, bytes.substr(0, size)), ContainsSubstring("a.unit: "));
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    std::string changed = bytes;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    CHECK_THAT(refusal(id, changed), ContainsSubstring("a.unit: "));
  }
  for (const HeadTaskId& other : {HeadTaskId{8, 1, 2}, HeadTaskId{7, 0, 2}, HeadTaskId{7, 1, 3}})
    CHECK_THAT(refusal(other, bytes), ContainsSubstring("another"));
}

TEST_CASE("a run's folder appears completely or not at all") {
  const TemporaryFolder folder;
  const auto out = folder / "run", part = folder / "run.part";
  { const RunFolder unused(out, kJob, false); }
  CHECK_FALSE(std::filesystem::exists(part));
  {
    RunFolder made(out.string() + "/", kJob, false);
    made.write_unit(0, 0, "unit");
    Run run = small_run();
    made.commit(run);
  }
  CHECK(load_run(out).rows.size() == small_run().rows.size());
  CHECK_FALSE(std::filesystem::exists(part));
  CHECK_THAT(error_of([&] { RunFolder(out, kJob, false); }), ContainsSubstring("exists already"));
  CHECK_THAT(error_of([&] { RunFolder(folder / "no/such", kJob, false); }),
             ContainsSubstring("cannot be made"));
}

TEST_CASE("a run's folder is continued only by the same job, one process at a time") {
  const TemporaryFolder folder;
  const auto out = folder / "run";
  {
    const RunFolder first(out, kJob, false);
    first.write_unit(0, 1, "unit");
    CHECK_THAT(error_of([&] { RunFolder(out, kJob, false); }), ContainsSubstring("is running"));
  }
  CHECK(RunFolder(out, kJob, false).read_unit(0, 1) == "unit");
  CHECK_FALSE(RunFolder(out, kJob, false).read_unit(1, 0));
  CHECK_THAT(error_of([&] {
               RunFolder(out, {{"sweep", "b"}, {"queries", "decode"}}, false);
             }),
             ContainsSubstring("differs in: sweep)") && ContainsSubstring("--fresh"));
  CHECK_FALSE(RunFolder(out, {{"sweep", "b"}}, true).read_unit(0, 1));
  CHECK_FALSE(std::filesystem::exists(folder / "run.part"));

  std::filesystem::create_directory(folder / "run.part");
  test::write_bytes(folder / "run.part" / "mine", "x");
  CHECK_THAT(error_of([&] { RunFolder(out, kJob, true); }), ContainsSubstring("was not made by"));
  CHECK(test::read_bytes(folder / "run.part" / "mine") == "x");
}

TEST_CASE("a run that cannot be written is named by its path, not by its temporary folder") {
  const TemporaryFolder folder;
  RunFolder made(folder / "run", kJob, false);
  std::filesystem::create_directory(made.unit_path(0, 0));
  const std::string error = error_of([&] { made.write_unit(0, 0, "unit"); });
  CHECK_THAT(error, ContainsSubstring((folder / "run").string() + "/trace0-unit0.unit"));
  CHECK_THAT(error, !ContainsSubstring("is kept"));
  made.write_unit(0, 1, "unit");
  CHECK_THAT(error_of([&] { made.write_unit(0, 0, "unit"); }), ContainsSubstring("is kept in"));
}
