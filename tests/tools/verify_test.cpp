// The decoder's evictions against the simulator's, on the bundled model.
#include "engine/loop/verify.hpp"

#include "engine/tokenizer/tokenizer.hpp"
#include "policies/executor.hpp"
#include "policies/observation.hpp"
#include "policies/ops/make_ops.hpp"
#include "tests/catch.hpp"
#include "tests/policies/leaky.hpp"
#include "tests/policies/unmodified.hpp"
#include "traces/base/safetensors.hpp"

namespace kvlab {
namespace {

const std::string kModel = KVLAB_SOURCE_DIR "/engine/models/tiny";

std::vector<VerifyTurn> two_turns(std::uint32_t decode_tokens) {
  const Tokenizer tokenizer = Tokenizer::load(kModel + "/tokenizer.json");
  const std::string text = read_text_file(KVLAB_SOURCE_DIR "/tools/demo/prompt.txt", 1 << 20);
  const std::vector<std::int32_t> ids = tokenizer.encode(text, false);
  REQUIRE(ids.size() >= 130);
  std::vector<std::int32_t> first{0}, second(ids.begin() + 80, ids.begin() + 130);
  first.insert(first.end(), ids.begin(), ids.begin() + 80);
  return {{first, decode_tokens}, {second, decode_tokens / 2}};
}

ResolvedConfig cache(const PolicyEntry& entry, std::uint32_t budget, Prefill prefill,
                     Positions positions, const CompiledPolicies& compiled = nullptr) {
  return resolve({.policy = parse_policy(entry.info.name, {}, compiled),
                  .budget = {.extent = tokens(budget)},
                  .prefill = prefill,
                  .positions = positions,
                  .seed = 11},
                 budget);
}

void check(Backend& backend, const ResolvedConfig& options, const std::vector<VerifyTurn>& turns) {
  INFO(options.policy.text() << " prefill " << options.prefill.text() << " positions "
                             << name_of(options.positions));
  const VerifyReport report =
      verify_decoder(backend, options, turns, {.temperature = 1, .seed = 5}, {.threads = 2});
  CHECK(report.identical);
  CHECK(report.first_difference == "");
  CHECK(report.worst_mass <= 1e-5);
  CHECK(report.wrong_requests == 0);
  CHECK(report.partings.size() == 0);
  CHECK(report.heads == 8);
  if (options.policy.entry->info.evicts) CHECK(report.evictions > 0);
  if (options.policy.entry->info.needs != Needs::nothing) CHECK(report.observations > 0);
}

TEST_CASE("Every policy: the engine and the simulator evict the same tokens, in every mode") {
  const auto backend = load_backend(Device::cpu, kModel, 2);
  const auto turns = two_turns(60);
  for (const PolicyEntry& entry : policy_catalogue())
    for (const Prefill prefill : {Prefill{0}, Prefill{16}, Prefill{1}})
      for (const Positions positions : {Positions::original, Positions::cache}) {
        if (!column_beyond(kDecoder, parse_policy(entry.info.name)).empty()) continue;
        ResolvedConfig options = cache(entry, 40, prefill, positions);
        check(*backend, options, turns);
        if (options.policy.modifiers == Modifiers{}) continue;
        options.policy = parse_policy(test::unmodified(entry.info.name));
        check(*backend, options, turns);
      }
}

TEST_CASE("Columns in the engine are those of its keys and values, bit for bit") {
  const auto backend = load_backend(Device::cpu, kModel, 2);
  for (const std::string column :
       {"key_norm", "value_norm", "value_norm1", "key_cosine", "value_out_norm1"})
    for (const Prefill prefill : {Prefill{0}, Prefill{16}}) {
      ResolvedConfig options =
          cache(*parse_policy("column").entry, 32, prefill, Positions::original);
      options.policy = parse_policy("column:name=" + column);
      check(*backend, options, two_turns(20));
    }
}

TEST_CASE("A decoder refuses a column that it cannot compute") {
  const auto backend = load_backend(Device::cpu, kModel, 2);
  const ResolvedConfig options =
      cache(*parse_policy("lagkv").entry, 32, Prefill{0}, Positions::original);
  CHECK_THROWS_WITH(verify_decoder(*backend, options, two_turns(4), {}, {}),
                    "policy lagkv: column lagkv: a decoder computes key_norm, value_norm, "
                    "value_norm1, key_cosine, value_out_norm1 "
                    "and no other; a replay reads it from a trace");
}

TEST_CASE("Bursts, compression of prompts, layers and groups: the same tokens in every mode") {
  const auto backend = load_backend(Device::cpu, kModel, 2);
  const auto turns = two_turns(70);
  for (const std::string modifiers : {":every=64", ":once:smooth=2", ":smooth=3:pool=max:every=8",
                                      ":scope=layer", ":every=64:scope=layer:smooth=1"})
    for (const std::string policy : {"h2o", "lru", "window", "h2o:group=max"})
      for (const Prefill prefill : {Prefill{0}, Prefill{16}})
        for (const Positions positions : {Positions::original, Positions::cache}) {
          ResolvedConfig options = cache(*parse_policy(policy).entry, 32, prefill, positions);
          options.policy = parse_policy(policy + modifiers);
          check(*backend, options, turns);
        }
}

TEST_CASE("A policy that needs mass and requests is verified by both") {
  const auto backend = load_backend(Device::cpu, kModel, 2);
  const CompiledPolicies compiled{
      std::make_shared<const PolicyEntry>(PolicyEntry{make_ops<Leaky>()})};
  for (const Prefill prefill : {Prefill{0}, Prefill{16}, Prefill{1}})
    check(*backend, cache(*compiled.entries[0], 32, prefill, Positions::original, compiled),
          two_turns(40));
}

TEST_CASE("Budgets by layer and KV head are verified head by head") {
  const auto backend = load_backend(Device::cpu, kModel, 2);
  const auto turns = two_turns(40);
  HeadBudgets heads;
  for (std::uint32_t i = 0; i < 4; ++i) heads.push_back({16 + 8 * i, 20 + 8 * i});
  for (const Budget& budget :
       {budget_of_heads(heads), parse_budget("pyramid(32)"), parse_budget("ada(32)")})
    for (const char* policy : {"h2o", "lru:sinks=2", "random"})
      for (const Positions positions : {Positions::original, Positions::cache})
        check(*backend,
              resolve({.policy = parse_policy(policy),
                       .budget = budget,
                       .prefill = {policy == std::string("random") ? 16u : 0u},
                       .positions = positions},
                      200, 0, backend->config().heads()),
              turns);
}

}  // namespace
}  // namespace kvlab
