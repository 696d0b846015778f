// Tests which settings each executor of the eviction rule refuses, and with which messages.
#include "policies/executor.hpp"

#include <fmt/format.h>

#include <set>
#include <string>
#include <string_view>

#include "tests/catch.hpp"

using namespace kvlab;

namespace {

CacheConfig requested(const std::string& policy, const std::string& budget = "20%") {
  return {.policy = parse_policy(policy), .budget = parse_budget(budget)};
}

constexpr Executor kPlain{.name = "an engine", .instead = "--device cpu"};

}  // namespace

TEST_CASE("Every executor supports all modifiers, protected tokens, tiers and budgets by head") {
  for (const Executor& executor : {kPlain, kDecoder, kEvaluation, kCudaDecoder, kKernelLibrary,
                                   kCudaEvaluation, kCudaReplay}) {
    for (const char* policy :
         {"full", "h2o:every=64", "lru:once:smooth=3:pool=max:sinks=4", "h2o:every=64:scope=layer",
          "h2o:group=max", "h2o:tiers=16@4t+4@100%"})
      CHECK(refusal(executor, requested(policy)) == "");
    CHECK(refusal(executor, requested("h2o", "pyramid(64)")) == "");
  }
}

TEST_CASE(
    "An executor refuses an unsupported setting in one line that names it and a supporting "
    "executor") {
  CHECK(refusal(kPlain, requested("h2o", "ada(20%)")) ==
        "budget ada(20%): an engine does not support it; --device cpu does");
  CHECK(refusal(kCudaEvaluation, requested("h2o*value_norm")) ==
        "policy h2o*value_norm: runs on the CPU only, because it is a product with a feature; use "
        "--device cpu");
  CHECK(refusal(kCudaDecoder, requested("sieve")) ==
        "policy sieve: runs on the CPU only, because its hooks know the eviction order; use "
        "--device cpu");
  CHECK(cpu_only("--draft") == "--draft: runs on the CPU only; use --device cpu");
  CHECK(refusal(kPlain, requested("knorm")) ==
        "policy knorm: an engine does not support its feature key_norm; --device cpu does");
  for (const char* policy :
       {"h2o:scope=layer", "h2o:group=max", "knorm", "feature:name=key_cosine"})
    for (const char* budget : {"64", "pyramid(64)"})
      CHECK(refusal(kDecoder, requested(policy, budget)) == "");
  CHECK(refusal(kDecoder, requested("h2o", "ada(64)")) == "");
}

TEST_CASE("Decoders centre keys; other executors on a device refuse the setting by name") {
  const CacheConfig config = requested("h2o:tiers=4:centre=prompt");
  CHECK(refusal(kEvaluation, config) == "");
  CHECK(refusal(kDecoder, config) == "");
  CHECK(refusal(kCudaDecoder, config) == "");
  CHECK(refusal(kCudaReplay, config) ==
        "policy h2o: centre: the CUDA replay does not centre keys; --device cpu does");
  for (const Executor& executor : {kCudaReplay, kCudaEvaluation, kKernelLibrary})
    CHECK(refusal(executor, config).starts_with("policy h2o: centre: "));
  const CacheConfig of_file = requested("h2o:tiers=4:centre=@c.safetensors");
  CHECK(refusal(kEvaluation, of_file) == "");
  CHECK(refusal(kDecoder, of_file) == "");
  CHECK(refusal(kCudaDecoder, of_file) == "");
  for (const Executor& executor : {kCudaReplay, kCudaEvaluation, kKernelLibrary})
    CHECK(refusal(executor, of_file).starts_with("policy h2o: centre: "));
}

TEST_CASE("Executors on a device refuse formats that the kernels do not have, by name") {
  const CacheConfig config = requested("h2o:tiers=q8_0/q4_0");
  CHECK(refusal(kEvaluation, config) == "");
  CHECK(refusal(kDecoder, config) == "");
  CHECK(refusal(kCudaDecoder, config) ==
        "policy h2o: tiers q8_0/q4_0: runs on the CPU only, because CUDA devices do not support "
        "format q8_0/q4_0; use --device cpu");
  for (const Executor& executor : {kCudaReplay, kCudaEvaluation, kKernelLibrary})
    for (const char* format : {"8/4", "16@50%+q4_1@50%"})
      CHECK(refusal(executor, requested(std::string("h2o:tiers=") + format)) != "");
  const std::set<std::string_view> on_device = {"16", "fp8", "8", "4", "2"};
  for (const Executor& executor : {kCudaReplay, kCudaEvaluation, kCudaDecoder, kKernelLibrary})
    for (const RowFormat& format : kRowFormats) {
      const std::string refused =
          refusal(executor, requested(fmt::format("h2o:tiers={}", format.name)));
      INFO(executor.name << ": " << format.name << ": " << refused);
      CHECK(refused.empty() == on_device.contains(format.name));
      CHECK((refused.empty() ||
             refused.find(fmt::format("do not support format {};", format.name)) != refused.npos));
    }
  for (const char* format : {"4/2", "16", "2", "fp8@50%+k4v2@50%"})
    CHECK(refusal(kCudaDecoder, requested(std::string("h2o:tiers=") + format)) == "");
}

TEST_CASE("Decoders support formats by layer; other executors on a device refuse them by name") {
  const CacheConfig config = requested("h2o:tiers=8x2-4/2x3");
  for (const Executor& executor : {kEvaluation, kDecoder, kCudaDecoder, kKernelLibrary})
    CHECK(refusal(executor, config) == "");
  CHECK(refusal(kCudaEvaluation, config) ==
        "policy h2o: tiers 8x2-k4v2x3: the end-to-end evaluation on CUDA does not support formats "
        "by layer; --device cpu does");
  CHECK(refusal(kCudaReplay, config) != "");
}

TEST_CASE("Decoders on a device refuse smooth on several tiers if each step evicts") {
  const std::string plan = ":tiers=16@4t+4@100%:smooth=2";
  CHECK(refusal(kCudaDecoder, requested("h2o" + plan)) ==
        "policy h2o: smooth=2: the CUDA decoder does not support it on several tiers without every "
        "above 1, once or scope=layer; --device cpu does");
  for (const Executor& executor : {kKernelLibrary, kCudaEvaluation})
    CHECK(refusal(executor, requested("h2o" + plan)) != "");
  for (const Executor& executor : {kDecoder, kEvaluation, kCudaReplay})
    CHECK(refusal(executor, requested("h2o" + plan)) == "");
  for (const char* other : {":every=2", ":once", ":scope=layer"})
    CHECK(refusal(kCudaDecoder, requested("h2o" + plan + other)) == "");
  CHECK(refusal(kCudaDecoder, requested("h2o:tiers=4:smooth=2")) == "");
}

TEST_CASE("KIVI runs only in the replay and the end-to-end evaluation on the CPU") {
  CHECK(refusal(kEvaluation, requested("full:tiers=kivi2")) == "");
  CHECK(refusal(kDecoder, requested("full:tiers=kivi2")) ==
        "policy full: tiers kivi2: a decoder does not quantize by channel; a replay and the "
        "end-to-end evaluation on the "
        "CPU do");
  CHECK(refusal(kCudaReplay, requested("full:tiers=kivi2")) != "");
}

TEST_CASE("A device refuses a plan of too many tiers by the policy's name; the CPU runs it") {
  const auto plan = [](std::size_t tiers) {
    std::string text = "h2o:tiers=";
    for (std::size_t t = 1; t < tiers; ++t) text += "16@4t+";
    return text + "4@100%";
  };
  for (const Executor& executor : {kCudaDecoder, kKernelLibrary, kCudaEvaluation, kCudaReplay}) {
    CHECK(refusal(executor, requested(plan(kMaxDeviceTiers))) == "");
    const std::string why = refusal(executor, requested(plan(kMaxDeviceTiers + 1)));
    CHECK(why.starts_with("policy h2o: tiers 16:4t,"));
    CHECK(why.ends_with(fmt::format("has 9 tiers, but {} supports at most 8; {} supports 16",
                                    executor.name, executor.instead)));
  }
  CHECK(refusal(kDecoder, requested(plan(kMaxTiers))) == "");
}

TEST_CASE("Layers that a budget exempts run only on the CPU") {
  CacheConfig config = requested("h2o");
  config.budget = budget_of_heads({{8}, {kNoBudget}}, "b.json");
  CHECK(refusal(kDecoder, config) == "");
  for (const Executor& executor : {kCudaDecoder, kKernelLibrary, kCudaEvaluation, kCudaReplay})
    CHECK(refusal(executor, config) ==
          fmt::format("budget @b.json: runs on the CPU only, because it exempts layers; use {}",
                      executor.instead));
}

TEST_CASE("Executors without a trace refuse trace features and oracles") {
  for (const Executor& executor : {kPlain, kDecoder})
    CHECK(
        refusal(executor, requested("feature:name=mine")) ==
        "policy feature: feature mine: a decoder computes only key_norm, value_norm, value_norm1, "
        "key_cosine, value_out_norm1, lagkv, expected_attention, redundancy; a replay reads other "
        "features from a trace, and the end-to-end evaluation on the CPU from --features");
  for (const char* policy : {"lagkv", "expected_attention", "r_kv"}) {
    for (const Executor& executor : {kDecoder, kEvaluation, kCudaReplay})
      CHECK(refusal(executor, requested(policy)) == "");
    CHECK_THAT(refusal(kCudaDecoder, requested(policy)),
               Catch::Matchers::StartsWith(std::string("policy ") + policy +
                                           ": the CUDA decoder does not support its feature "));
    CHECK(refusal(kCudaEvaluation, requested(policy)) != "");
    CHECK(refusal(kKernelLibrary, requested(policy)) != "");
  }
  const std::string_view oracles[]{"oracle_attention"};
  CHECK(refusal(kDecoder, {.policy = parse_policy("oracle_attention", oracles)}) ==
        "policy oracle_attention is an oracle, which only the replay supports; a decoder needs a "
        "policy");
}

TEST_CASE("Caches with the same policy, features and positions can run side by side") {
  const CacheConfig one = requested("feature:name=key_norm");
  CHECK(side_by_side(one, requested("feature:name=key_norm:keep=-1:every=16", "pyramid(64)")));
  CHECK(!side_by_side(one, requested("feature:name=value_norm")));
  CHECK(!side_by_side(one, requested("knorm")));
  CacheConfig cache_positions = one;
  cache_positions.positions = Positions::cache;
  CHECK(!side_by_side(one, cache_positions));
}

TEST_CASE("Budgets by head are refused if their shape is not the model's") {
  ResolvedConfig config = resolve(requested("h2o", "64"), 100);
  config.head_budgets = {{32, 64}, {64}};
  CHECK_THROWS_WITH(check_held(kDecoder, config, {.layers = 2, .kv_heads = 2}),
                    "budgets: 3 given; 2 layers of 2 KV heads need 4");
  config.head_budgets[1].push_back(48);
  CHECK_NOTHROW(check_held(kDecoder, config, {.layers = 2, .kv_heads = 2}));
}
