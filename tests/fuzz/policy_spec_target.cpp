// Input: command-line values, one per line: a policy, a budget, prefill, positions and a tier plan.
// Accepted input parses back to itself, and it can be resolved for any length.
#include "policies/cache_config.hpp"
#include "policies/catalogue.hpp"
#include "sim/replay.hpp"
#include "tests/fuzz/fuzz.hpp"
#include "traces/base/text.hpp"

using namespace kvlab;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::string> lines = split_list(fuzz::text_of(data, size), '\n');
  lines.resize(5);
  CacheConfig config;
  const bool has_policy = fuzz::accepts([&] {
    config.policy = parse_policy(lines[0], replay_oracles());
    const std::string text = config.policy.text();
    if (config.policy.entry)
      fuzz::require(parse_policy(text).text() == text, "a policy that reads otherwise:", text);
  });
  const bool has_budget = fuzz::accepts([&] {
    config.budget = parse_budget(lines[1]);
    const std::string text = config.budget.text();
    fuzz::require(parse_budget(text).text() == text, "a budget that reads otherwise:", text);
  });
  fuzz::accepts([&] { config.prefill = parse_prefill(lines[2]); });
  fuzz::accepts([&] { config.positions = parse_positions(lines[3]); });
  fuzz::accepts([&] {
    const TierPlan tier_plan = parse_tier_plan(lines[4]);
    fuzz::require(parse_tier_plan(tier_plan.text()) == tier_plan,
                  "a tier plan that reads otherwise:", lines[4]);
    for (const std::uint64_t bytes : {1ull, 4096ull, ~0ull}) {
      unsigned __int128 held = 0;
      for (const TierSlots& tier : tier_plan.slots(bytes, 2))
        held += static_cast<unsigned __int128>(tier.slots) * tier.format.block_bytes() * 2;
      fuzz::require(held <= bytes, "a tier plan with more bytes than its budget:", lines[4]);
    }
  });
  if (!has_policy || !has_budget || !config.policy.entry) return 0;
  for (const std::uint32_t length : {1u, 1000u, 0x7fff'ffffu})
    fuzz::accepts([&] {
      const CacheShape model{3, 2, 64};
      const ResolvedConfig resolved = resolve(config, length, 0, model);
      for (std::uint32_t layer = 0; layer < model.layers; ++layer) resolved.head_config(layer, 1);
    });
  return 0;
}
