// Tests the command `kvlab predict`, and what `kvlab bench` refuses.
#include <string>

#include "tests/catch.hpp"
#include "tests/tools/command_line.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/selections.hpp"

namespace kvlab {
namespace {

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using test::call;
using test::refusal;

constexpr const char* kLink = R"({"bench": "link", "format": 1, "device": "NVIDIA H200",
  "read_bytes_per_second": 4.5e12, "copy_bytes_per_second": 55e9, "launch_microseconds": 3,
  "fetches": [{"row_bytes": 512, "rows": 64, "microseconds": 8},
              {"row_bytes": 512, "rows": 65536, "microseconds": 700}]})";

const std::string kModel = KVLAB_SOURCE_DIR "/engine/models/configs/llama-3.1-8b.json";

/// A valid command line, to which tests add options.
class Line {
 public:
  Line() { test::write_bytes(folder_ / "link.json", kLink); }
  std::string with(const std::string& more, const std::string& model = kModel) const {
    return "predict --link " + (folder_ / "link.json").string() + " --model " + model + " " + more;
  }

 private:
  test::TemporaryFolder folder_;
};

TEST_CASE("predict runs for given fetch rates, as a table and as JSON") {
  const Line line;
  CHECK(call(line.with("--fetch-rate 2%,10%")) == 0);
  CHECK(call(line.with("--fetch-rate 0% --json")) == 0);
  CHECK(call(line.with("--fetch-rate 2% --batch 1,64 --context 131072 --selected 1024 --page 32 "
                       "--buffer 8192 --layer-us 5 --device-memory 40GiB --host-memory 100GiB")) ==
        0);
  CHECK(call(line.with("--fetch-rate 2%", test::kTiny) + " --context 900 --selected 64") == 0);
}

TEST_CASE("predict reads the fetch rates and the selection of a run") {
  const Line line;
  const test::TemporaryFolder folder;
  const std::string run = (folder / "run").string(), plain = (folder / "plain").string();
  const std::string replay = "replay --trace " KVLAB_SOURCE_DIR "/traces/samples/tiny-story ";
  REQUIRE(call(replay + "--policy lru,h2o:recent=0 --refetch top:32 --budget 64,128 --out " +
               run) == 0);
  REQUIRE(call(replay + "--policy lru --budget 64 --out " + plain) == 0);
  CHECK(call(line.with(run)) == 0);
  CHECK(call(line.with(run + " --selected 2048 --device-memory 40GiB --json")) == 0);
  CHECK_THAT(refusal(line.with(plain)), StartsWith(plain + ": the run has no fetch rates"));
  CHECK_THAT(refusal(line.with(run + " --context 32")),
             StartsWith("--selected: 32 should be less than --context 32"));
}

/// A trace of random selections of up to 8 of 60 tokens at 40 decoded queries.
std::string write_selected(const test::TemporaryFolder& folder) {
  std::vector<std::int32_t> rows;
  for (std::int32_t query = 20; query < 60; ++query)
    for (std::int32_t i = 0; i < 8; ++i) rows.push_back(i < 6 ? query - 1 - 3 * i : kNoToken);
  TraceHeader header;
  header.model = "engine";
  header.shape = {.layers = 1, .query_heads = 1, .kv_heads = 1, .head_size = 128};
  header.softmax_scale = 1;
  write_selections_trace(folder / "engine", header, std::vector<std::int32_t>(60, 1),
                         {{0, 20, SegmentKind::prompt}, {20, 40, SegmentKind::decode}},
                         {Queries::decode, 8, {rows}});
  return (folder / "engine").string();
}

TEST_CASE("a trace of selections is described, replayed, reported and predicted from") {
  const Line line;
  const test::TemporaryFolder folder;
  const std::string trace = write_selected(folder), run = (folder / "run").string(),
                    replay = "replay --trace " + trace + " --out " + run + " --budget 12,30 ";
  CHECK(call("trace verify " + trace) == 0);
  CHECK(call("trace info " + trace) == 0);
  CHECK(call("trace info " + trace + " --json") == 0);
  REQUIRE(call(replay + "--policy lru,sieve --refetch logged") == 0);
  CHECK(call("report " + run + " --out " + (folder / "report.html").string()) == 0);
  CHECK(call(line.with(run)) == 0);
  const std::string json = test::read_bytes(folder / "run" / "run.json");
  CHECK_THAT(json, ContainsSubstring("\"refetch\": \"logged\"") &&
                       ContainsSubstring("\"selected_tokens\": 8"));
  const std::string fresh = (folder / "fresh").string();
  CHECK_THAT(refusal("replay --trace " + trace + " --out " + fresh +
                     " --budget 30 --policy tova --refetch logged"),
             StartsWith("policy tova: it needs attention, and " + trace));
  CHECK_THAT(refusal("replay --trace " + trace + " --out " + fresh + " --budget 30 --policy lru"),
             StartsWith("trace " + trace + ": it has only selections"));
  CHECK_THAT(refusal("replay --trace " KVLAB_SOURCE_DIR "/traces/samples/tiny-story --out " +
                     fresh + " --budget 30 --policy lru --refetch logged"),
             StartsWith("--refetch logged: the trace "));
  CHECK_FALSE(std::filesystem::exists(fresh));
}

TEST_CASE("predict refuses wrong options with the option and what would be right") {
  const Line line;
  CHECK_THAT(refusal("predict --model " + kModel + " --fetch-rate 2%"),
             StartsWith("--link: missing"));
  CHECK_THAT(refusal(line.with("")), StartsWith("--fetch-rate: missing"));
  CHECK_THAT(refusal(line.with("run --fetch-rate 2%")), StartsWith("--fetch-rate: "));
  CHECK_THAT(refusal(line.with("none")), ContainsSubstring("none"));
  CHECK_THAT(refusal(line.with("run --buffer 64")), StartsWith("--buffer: "));
  for (const char* wrong : {"0.1", "5", "x", "", "-1%", "101%", "2%,"})
    CHECK_THAT(refusal(line.with(std::string("--fetch-rate '") + wrong + "'")),
               ContainsSubstring("--fetch-rate"));
  for (const char* wrong : {"0", "x", "1,,2", "-1", "65537"})
    CHECK_THAT(refusal(line.with(std::string("--fetch-rate 2% --batch '") + wrong + "'")),
               ContainsSubstring("--batch"));
  for (const char* wrong : {"0", "40", "40%", "all", "40GB", "-1GiB"})
    CHECK_THAT(refusal(line.with(std::string("--fetch-rate 2% --device-memory ") + wrong)),
               StartsWith(std::string("--device-memory: '") + wrong + "' should be a size"));
  CHECK_THAT(refusal(line.with("--fetch-rate 2% --host-memory 1GiB")),
             StartsWith("--host-memory: requires --device-memory"));
  CHECK_THAT(refusal(line.with("--fetch-rate 2% --layer-us -1")), StartsWith("--layer-us: "));
  CHECK_THAT(refusal(line.with("--fetch-rate 2% --layer-us nan")), StartsWith("--layer-us: "));
  CHECK_THAT(refusal(line.with("--fetch-rate 2% --context 2048")), StartsWith("--selected: "));
  CHECK_THAT(refusal(line.with("--fetch-rate 2% --buffer 2048")),
             StartsWith("a buffer of 2048 tokens"));
  CHECK_THAT(refusal(line.with("--fetch-rate 2% --device-memory 1GiB")),
             StartsWith("--device-memory: "));
  CHECK_THAT(refusal(line.with("--fetch-rate 2%", "none.json")), StartsWith("none.json: "));
}

TEST_CASE("a model whose cache has another form is refused by name") {
  const Line line;
  const test::TemporaryFolder folder;
  const std::string path = (folder / "config.json").string();
  test::write_bytes(path, R"({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512})");
  CHECK_THAT(refusal(line.with("--fetch-rate 2%", path)),
             ContainsSubstring("DeepseekV3ForCausalLM"));
}

TEST_CASE("bench link refuses half of a step, and its options are refused elsewhere") {
  CHECK_THAT(refusal("bench link --fetch-rate 2%"),
             StartsWith("--fetch-rate and --random-weights"));
  CHECK_THAT(refusal("bench link --random-weights " + kModel),
             StartsWith("--fetch-rate and --random-weights"));
  CHECK_THAT(refusal("bench link --fetch-rate 2% --random-weights " + kModel),
             StartsWith("--selected: 2048 should be less than --context 1024"));
  CHECK_THAT(refusal("bench decode --selected 5 --random-weights " + kModel),
             StartsWith("--selected: only bench link has it"));
}

TEST_CASE("bench evict and bench stream refuse the full cache, and bench stream several policies") {
  const std::string model = " --random-weights " + kModel;
  for (const char* const what : {"bench evict", "bench stream"}) {
    CHECK_THAT(refusal(what + model), StartsWith("--policy: bench stream and bench evict need"));
    CHECK_THAT(refusal(what + model + " --policy h2o,full --budget 64"),
               StartsWith("--policy: bench stream and bench evict need"));
  }
  CHECK_THAT(refusal("bench stream --policy h2o,lru --budget 64" + model),
             StartsWith("--policy: bench stream measures one policy"));
}

}  // namespace
}  // namespace kvlab
