// The decoder's evictions against the simulator's, on the bundled model.
#include "engine/loop/verify.hpp"

#include "engine/tokenizer/tokenizer.hpp"
#include "policies/executor.hpp"
#include "policies/observation.hpp"
#include "policies/ops/make_ops.hpp"
#include "tests/catch.hpp"
#include "tests/conformance.hpp"
#include "tests/policies/leaky.hpp"
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
  INFO(test::text_of(options));
  const VerifyReport report =
      verify_decoder(backend, options, turns, {.temperature = 1, .seed = 5}, {.threads = 2});
  CHECK(report.identical);
  CHECK(report.first_difference == "");
  CHECK(report.worst_mass <= 1e-5);
  CHECK(report.wrong_requests == 0);
  // A near tie. Heads that share slots part by one of another head, which moves their budgets.
  for (const Parting& parting : report.partings)
    CHECK((parting.margin <= 1e-5 || options.shares_slots()));
  CHECK(report.heads == 8);
  if (options.policy.entry->info.evicts) CHECK(report.evictions > 0);
  if (options.policy.entry->info.needs != Needs::nothing) CHECK(report.observations > 0);
}

TEST_CASE("The engine and the simulator evict the same tokens, whatever is asked for") {
  const auto backend = load_backend(Device::cpu, kModel, 2);
  const CacheShape heads = backend->config().heads();
  test::Choices choices{
      .beside = {"column:name=key_norm", "column:name=value_norm", "column:name=value_norm1",
                 "column:name=key_cosine", "column:name=value_out_norm1", "lru:prompt",
                 "vatp*key_norm"},
      .ladders = {"", "16@12t+8@30%+4@70%", "4", "fp8@50%+k4v2@50%", "8@25%+4@50%+2@25%"},
      .budgets = test::budgets_about(36, heads)};
  choices.budgets.push_back(parse_budget("10%bytes"));
  const auto turns = two_turns(60);
  check(*backend, resolve({}, 300), turns);
  for (const CacheConfig& config : test::covering(choices, &kDecoder, 300, heads))
    check(*backend, resolve(config.at_prompt(81), 300, 0, heads), turns);
}

TEST_CASE("A decoder refuses a column that it cannot compute") {
  const auto backend = load_backend(Device::cpu, kModel, 2);
  const ResolvedConfig options =
      resolve({.policy = parse_policy("column:name=mine"), .budget = {.extent = tokens(32)}}, 32);
  CHECK_THROWS_WITH(
      verify_decoder(*backend, options, two_turns(4), {}, {}),
      "policy column: column mine: a decoder computes key_norm, value_norm, "
      "value_norm1, key_cosine, value_out_norm1, lagkv, expected_attention, "
      "redundancy and no other; a replay reads it from a trace, the closed loop on the CPU by "
      "--columns");
}

TEST_CASE("A policy that needs mass and requests is verified by both") {
  const auto backend = load_backend(Device::cpu, kModel, 2);
  const CompiledPolicies compiled{
      std::make_shared<const PolicyEntry>(PolicyEntry{make_ops<Leaky>()})};
  for (const Prefill prefill : {Prefill{0}, Prefill{16}, Prefill{1}})
    check(*backend, cache(*compiled.entries[0], 32, prefill, Positions::original, compiled),
          two_turns(40));
}

}  // namespace
}  // namespace kvlab
