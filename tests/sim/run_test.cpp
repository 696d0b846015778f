// Tests of a run's folder: it is complete or absent, and it is validated when it is read.
#include "sim/run/run.hpp"

#include <fstream>

#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/sim/run_fixture.hpp"
#include "tests/traces/temporary_folder.hpp"

using namespace kvlab;
using Catch::Matchers::ContainsSubstring;
using kvlab::test::error_of;
using kvlab::test::TemporaryFolder;

namespace {

Run small_run() {
  Run run = made_up_run({{"window", "sinks=0:recent=0", 0.8, 0.01}, {"full", "", 0, 0}});
  run.info.sweep = {{"window", "sinks=0:recent=0", "64", "dense", "original", 5}};
  run.info.layers = {0, 2};
  run.info.queries = Queries::all;
  run.info.every_output_error = true;
  run.kept = Kept{.trace = "trace0",
                  .budget = "64",
                  .prefill = "dense",
                  .budget_tokens = 64,
                  .queries = {500, 501, 502},
                  .ids = {7, 8},
                  .heads = {{0,
                             1,
                             {{"window", "sinks=0:recent=0", "original", {{3, 500, 501}}}},
                             {{{3, 255}}, {}, {{4, 10}}}}}};
  return run;
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path) << text;
}

std::string read(const std::filesystem::path& path) { return read_text_file(path, 1 << 20); }

std::string refusal(const std::filesystem::path& directory) {
  return error_of([&] { load_run(directory); });
}

void replace(const std::filesystem::path& path, const std::string& from, const std::string& to) {
  std::string text = read(path);
  const auto at = text.find(from);
  REQUIRE(at != std::string::npos);
  write(path, text.replace(at, from.size(), to));
}

}  // namespace

TEST_CASE("a run reads back as it was saved, and is saved again with the same bytes") {
  const TemporaryFolder folder;
  Run run = small_run();
  save_run(run, folder.path());
  Run loaded = load_run(folder.path());
  CHECK(loaded.info == run.info);
  CHECK(loaded.kept == run.kept);
  CHECK(loaded.hash == run.hash);
  CHECK(results_csv(loaded.rows) == results_csv(run.rows));
  const std::string before = read(folder.path() / "run.json");
  save_run(loaded, folder.path());
  CHECK(read(folder.path() / "run.json") == before);
}

TEST_CASE("a changed or broken run is refused with the file and the key") {
  const TemporaryFolder folder;
  Run run = small_run();
  save_run(run, folder.path());
  const auto info = folder.path() / "run.json", rows = folder.path() / "results.csv",
             kept = folder.path() / "kept.json";
  SECTION("a folder without a run") {
    std::filesystem::remove(info);
    CHECK_THAT(refusal(folder.path()), ContainsSubstring("is not a run"));
  }
  SECTION("changed results") {
    replace(rows, "recall,", "miss_rate,");
    CHECK(!refusal(folder.path()).empty());
  }
  SECTION("an extra row") {
    write(rows,
          read(rows) + "trace0,sink,,64,64,dense,original,decode,0.01,0,all,all,recall,0.5,,1\n");
    CHECK_THAT(refusal(folder.path()),
               ContainsSubstring("results.csv") && ContainsSubstring("checksum"));
  }
  SECTION("a later format") {
    replace(info, "\"format\": 1", "\"format\": 2");
    CHECK_THAT(refusal(folder.path()),
               ContainsSubstring("run.json") && ContainsSubstring("format 2"));
  }
  SECTION("a missing key") {
    replace(info, "\"queries\"", "\"spam\"");
    CHECK_THAT(refusal(folder.path()),
               ContainsSubstring("run.json") && ContainsSubstring("queries"));
  }
  SECTION("broken JSON") {
    write(info, "{");
    CHECK_THAT(refusal(folder.path()), ContainsSubstring("run.json"));
  }
  SECTION("invalid kept sets") {
    replace(kept, "[3,500,501]", "[3,500]");
    CHECK_THAT(refusal(folder.path()),
               ContainsSubstring("kept.json") && ContainsSubstring("lifetimes[0]"));
  }
  SECTION("attention that is not a list of pairs") {
    replace(kept, "[3,255]", "[3]");
    CHECK_THAT(refusal(folder.path()), ContainsSubstring("attention[0]"));
  }
  SECTION("attention of too few queries") {
    replace(kept, "[3,255],[],", "[3,255],");
    CHECK_THAT(refusal(folder.path()), ContainsSubstring("a row for each query"));
  }
  SECTION("kept.json of the first format, which had one head and no attention") {
    write(kept, R"({"format":1,"trace":"trace0","budget":"64","budget_tokens":64,"prefill":"dense",
      "layer":0,"head":1,"queries":[500],"series":[]})");
    const auto loaded = load_run(folder.path()).kept;
    CHECK(loaded->heads.front().head == 1);
    CHECK(loaded->ids.empty());
  }
  SECTION("kept at a negative position") {
    replace(kept, "[3,500,501]", "[-3,500,501]");
    CHECK_THAT(refusal(folder.path()),
               ContainsSubstring("kept.json") && ContainsSubstring("whole number"));
  }
}

TEST_CASE("a row with another trace, layer or head than the run's is refused") {
  for (const auto& [change, message] :
       {std::pair<void (*)(ResultRow&), const char*>{[](ResultRow& row) { row.trace = "another"; },
                                                     "a row has trace \"another\""},
        {[](ResultRow& row) { row.layer = 0, row.head = 2'000'000'000; }, "head 2000000000"},
        {[](ResultRow& row) { row.layer = 1; }, "has 1 layers of 2 KV heads"}}) {
    const TemporaryFolder folder;
    Run run = small_run();
    change(run.rows.front());
    save_run(run, folder.path());
    CHECK_THAT(refusal(folder.path()), ContainsSubstring(message));
  }
}

TEST_CASE("lifetimes are the first and last shown queries at which a token was live") {
  const std::vector<KeptSet> sets{{10, {1, 9, 10}}, {12, {1, 12}}, {14, {9, 12, 14}}};
  const std::vector<Lifetime> expected{{1, 10, 12},  {9, 10, 10},  {9, 14, 14},
                                       {10, 10, 10}, {12, 12, 14}, {14, 14, 14}};
  CHECK(lifetimes_of(sets) == expected);
  CHECK(lifetimes_of({}).empty());
}
