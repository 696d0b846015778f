// What each executor of the rule refuses, and in which words.
#include "policies/executor.hpp"

#include <fmt/format.h>

#include "tests/catch.hpp"

using namespace kvlab;

namespace {

CacheConfig asked(const std::string& policy, const std::string& budget = "20%") {
  return {.policy = parse_policy(policy), .budget = parse_budget(budget)};
}

constexpr Executor kPlain{.name = "an engine", .instead = "--device cpu"};

}  // namespace

TEST_CASE("Every executor runs what has no more than bursts, smoothing and guards") {
  for (const Executor& executor : {kPlain, kDecoder, kCudaDecoder, kCudaLoop, kCudaReplay})
    for (const char* policy : {"full", "h2o:every=64", "lru:once:smooth=3:pool=max:sinks=4"})
      CHECK(refusal(executor, asked(policy)) == "");
}

TEST_CASE("An executor refuses what it does not know, in one line that names it and who does") {
  CHECK(refusal(kPlain, asked("h2o", "ada(20%)")) ==
        "budget ada(20%): an engine does not know it; --device cpu does");
  CHECK(refusal(kPlain, asked("h2o", "pyramid(64)")) ==
        "budget pyramid(64): an engine does not know budgets by head; --device cpu does");
  CHECK(refusal(kPlain, asked("h2o:every=64:scope=layer")) ==
        "policy h2o: an engine does not know scope=layer; --device cpu does");
  CHECK(refusal(kCudaLoop, asked("h2o*value_norm")) ==
        "policy h2o*value_norm: the closed loop on CUDA does not know products; --device cpu does");
  CHECK(refusal(kPlain, asked("h2o:group=max")) ==
        "policy h2o: an engine does not know group=max; --device cpu does");
  CHECK(refusal(kPlain, asked("knorm")) ==
        "policy knorm: an engine does not know its column key_norm; --device cpu does");
  for (const char* policy : {"h2o:scope=layer", "h2o:group=max", "knorm", "column:name=key_cosine"})
    for (const char* budget : {"64", "pyramid(64)"})
      CHECK(refusal(kDecoder, asked(policy, budget)) == "");
  CHECK(refusal(kDecoder, asked("h2o", "ada(64)")) == "");
}

TEST_CASE("KIVI runs in the replay and the closed loop on the CPU alone") {
  CHECK(refusal(kLoop, asked("full:ladder=kivi2")) == "");
  CHECK(
      refusal(kDecoder, asked("full:ladder=kivi2")) ==
      "policy full: ladder kivi2: a decoder codes no channels; a replay and the closed loop on the "
      "CPU do");
  CHECK(refusal(kCudaReplay, asked("full:ladder=kivi2")) != "");
}

TEST_CASE("A device refuses a plan of too many tiers by the policy's name; the CPU runs it") {
  const auto plan = [](std::size_t tiers) {
    std::string text = "h2o:ladder=";
    for (std::size_t t = 1; t < tiers; ++t) text += "16@4t+";
    return text + "4@100%";
  };
  for (const Executor& executor : {kCudaDecoder, kKernelLibrary, kCudaLoop, kCudaReplay}) {
    CHECK(refusal(executor, asked(plan(kMaxDeviceTiers))) == "");
    const std::string why = refusal(executor, asked(plan(kMaxDeviceTiers + 1)));
    CHECK(why.starts_with("policy h2o: ladder 16:4t,"));
    CHECK(why.ends_with(fmt::format("has 9 tiers, and {} holds at most 8; {} holds 16",
                                    executor.name, executor.instead)));
  }
  CHECK(refusal(kDecoder, asked(plan(kMaxTiers))) == "");
}

TEST_CASE("Layers that a budget exempts are run on the CPU alone") {
  CacheConfig config = asked("h2o");
  config.budget = budget_of_heads({{8}, {kNoBudget}}, "b.json");
  CHECK(refusal(kDecoder, config) == "");
  for (const Executor& executor : {kCudaDecoder, kKernelLibrary, kCudaLoop, kCudaReplay})
    CHECK(refusal(executor, config) ==
          fmt::format("budget @b.json: {} does not know exempt layers; {} does", executor.name,
                      executor.instead));
}

TEST_CASE("Who runs no trace refuses columns that only a trace has, and references") {
  for (const Executor& executor : {kPlain, kDecoder})
    CHECK(refusal(executor, asked("column:name=mine")) ==
          "policy column: column mine: a decoder computes key_norm, value_norm, value_norm1, "
          "key_cosine, value_out_norm1, lagkv, expected_attention, redundancy and no other; a "
          "replay reads it from a trace, the closed loop on the CPU by --columns");
  for (const char* policy : {"lagkv", "expected_attention", "r_kv"}) {
    for (const Executor& executor : {kDecoder, kLoop, kCudaReplay})
      CHECK(refusal(executor, asked(policy)) == "");
    CHECK_THAT(refusal(kCudaDecoder, asked(policy)),
               Catch::Matchers::StartsWith(std::string("policy ") + policy +
                                           ": the CUDA decoder does not know its column "));
    CHECK(refusal(kCudaLoop, asked(policy)) != "");
    CHECK(refusal(kKernelLibrary, asked(policy)) != "");
  }
  const std::string_view references[]{"oracle_mass"};
  CHECK(refusal(kDecoder, {.policy = parse_policy("oracle_mass", references)}) ==
        "policy oracle_mass is a reference of the replay; a decoder needs a policy");
}

TEST_CASE("Caches of one policy, its columns and one kind of positions are held side by side") {
  const CacheConfig one = asked("column:name=key_norm");
  CHECK(side_by_side(one, asked("column:name=key_norm:keep=-1:every=16", "pyramid(64)")));
  CHECK(!side_by_side(one, asked("column:name=value_norm")));
  CHECK(!side_by_side(one, asked("knorm")));
  CacheConfig squeezed = one;
  squeezed.positions = Positions::cache;
  CHECK(!side_by_side(one, squeezed));
}

TEST_CASE("Budgets by head are refused where they are not those of the model") {
  ResolvedConfig config = resolve(asked("h2o", "64"), 100);
  config.head_budgets = {{32, 64}, {64}};
  CHECK_THROWS_WITH(check_held(kDecoder, config, {.layers = 2, .kv_heads = 2}),
                    "budgets: 3 given; 2 layers of 2 KV heads need 4");
  config.head_budgets[1].push_back(48);
  CHECK_NOTHROW(check_held(kDecoder, config, {.layers = 2, .kv_heads = 2}));
}
