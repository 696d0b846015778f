// Compares kvlab_read_policy_file with the reader of `kvlab generate --policy-file`. Needs no
// device.
#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/evaluation/policy_file.hpp"
#include "kernels/kvlab.h"
#include "tests/catch.hpp"
#include "tests/traces/temporary_folder.hpp"

using namespace kvlab;
using namespace kvlab::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// The result of reading a policy.json through the library, for two layers of three KV heads.
struct ReadFile {
  std::array<kvlab_rule, 6> rules{};
  kvlab_policy_file file{.struct_size = sizeof(kvlab_policy_file)};
  std::string said;

  explicit ReadFile(const std::string& text) {
    const TemporaryFolder folder;
    write_bytes(folder / "policy.json", text);
    file.layers = 2, file.kv_heads = 3, file.tokens = 1000, file.rules = rules.data();
    const cudaError_t error = kvlab_read_policy_file((folder / "policy.json").c_str(), &file);
    CHECK((error == cudaErrorInvalidValue) == (file.policy == nullptr));
    const std::string all = kvlab_last_error();
    const auto at = all.find("policy.json: ");
    said = at == std::string::npos ? all : all.substr(at + 13);
  }
};

/// A policy.json with changes to some keys.
std::string policy_json(const std::string& changes = "{}") {
  nlohmann::json file = nlohmann::json::parse(R"({
    "format": 1, "policy": "a2sf", "params": {"keep": 0.75},
    "protected": {"sinks": 4, "recent": "25%"}, "budget": 64, "positions": "original",
    "prefill": "dense", "threshold": 0.01, "seed": 7,
    "model": {"name": "tiny", "weights_xxh3": ""}, "run": {"metric": "kl_estimate"}})");
  file.merge_patch(nlohmann::json::parse(changes));
  return file.dump();
}

}  // namespace

TEST_CASE("The library reads a policy.json as the engine does") {
  const std::string changed[]{
      "{}",
      R"({"budget": [[16, 20, 24], [32, 36, 40]], "positions": "cache", "prefill": "chunk:32"})",
      R"j({"budget": "pyramid(64)", "modifiers": {"every": 8, "smooth": 3, "pool": "max"}})j",
      R"({"budget": [64, null], "modifiers": {"once": true, "group": "max"}, "seed": null})",
      R"({"policy": "feature", "params": {"keep": -1, "name": "mine"}, "prefill": "stream",
          "modifiers": {"scope": "layer"}})",
      R"({"policy": "snapkv", "params": {"keep": null, "window": 32}})",
      R"({"policy": "nacl", "params": {"keep": null, "proxy": 16, "random": 0.25}})",
      R"({"protected": null, "guards": {"sinks": 2, "recent": 7}})"};
  for (const std::string& changes : changed) {
    CAPTURE(changes);
    const std::string text = policy_json(changes);
    const ReadFile read(text);
    REQUIRE(read.said.empty());
    const TemporaryFolder folder;
    write_bytes(folder / "policy.json", text);
    const ResolvedConfig ours =
        resolve(read_policy_file(folder / "policy.json").cache, 1000, 0, {2, 3, 64});
    const kvlab_policy_file& file = read.file;
    CHECK(file.policy == kvlab_find_policy(ours.policy.name.c_str()));
    CHECK(std::vector(file.params, file.params + file.param_count) == ours.policy.params);
    CHECK(ours.policy.named_feature() == file.feature);
    CHECK((file.numbering == KVLAB_CACHE_POSITIONS) == (ours.positions == Positions::cache));
    CHECK(file.prefill_chunk == ours.prefill.chunk);
    CHECK(file.threshold16 == ours.threshold16());
    CHECK(file.seed == ours.seed);
    const Modifiers& modifiers = ours.policy.modifiers;
    CHECK(file.every == modifiers.every);
    CHECK((file.once != 0) == modifiers.once);
    CHECK(file.smooth == modifiers.smooth);
    CHECK((file.pool_max != 0) == (modifiers.pool == Modifiers::Pool::max));
    CHECK((file.by_layer != 0) == (modifiers.scope == Modifiers::Scope::layer));
    for (std::uint32_t at = 0; at < 6; ++at) {
      const ResolvedConfig head = ours.head_config(at / 3, at % 3);
      const kvlab_rule& rule = read.rules[at];
      CHECK(rule.budget == head.budget_tokens);
      CHECK(rule.sinks == head.protected_tokens.sinks);
      CHECK(rule.recent == head.protected_tokens.recent);
      CHECK((rule.group_max != 0) == (modifiers.group == Modifiers::Group::max));
    }
  }
}

TEST_CASE("The library says in one line which part of a policy.json it cannot represent") {
  const auto said = [](const std::string& changes) { return ReadFile(policy_json(changes)).said; };
  CHECK_THAT(said(R"({"tiers": "8"})"), ContainsSubstring("key \"tiers\" is not known"));
  CHECK_THAT(said(R"j({"budget": "ada(64)"})j"),
             ContainsSubstring("should be tokens, a list of tokens, or pyramid(TOKENS)"));
  CHECK_THAT(said(R"({"protected": {"prompt": true}})"), ContainsSubstring("prompt"));
  CHECK_THAT(said(R"({"source": {"path": "my.hpp", "xxh3": "0"}})"),
             ContainsSubstring("kvlab_compile_policy"));
  CHECK_THAT(said(R"({"policy": "full"})"), ContainsSubstring("a policy of the library"));
  CHECK_THAT(said(R"({"params": {"keep": 2}})"), ContainsSubstring("in its range"));
  CHECK_THAT(said(R"({"params": {"other": 2}})"),
             ContainsSubstring("exactly the 1 parameters of a2sf"));
  CHECK_THAT(said(R"({"budget": 4})"), ContainsSubstring("at least 5 tokens"));
  CHECK_THAT(said(R"({"budget": [64, 64, 64]})"), ContainsSubstring("layers"));
  CHECK_THAT(said(R"({"prefill": "chunk:0"})"), ContainsSubstring("chunk:N"));
  CHECK_THAT(said(R"({"format": 2})"), ContainsSubstring("format"));
  CHECK(ReadFile("{").file.policy == nullptr);
  kvlab_policy_file file{};
  CHECK(kvlab_read_policy_file("policy.json", &file) == cudaErrorInvalidValue);
  CHECK(kvlab_last_error() == std::string("kvlab_read_policy_file: struct_size is 0; it should be "
                                          "the sizeof of the struct, 280 in kvlab.h 0.6"));
}
