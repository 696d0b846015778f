// Budgets that differ between layers and heads: their syntax and their values.
#include "policies/budgets/budget.hpp"

#include <numeric>

#include "policies/cache_config.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"

using namespace kvlab;
using Catch::Matchers::ContainsSubstring;
using kvlab::test::error_of;

namespace {

std::string refusal(const std::string& policy, const Budget& budget, const CacheShape& model,
                    std::uint32_t length = 1000) {
  const CacheConfig config{.policy = parse_policy(policy), .budget = budget};
  return error_of<std::invalid_argument>([&] { resolve(config, length, 0, model); });
}

}  // namespace

TEST_CASE("a format with groups of 64 elements needs a head size of whole groups") {
  for (const char* tiers : {"int4_g64", "int2_g64", "16/int4_g64", "16@5t+int4_g64@100%"}) {
    const std::string policy = std::string("h2o:tiers=") + tiers;
    for (const std::uint32_t head_size : {32u, 96u})
      CHECK_THAT(refusal(policy, parse_budget("20"), {2, 2, head_size}),
                 ContainsSubstring("a multiple of 64, not " + std::to_string(head_size)));
    for (const std::uint32_t head_size : {64u, 128u, 256u}) {
      const CacheConfig config{.policy = parse_policy(policy), .budget = parse_budget("20")};
      CHECK_NOTHROW(resolve(config, 1000, 0, {2, 2, head_size}));
    }
  }
}

TEST_CASE("a budget reads back as it was written") {
  for (const char* text : {"128", "20%", "all", "pyramid(20%)", "pyramid(64)", "ada(12.5%)",
                           "ratio(0.5)", "ada(ratio(0.75))"})
    CHECK(parse_budget(text).text() == text);
  CHECK(parse_budget("pyramid(20%)").resolve(1000, 0) == 200);
  CHECK(parse_budget("all").resolve(1000, 0) == 1000);
  CHECK_FALSE(parse_budget("pyramid(20%)").is_even());
  CHECK(budget_of_heads({{1, 2}}, "b.json").text() == "@b.json");
}

TEST_CASE("a ratio is relative to the prompt, and counts as kvpress does") {
  const auto tokens = [](const char* text, std::uint32_t prompt) {
    return parse_budget(text).at_prompt(prompt).resolve(1'000'000, 0);
  };
  CHECK(tokens("ratio(0.5)", 1536) == 769);
  CHECK(tokens("ratio(0.9)", 1536) == 154);
  // kvpress keeps int(100 * (1 - 0.9)) tokens. In floating point this is 9. kvlab's budget is 10,
  // because it also counts the next token.
  CHECK(tokens("ratio(0.9)", 100) == 10);
  CHECK(tokens("ratio(0.99)", 10) == 2);
  CHECK(tokens("20%", 10) == 200'000);
  CHECK_THAT(error_of<std::invalid_argument>([] { parse_budget("ratio(1)"); }),
             ContainsSubstring("below ratio(1)"));
  CHECK_THAT(error_of<std::invalid_argument>([] { parse_budget("ratio(0.5)").resolve(9, 0); }),
             ContainsSubstring("budget ratio(0.5): depends on the length of a prompt"));
}

TEST_CASE("an allocator's mean is checked like any other budget") {
  const auto refused = [](const char* text) {
    return error_of<std::invalid_argument>([&] { parse_budget(text); });
  };
  CHECK_THAT(refused("pyramid(0)"), ContainsSubstring("budget: pyramid: '0' should be a whole"));
  CHECK_THAT(refused("pyramid(nan)"), ContainsSubstring("budget: pyramid: 'nan' should be"));
  CHECK_THAT(refused("ada(120%)"), ContainsSubstring("at most 100%"));
  CHECK_THAT(refused("pyramid(20%"), ContainsSubstring("should end in a )"));
  CHECK_THAT(refused("pyramid"), ContainsSubstring("budget: 'pyramid' should be"));
  CHECK_THAT(refused("cone(20%)"), ContainsSubstring("budget: 'cone(20%)' should be"));
}

TEST_CASE("PyramidKV's budgets fall linearly, and their mean is the given budget") {
  CHECK(pyramid_budgets(100, 10'000, 1, 5) == std::vector<std::uint32_t>{195, 148, 100, 52, 5});
  // The first layer gets at most as many tokens as there are, and the last layer at least as many
  // as its protected tokens need.
  CHECK(pyramid_budgets(100, 160, 1, 3) == std::vector<std::uint32_t>{160, 100, 40});
  CHECK(pyramid_budgets(100, 10'000, 20, 3) == std::vector<std::uint32_t>{180, 100, 20});
  CHECK(pyramid_budgets(100, 50, 1, 3) == std::vector<std::uint32_t>{100, 100, 100});
  CHECK(pyramid_budgets(7, 1000, 1, 1) == std::vector<std::uint32_t>{7});
  CHECK(pyramid_budgets(1, 1000, 1, 4) == std::vector<std::uint32_t>{1, 1, 1, 1});
  CHECK(pyramid_budgets(0x7fff'ffff, 0xffff'ffff, 1, 2).front() > 0x7fff'ffff);
  for (const std::uint32_t mean : {1u, 2u, 19u, 63u, 200u, 999u})
    for (const std::uint32_t layers : {1u, 2u, 7u, 30u, 32u})
      for (const std::uint32_t length : {1u, 64u, 300u, 5000u}) {
        const auto budgets = pyramid_budgets(mean, length, 1, layers);
        CHECK(std::accumulate(budgets.begin(), budgets.end(), std::uint64_t{0}) ==
              std::uint64_t{mean} * layers);
        CHECK(std::is_sorted(budgets.rbegin(), budgets.rend()));
        CHECK(budgets.back() >= 1);
        if (mean <= length) CHECK(budgets.front() <= length);
      }
}

TEST_CASE("the setting prompt keeps the first prompt in addition to every budget") {
  const auto requested = [](const std::string& policy, const std::string& budget) {
    return CacheConfig{.policy = parse_policy(policy), .budget = parse_budget(budget)};
  };
  const auto protected_tokens = [&](const std::string& policy) {
    const ResolvedConfig config = resolve(requested(policy, "20").at_prompt(30), 1000);
    CHECK(config.budget_tokens == 50);
    CHECK(config.requested_tokens == 20);  // without the prompt
    return std::pair(config.protected_tokens.sinks, config.protected_tokens.recent);
  };
  CHECK(protected_tokens("h2o:prompt") == std::pair(30u, 10u));
  CHECK(protected_tokens("lru:sinks=35:recent=10%:prompt") == std::pair(35u, 2u));
  CHECK(resolve(requested("lru:prompt", "ratio(0.5)").at_prompt(30), 1000).budget_tokens == 46);
  const ResolvedConfig own =
      resolve(requested("lru:prompt", "pyramid(20)").at_prompt(30), 99, 0, {3, 2});
  CHECK(own.head_budgets == HeadBudgets{{69, 69}, {50, 50}, {31, 31}});
  CHECK(own.requested_tokens == 20);
  CHECK(own.head_config(2, 0).protected_tokens.sinks == 30);
  CacheConfig exempt = requested("lru:prompt", "20");
  exempt.budget = budget_of_heads({{kNoBudget, kNoBudget}, {20, 9}});
  CHECK(resolve(exempt.at_prompt(30), 99, 0, {2, 2}).head_budgets ==
        HeadBudgets{{kNoBudget, kNoBudget}, {50, 39}});

  CHECK(parse_policy("h2o:prompt:every=4").text() == "h2o:sinks=0:recent=50%:prompt:every=4");
  CHECK(parse_policy("h2o:prompt").brief() == "h2o:prompt");
  const auto refused = [&](const std::string& policy, const std::string& budget) {
    return error_of<std::invalid_argument>([&] {
      resolve(requested(policy, budget).at_prompt(30), 99, 0, {2, 2, 64});
    });
  };
  CHECK(refused("h2o:prompt", "ada(20)") ==
        "policy h2o: prompt: ada() does not support it, because every head keeps the "
        "prompt");
  CHECK(refused("h2o:prompt:tiers=4", "20") ==
        "policy h2o: prompt: the prompt is kept in 16 bit; leave out the tier plan");
  CHECK(refused("snapkv:prompt", "20") ==
        "policy snapkv: with once, only the prompt's tokens are evicted, but prompt protects all "
        "of them; use once=no");
  CHECK(error_of<std::invalid_argument>([&] { resolve(requested("h2o:prompt", "20"), 99); }) ==
        "policy h2o: prompt: the prompt's length is not known here; use sinks=N");
}

TEST_CASE("each head has its own budget and protected tokens") {
  CacheConfig config{.policy = parse_policy("h2o:sinks=2"),
                     .budget = budget_of_heads({{8, 40}, {20, 4}})};
  const ResolvedConfig resolved = resolve(config, 1000, 3, {2, 2});
  CHECK(resolved.budget_tokens == 40);
  CHECK(resolved.protected_tokens.recent == 20);
  CHECK(resolved.budget.resolve(1000, 0) == 18);
  CHECK(resolved.budget_of(1, 1) == 4);
  const ResolvedConfig own = resolved.head_config(1, 0);
  CHECK(own.budget_tokens == 20);
  CHECK(own.protected_tokens.recent == 10);
  CHECK(own.protected_tokens.sinks == 2);
  CHECK(own.budget_of(1, 0) == 20);
  CHECK(own.sequence == 3);

  config.budget = budget_of_heads({{8}, {20}});
  CHECK(resolve(config, 1000, 0, {2, 3}).head_budgets == HeadBudgets{{8, 8, 8}, {20, 20, 20}});
  config.policy = parse_policy("sink");
  config.budget = parse_budget("pyramid(6)");
  CHECK(resolve(config, 1000, 0, {3, 1}).head_budgets == HeadBudgets{{7}, {6}, {5}});
  config.policy = parse_policy("full");
  CHECK(resolve(config, 1000).head_budgets.empty());
}

TEST_CASE("budgets by head that do not fit are refused") {
  CHECK_THAT(
      refusal("h2o", budget_of_heads({{8, 8}}, "b.json"), {2, 2}),
      ContainsSubstring("budget @b.json: budgets for 1 layers x 2 KV heads; the model has 2 x 2"));
  CHECK_THAT(refusal("h2o", budget_of_heads({{8, 8}, {8, 8}}), {2, 3}),
             ContainsSubstring("budget by head: budgets for 2 layers x 2 KV heads"));
  CHECK_THAT(refusal("sink", budget_of_heads({{8, 8}, {8, 4}}, "b.json"), {2, 2}),
             ContainsSubstring("budget @b.json: layer 1: policy sink: sinks=4 should be below"));
  CHECK_THAT(refusal("h2o", budget_of_heads({{8}}, "b.json"), {}),
             ContainsSubstring("the model is not known here"));
  CHECK_THAT(refusal("h2o", parse_budget("pyramid(8)"), {}),
             ContainsSubstring("the model is not known here"));
  CHECK_THAT(refusal("h2o:scope=layer", budget_of_heads({{8, 8}, {8, 9}}), {2, 2}),
             ContainsSubstring("layer 1 has budgets of 8 and 9 tokens"));
  CHECK(refusal("h2o:scope=layer", budget_of_heads({{8, 8}, {9, 9}}), {2, 2}).empty());
  CHECK_THAT(refusal("h2o:scope=layer", parse_budget("ada(8)"), {2, 2}),
             ContainsSubstring("budget ada(8): ada() divides a layer's slots"));
  CHECK(refusal("h2o", parse_budget("ada(8)"), {2, 2}).empty());
  const auto heads = [](HeadBudgets budgets) {
    return error_of<std::invalid_argument>([&] { budget_of_heads(std::move(budgets), "b.json"); });
  };
  CHECK(heads({}) == " holds no layers");
  CHECK_THAT(heads({{1, 2}, {3}}), ContainsSubstring("[1]: 1 numbers; layer 0 has 2"));
  CHECK_THAT(heads({{}, {}}), ContainsSubstring("[0]: 0 numbers"));
  CHECK_THAT(heads({{1, 2}, {3, 0}}), ContainsSubstring("[1][1]: should be a number of tokens"));
}
TEST_CASE("a budget in bytes can hold a quantized token even if a 16-bit token does not fit") {
  constexpr std::uint32_t kHead = 64;  // 256 bytes per token in 16 bits, 80 in 4 bits
  const auto resolved = [](const char* policy, const char* budget) {
    return resolve({.policy = parse_policy(policy), .budget = parse_budget(budget)}, 99, 0,
                   {1, 1, kHead})
        .budget_tokens;
  };
  CHECK(resolved("h2o:tiers=4", "80B") == 1);
  CHECK(resolved("h2o:tiers=4", "100B") == 1);
  CHECK(resolved("h2o:tiers=2", "200B") == 4);
  CHECK(resolved("h2o:tiers=4", "1%bytes") == 3);
  CHECK_THROWS_WITH(resolved("h2o:tiers=4", "79B"),
                    "budget 79B: is less than one token, which takes 80 bytes on the cheapest tier "
                    "(256 in 16 bit); give at least 80B");
  CHECK_THROWS_WITH(
      resolved("h2o", "100B"),
      "budget 100B: is less than one token, which takes 256 bytes; give at least 256B");
  CHECK_THROWS_WITH(resolved("h2o:tiers=16@1t+4@100%", "100B"),
                    ContainsSubstring("100 bytes are too few for one token on its first tier"));
  // Budgets that differ between heads count tokens of 16 bits.
  CHECK_THROWS_WITH(resolved("h2o:tiers=4", "pyramid(100B)"),
                    ContainsSubstring("less than one token, which takes 256 bytes"));
}
