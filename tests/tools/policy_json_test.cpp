// Tests of the reader of policy.json, which the commands and the C library share.
#include "engine/evaluation/policy_json.hpp"

#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "traces/base/json.hpp"

using namespace kvlab;
using namespace kvlab::test;
using Catch::Matchers::ContainsSubstring;
using nlohmann::json;

namespace {

json example() {
  return json::parse(R"({
    "format": 1, "policy": "a2sf", "params": {"keep": 0.75},
    "protected": {"sinks": 4, "recent": "37.5%"}, "budget": 64, "positions": "cache",
    "prefill": "chunk:32", "threshold": 0.02, "seed": 7,
    "model": {"name": "tiny", "weights_xxh3": "fedcba9876543210"}, "run": {"metric": "recall"}})");
}

PolicyJson read(const json& file) { return parse_policy_json(file.dump(), "policy.json"); }

PolicyJson read_with(const char* pointer, const json& value) {
  json file = example();
  file[json::json_pointer(pointer)] = value;
  return read(file);
}

}  // namespace

TEST_CASE("the reader of policy.json returns values of the right types") {
  const PolicyJson file = read(example());
  CHECK(file.policy == "a2sf");
  CHECK(file.params_of(std::vector<std::string_view>{"keep"}, false) == std::vector{0.75});
  CHECK(file.sinks == tokens(4));
  CHECK(file.recent == Extent{.share_ppm = 375'000, .is_share = true});
  CHECK(file.budget.extent == tokens(64));
  CHECK(file.positions == Positions::cache);
  CHECK(file.prefill.chunk == 32);
  CHECK(file.threshold == 0.02);
  CHECK(file.seed == 7);
  CHECK(file.model == "tiny");
  CHECK(file.weights_xxh3 == "fedcba9876543210");
  CHECK(file.run == json{{"metric", "recall"}});
  CHECK((!file.prompt && file.modifiers.empty() && file.tiers.empty() && !file.source));
}

TEST_CASE("the reader of policy.json returns the optional keys") {
  const PolicyJson modified =
      read_with("/modifiers", {{"every", 8}, {"once", false}, {"pool", "max"}});
  CHECK(modified.modifiers == std::vector<std::pair<std::string, std::string>>{
                                  {"every", "8"}, {"once", "no"}, {"pool", "max"}});
  CHECK(read_with("/tiers", "16:16t,4:100%").tiers == "16:16t,4:100%");
  CHECK(read_with("/centre", "prompt").centre == "prompt");
  CHECK(read_with("/params/name", "mine").feature == "mine");
  CHECK(read_with("/protected/prompt", true).prompt);
  CHECK(read_with("/source", {{"path", "my.hpp"}, {"xxh3", "0"}}).source->path == "my.hpp");
  CHECK(read_with("/seed", nullptr).seed == 0);
  CHECK(read_with("/budget", {{16, 20}, nullptr}).budget.heads ==
        HeadBudgets{{16, 20}, {kNoBudget, kNoBudget}});
  CHECK(read_with("/budget", "64KiB").budget.bytes == 65536);
  CHECK(read_with("/budget", "ada(20%)").budget.split == Budget::Split::ada);
}

TEST_CASE("the reader of policy.json accepts the names of version 0.5") {
  json file = example();
  file["guards"] = file["protected"];
  file.erase("protected");
  file["ladder"] = "4";  // old name
  file["policy"] = "column";
  const PolicyJson read_back = read(file);
  CHECK(read_back.sinks == tokens(4));
  CHECK(read_back.tiers == "4");
  CHECK(read_back.policy == "feature");
}

TEST_CASE("the reader of policy.json names the file and the key that is wrong") {
  struct Bad {
    const char* pointer;
    json value;
    const char* says;
  };
  const Bad bad = GENERATE(values<Bad>({
      {"/format", 2, "format 2"},
      {"/policy", 3, "policy"},
      {"/params", 3, "params"},
      {"/params/keep", "0.75", "\"keep\" is \"0.75\"; a number is expected"},
      {"/params/name", 3, "name"},
      {"/protected/sinks", -1, "sinks"},
      {"/protected/sinks", 1.5, "sinks"},
      {"/protected/sinks", "1:recent=2", "sinks"},
      {"/protected/recent", "120%", "recent"},
      {"/protected/recent", "all", "recent"},
      {"/protected/recent", nullptr, "recent"},
      {"/protected/prompt", 1, "prompt should be true"},
      {"/protected/newest", 1, "protected"},
      {"/budget", 0, "at least 1"},
      {"/budget", -5, "budget"},
      {"/budget", 2147483648u, "budget"},
      {"/budget", "128", "budget"},
      {"/budget", "20%", "budget"},
      {"/budget", "pyramid(0)", "budget"},
      {"/budget", nullptr, "reserved"},
      {"/budget", json::array(), "no layers"},
      {"/budget", {{1, 2}, {3}}, "budget[1]"},
      {"/budget", {64, {1, 2}}, "budget[1]"},
      {"/positions", "mine", "positions"},
      {"/prefill", "later", "prefill"},
      {"/prefill", "chunk:0", "\"prefill\" is \"chunk:0\"; dense, stream or chunk:N"},
      {"/threshold", 2, "threshold"},
      {"/threshold", "x", "threshold"},
      {"/seed", -1, "seed"},
      {"/seed", 0.5, "seed"},
      {"/model", "tiny", "model"},
      {"/model/size", 3, "size"},
      {"/tiers", 8, "tiers"},
      {"/centre", true, "centre"},
      {"/source", "my.hpp", "source"},
      {"/scope", "head", "reserved"},
      {"/posture", 1, "unknown key"},
      {"/polciy", nullptr, "did you mean 'policy'"},
      {"/modifiers", {{"evry", 4}}, "unknown modifier"},
      {"/modifiers", {{"every", "4:once"}}, "every"},
      {"/modifiers", {{"every", nullptr}}, "every"},
      {"/modifiers", 3, "modifiers"},
  }));
  CAPTURE(bad.pointer, bad.value);
  const std::string message = error_of([&] { read_with(bad.pointer, bad.value); });
  CHECK_THAT(message, ContainsSubstring("policy.json: ") && ContainsSubstring(bad.says));
  CHECK(message.find('\n') == std::string::npos);
}

TEST_CASE("a policy.json has exactly the parameters of its policy") {
  const PolicyJson file = read_with("/params", {{"keep", 0.5}, {"most", 3}});
  using Names = std::vector<std::string_view>;
  CHECK(file.params_of(Names{"most", "keep"}, false) == std::vector{3.0, 0.5});
  for (const Names& names : {Names{}, Names{"keep"}, Names{"keep", "least"}})
    CHECK_THAT(error_of([&] { file.params_of(names, false); }),
               ContainsSubstring("policy.json: params: should have exactly the"));
  CHECK_THAT(error_of([&] {
               file.params_of(Names{"keep", "most"}, true);
             }),
             ContainsSubstring("should have exactly the 3 parameters of a2sf: keep, most, name"));
}
