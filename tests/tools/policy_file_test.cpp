// Tests of policy.json: it reads back as it was written, and a file that could not run is refused.
#include "engine/evaluation/policy_file.hpp"

#include <array>

#include "policies/executor.hpp"
#include "sim/plan/centre_file.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"

using namespace kvlab;
using namespace kvlab::test;
using Catch::Matchers::ContainsSubstring;
using nlohmann::json;

namespace {

PolicyFile h2o_file() {
  return {.cache = {.policy = parse_policy("h2o:sinks=4:recent=37.5%"),
                    .budget = {.extent = tokens(128)},
                    .prefill = parse_prefill("chunk:32"),
                    .positions = Positions::cache,
                    .seed = 9,
                    .threshold = 0.02},
          .model = "tiny",
          .weights_xxh3 = "fedcba9876543210",
          .run = {{"hash", "0123456789abcdef"},
                  {"not_significantly_different", json::array({"sink"})}}};
}

const CacheShape kShape{.layers = 2, .kv_heads = 2, .head_size = 64};

/// The error message for a valid file after `change`; "" if the file is accepted.
template <class Change>
std::string refusal(Change change) {
  const TemporaryFolder folder;
  const auto path = folder / "policy.json";
  write_policy_file(path, h2o_file());
  json file = json::parse(read_bytes(path));
  change(file);
  write_bytes(path, file.dump());
  return error_of([&] { read_policy_file(path); });
}

std::string refusal_with(const std::string& pointer, const json& value) {
  return refusal([&](json& file) { file[json::json_pointer(pointer)] = value; });
}

}  // namespace

TEST_CASE("a policy file reads back as it was written") {
  const TemporaryFolder folder;
  const auto path = folder / "policy.json";
  write_policy_file(path, h2o_file());
  const PolicyFile read = read_policy_file(path);
  CHECK(read.cache.policy.text() == h2o_file().cache.policy.text());
  CHECK(read.cache.budget.text() == "128");
  CHECK(read.cache.budget.is_even());
  CHECK(read.cache.positions == Positions::cache);
  CHECK(read.cache.prefill.text() == "chunk:32");
  CHECK(read.cache.threshold == 0.02);
  CHECK(read.cache.seed == 9);
  CHECK(read.model == "tiny");
  CHECK(read.weights_xxh3 == "fedcba9876543210");
  CHECK(read.run == h2o_file().run);
  const std::string before = read_bytes(path);
  write_policy_file(path, read);
  CHECK(read_bytes(path) == before);
}

TEST_CASE("modifiers read back as they were written, and are present only if they have an effect") {
  const TemporaryFolder folder;
  const auto path = folder / "policy.json";
  write_policy_file(path, h2o_file());
  CHECK(!json::parse(read_bytes(path)).contains("modifiers"));
  for (const char* text : {"h2o:every=64:scope=layer", "h2o:once:smooth=3:pool=max:group=max"}) {
    PolicyFile file = h2o_file();
    file.cache.policy = parse_policy(text);
    write_policy_file(path, file);
    CHECK(read_policy_file(path).cache.policy.modifiers == file.cache.policy.modifiers);
  }
  const json written = json::parse(read_bytes(path))["modifiers"];
  CHECK(written == json{{"once", true}, {"smooth", 3}, {"pool", "max"}, {"group", "max"}});
}

TEST_CASE("every policy that evicts can be deployed with its defaults") {
  const TemporaryFolder folder;
  for (const PolicyEntry& entry : policy_catalogue()) {
    if (!entry.info.evicts) continue;
    PolicyFile file = h2o_file();
    file.cache.policy = parse_policy(entry.info.name);
    write_policy_file(folder / "policy.json", file);
    CHECK(read_policy_file(folder / "policy.json").cache.policy.text() == file.cache.policy.text());
  }
}

TEST_CASE("a policy file names the feature that its policy reads") {
  const TemporaryFolder folder;
  PolicyFile file = h2o_file();
  file.cache.policy = parse_policy("feature:name=key_norm:keep=-1:recent=9:prompt");
  write_policy_file(folder / "policy.json", file);
  CHECK(read_policy_file(folder / "policy.json").cache.policy.text() == file.cache.policy.text());
}

TEST_CASE("a policy file becomes the configuration of a cache") {
  PolicyFile file = h2o_file();
  check_shape(file, kShape);
  const ResolvedConfig one = resolve(file.cache, 1000);
  CHECK(one.policy.text() == file.cache.policy.text());
  CHECK(one.budget_tokens == 128);
  CHECK(one.budget_of(1, 1) == 128);
  CHECK(one.positions == Positions::cache);
  CHECK(one.prefill.chunk == 32);
  CHECK(one.seed == 9);
  CHECK(one.threshold16() == request_threshold16(0.02));
}

TEST_CASE("a budget in bytes reads back as it was written") {
  const TemporaryFolder folder;
  PolicyFile file = h2o_file();
  file.cache.budget = parse_budget("64KiB");
  write_policy_file(folder / "policy.json", file);
  CHECK(json::parse(read_bytes(folder / "policy.json"))["budget"] == "64KiB");
  const PolicyFile read = read_policy_file(folder / "policy.json");
  CHECK(resolve(read.cache, 1000, 0, {2, 2, 64}).budget_tokens == 256);
}

TEST_CASE("centred keys read back as they were written, and a wrong key is refused") {
  const TemporaryFolder folder;
  PolicyFile file = h2o_file();
  file.cache.policy = parse_policy("h2o:tiers=4:centre=prompt");
  file.cache.positions = Positions::original;
  write_policy_file(folder / "policy.json", file);
  json written = json::parse(read_bytes(folder / "policy.json"));
  CHECK(written["centre"] == "prompt");
  CHECK(read_policy_file(folder / "policy.json").cache.policy.text() == file.cache.policy.text());
  const auto refusal_of = [&](const json& changed) {
    write_bytes(folder / "bad.json", changed.dump());
    return error_of([&] { read_policy_file(folder / "bad.json"); });
  };
  json bad = written;
  bad["centre"] = "somewhere";
  CHECK(refusal_of(bad).ends_with("centre: 'somewhere' should be none, prompt or @FILE"));
  written.erase("tiers");
  CHECK(refusal_of(written).find("only in a tier plan") != std::string::npos);
}

TEST_CASE("a centre file is named relative to the policy file, so that both can be moved") {
  const TemporaryFolder folder;
  const std::filesystem::path before = folder / "before", after = folder / "after";
  std::filesystem::create_directories(before / "centres");
  const CentreConstants constants{2, 2, {{0, {1, 2, 3, 4}}, {1, {5, 6, 7, 8}}}};
  write_centre_file(before / "centres" / "c.safetensors", constants);
  PolicyFile file = h2o_file();
  file.cache.positions = Positions::original;
  file.cache.policy =
      parse_policy("h2o:tiers=4:centre=@" + (before / "centres/c.safetensors").string());
  write_policy_file(before / "policy.json", file);
  json written = json::parse(read_bytes(before / "policy.json"));
  CHECK(written["centre"] == "@centres/c.safetensors");
  std::filesystem::rename(before, after);
  const CentreSetting read = read_policy_file(after / "policy.json").cache.policy.centre;
  REQUIRE(read.constants);
  CHECK(read.constants->centre(1, 1)[0] == 7);
  CHECK(read.file == (after / "centres/c.safetensors").string());

  const auto refusal_of = [&](const char* centre) {
    written["centre"] = centre;
    write_bytes(after / "bad.json", written.dump());
    return error_of([&] { read_policy_file(after / "bad.json"); });
  };
  CHECK(
      refusal_of("@/c.safetensors").ends_with("a path relative to this file's folder is expected"));
  CHECK(refusal_of("@none.safetensors").find("after/none.safetensors: cannot open") !=
        std::string::npos);
}

TEST_CASE("a tier plan reads back as it was written, and decoders run it") {
  const TemporaryFolder folder;
  PolicyFile file = h2o_file();
  file.cache.policy = parse_policy("h2o:tiers=16@16t+4@100%");
  file.cache.positions = Positions::original;
  write_policy_file(folder / "policy.json", file);
  CHECK(json::parse(read_bytes(folder / "policy.json"))["tiers"] == "16:16t,4:100%");
  const CacheConfig cache = read_policy_file(folder / "policy.json").cache;
  CHECK(cache.policy.text() == file.cache.policy.text());
  CHECK(kvlab::refusal(kDecoder, cache).empty());
  CHECK(resolve(cache, 1000, 0, {2, 2, 64}).budget_tokens > 128);
  for (const Executor& executor : {kCudaDecoder, kCudaReplay, kCudaEvaluation, kKernelLibrary})
    CHECK(kvlab::refusal(executor, cache).empty());
}

TEST_CASE("budgets may differ by layer and KV head, in the model's shape") {
  const TemporaryFolder folder;
  PolicyFile file = h2o_file();
  file.cache.budget = budget_of_heads({{100, 200}, {300, 50}});
  write_policy_file(folder / "policy.json", file);
  const PolicyFile read = read_policy_file(folder / "policy.json");
  CHECK(read.cache.budget.heads == file.cache.budget.heads);
  CHECK(read.cache.budget.text() == "by head");
  CHECK(read.cache.budget.resolve(1000, 0) == 163);
  check_shape(read, kShape);
  const ResolvedConfig resolved = resolve(read.cache, 1000, 0, {2, 2});
  for (std::uint32_t i = 0; i < 4; ++i)
    CHECK(resolved.budget_of(i / 2, i % 2) == std::array{100u, 200u, 300u, 50u}[i]);
  CacheShape other = kShape;
  other.layers = 3;
  CHECK_THROWS_WITH(check_shape(read, other),
                    ContainsSubstring("2 layers x 2 KV heads") && ContainsSubstring("3 x 2"));
}

TEST_CASE("a policy file that could not run is refused with the file and the key") {
  REQUIRE(refusal([](json&) {}).empty());
  struct Bad {
    const char* pointer;
    json value;
    const char* says;
  };
  const Bad bad = GENERATE(values<Bad>({
      {"/format", 2, "format 2"},
      {"/policy", "h20", "did you mean 'h2o'"},
      {"/policy", "full", "evicts"},
      {"/policy", "oracle_attention", "unknown policy"},
      {"/policy", "h2o:sinks=1", "name of a policy"},
      {"/policy", 3, "policy"},
      {"/params/decay", 0.5, "params"},
      {"/protected/sinks", -1, "sinks"},
      {"/protected/sinks", "1:recent=2", "sinks"},
      {"/protected/sinks", 128, "below the budget"},
      {"/protected/recent", "120%", "recent"},
      {"/protected/prompt", 1, "prompt should be true"},
      {"/protected/recent", 125, "exceed the budget"},
      {"/protected/newest", 1, "protected"},
      {"/budget", 0, "at least 1"},
      {"/budget", -5, "budget"},
      {"/budget", "128", "budget"},
      {"/budget", nullptr, "reserved"},
      {"/budget", json::array(), "no layers"},
      {"/budget", {{1, 2}, {3}}, "budget[1]"},
      {"/budget", {{128, 3}}, "below the budget"},
      {"/positions", "mine", "positions"},
      {"/prefill", "later", "prefill"},
      {"/threshold", 2, "threshold"},
      {"/threshold", "x", "threshold"},
      {"/model", "tiny", "model"},
      {"/scope", "head", "reserved"},
      {"/posture", 1, "unknown key"},
      {"/modifiers", {{"evry", 4}}, "unknown modifier"},
      {"/modifiers", {{"every", 0}}, "at least 1"},
      {"/modifiers", {{"every", "4:once"}}, "every"},
      {"/modifiers", {{"pool", "max"}}, "smooth"},
      {"/modifiers", 3, "modifiers"},
  }));
  CAPTURE(bad.pointer, bad.value);
  const std::string message = refusal_with(bad.pointer, bad.value);
  CHECK_THAT(message, ContainsSubstring("policy.json") && ContainsSubstring(bad.says));
  CHECK(message.find('\n') == std::string::npos);
}

TEST_CASE("every key of a policy file except the record is required") {
  for (const char* key : {"format", "policy", "params", "protected", "budget", "positions",
                          "prefill", "threshold", "model"})
    CHECK_THAT(refusal([&](json& file) { file.erase(key); }), ContainsSubstring(key));
  CHECK(refusal([](json& file) { file.erase("run"); }).empty());
}

TEST_CASE("a model with other weights is named") {
  CHECK(model_mismatch(h2o_file(), "tiny", "fedcba9876543210").empty());
  CHECK_THAT(model_mismatch(h2o_file(), "small", "0000000000000000"),
             ContainsSubstring("tiny") && ContainsSubstring("small"));
}
