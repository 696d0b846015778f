// Compares kvlab.h with the catalogue of policies on the host, and tests its refusals. Needs no
// device.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/kvlab.h"
#include "policies/catalogue.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/skip.hpp"
#include "tests/traces/temporary_folder.hpp"

using namespace kvlab;
using namespace kvlab::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// The result of compiling a text as my.hpp with kvlab_compile_policy: the error, whether there is
/// a policy, and the log.
struct Compiled {
  cudaError_t error;
  bool there;
  std::string log;
};
Compiled compiled(std::string text, const std::string& good = "", const std::string& bad = "") {
  if (!good.empty()) text.replace(text.find(good), good.size(), bad);
  const TemporaryFolder folder;
  write_bytes(folder / "my.hpp", text);
  std::array<char, 10'000> log;
  const kvlab_policy* policy = nullptr;
  const cudaError_t error =
      kvlab_compile_policy((folder / "my.hpp").c_str(), &policy, log.data(), log.size());
  return {error, policy != nullptr, log.data()};
}

std::vector<double> defaults_of(const PolicyEntry& entry) {
  return parse_policy(entry.info.name).params;
}

}  // namespace

TEST_CASE("The library gives the queries of a prompt the same weights as the host") {
  int weighted = 0;
  for (const PolicyEntry& entry : policy_catalogue()) {
    CAPTURE(entry.info.name);
    const kvlab_policy* const held = kvlab_find_policy(std::string(entry.info.name).c_str());
    if (entry.has_order_hooks()) {
      CHECK(!held);
      continue;
    }
    REQUIRE(held);
    CHECK(kvlab_policy_weighted(held) == (entry.info.weighted ? 1 : 0));
    weighted += kvlab_policy_weighted(held);

    const std::vector<double> values = defaults_of(entry);
    std::vector<std::byte> params(kvlab_policy_params_bytes(held));
    REQUIRE(kvlab_policy_params(held, values.data(), static_cast<int>(values.size()),
                                params.data()) == cudaSuccess);
    std::vector<float> weights(100, -1);
    std::uint32_t tail = 0;
    REQUIRE(kvlab_policy_weights(held, params.data(), 100, weights.data(), &tail) == cudaSuccess);
    CHECK(tail == entry.tail(params.data()));
    for (std::uint32_t age = 0; age < 100; ++age)
      REQUIRE(weights[age] == (age < tail ? entry.weight(age, params.data()) : 0.0f));
  }
  CHECK(weighted > 0);
}

TEST_CASE("The library accepts the same parameters as the command, in the same ranges") {
  int refused = 0;
  for (const PolicyEntry& entry : policy_catalogue()) {
    if (entry.has_order_hooks()) continue;
    const std::string name(entry.info.name);
    const kvlab_policy* const held = kvlab_find_policy(name.c_str());
    std::vector<std::byte> params(kvlab_policy_params_bytes(held));
    const auto taken = [&](const std::vector<double>& values) {
      return kvlab_policy_params(held, values.data(), static_cast<int>(values.size()),
                                 params.data()) == cudaSuccess;
    };
    for (std::size_t i = 0; i < entry.params.size(); ++i) {
      const ParamInfo& param = entry.params[i];
      const double inside[]{param.min_value, param.standard, param.max_value};
      const double outside[]{param.min_value - 1, param.max_value + 1, 1e300, std::nan("")};
      std::vector<double> values = defaults_of(entry);
      CAPTURE(name, param.name);
      CHECK(kvlab_policy_default(held, static_cast<int>(i)) == param.standard);
      for (const double value : inside) CHECK((values[i] = value, taken(values)));
      const auto before = params;
      for (const double value : outside) {
        CHECK_FALSE((values[i] = value, taken(values)));
        CHECK(params == before);
        ++refused;
      }
      CHECK_THROWS_AS(parse_policy(name + ":" + std::string(param.name) + "=" +
                                   std::to_string(param.max_value + 1)),
                      std::invalid_argument);
    }
    for (const int index : {-1, static_cast<int>(entry.params.size())})
      CHECK(std::isnan(kvlab_policy_default(held, index)));
  }
  CHECK(refused > 20);
}

TEST_CASE("The library distinguishes an unsupported shape from a machine without a device") {
  const kvlab_policy* const h2o = kvlab_find_policy("h2o");
  kvlab_cache_view cache{.type = KVLAB_BF16,
                         .sequences = 1,
                         .query_heads = 8,
                         .kv_heads = 2,
                         .head_size = 64,
                         .softmax_scale = 0.125f,
                         .max_slots = 128};
  const std::size_t bytes = kvlab_evicting_attention_workspace(h2o, &cache);
  CHECK(bytes > 0);
  CHECK((bytes == SIZE_MAX) == !has_device());
  cache.head_size = 72;
  CHECK(kvlab_evicting_attention_workspace(h2o, &cache) == 0);
}

TEST_CASE("The library refuses unsupported calls before any launch") {
  const kvlab_policy* const snapkv = kvlab_find_policy("snapkv");
  float weight = 0;
  std::uint32_t tail = 0;
  CHECK(kvlab_policy_weights(nullptr, nullptr, 1, &weight, &tail) == cudaErrorInvalidValue);
  CHECK(kvlab_policy_weights(snapkv, nullptr, 1, &weight, &tail) == cudaErrorInvalidValue);
  CHECK(kvlab_policy_weighted(nullptr) == 0);

  CHECK(kvlab_write(nullptr, nullptr) == cudaErrorInvalidValue);
  kvlab_write_args write{.struct_size = sizeof(kvlab_write_args)};
  CHECK(kvlab_write(&write, nullptr) == cudaErrorInvalidValue);

  kvlab_feature_args features{.struct_size = sizeof(kvlab_feature_args)};
  CHECK(kvlab_compute_features(&features, nullptr) == cudaErrorInvalidValue);  // none
  features.count = 5;
  CHECK(kvlab_compute_features(&features, nullptr) == cudaErrorInvalidValue);
  features.count = 1;
  features.features[0] = static_cast<kvlab_feature>(5);
  CHECK(kvlab_compute_features(&features, nullptr) == cudaErrorInvalidValue);

  kvlab_observation seen{};
  kvlab_compact_args compact{.struct_size = sizeof(kvlab_compact_args)};
  compact.seen = &seen;
  CHECK(kvlab_compact(snapkv, &compact, nullptr) == cudaErrorNotSupported);
  compact.weighted = 1;
  CHECK(kvlab_compact(snapkv, &compact, nullptr) == cudaErrorInvalidValue);
}

TEST_CASE("The library says in one line why a call was refused") {
  alignas(16) static char memory[16];
  void* const there = memory;
  const auto number = static_cast<std::int32_t*>(there);
  const auto word = static_cast<std::uint32_t*>(there);
  const std::int64_t first = 0;
  const kvlab_rule rule{};
  const kvlab_policy* const h2o = kvlab_find_policy("h2o");
  const kvlab_cache_view cache{.type = KVLAB_BF16,
                               .sequences = 1,
                               .query_heads = 4,
                               .kv_heads = 2,
                               .head_size = 64,
                               .softmax_scale = 0.125f,
                               .max_slots = 128,
                               .first_slot = &first,
                               .keys = there,
                               .values = there,
                               .positions = word,
                               .lengths = number,
                               .next_slots = number};
  kvlab_evicting_attention_args step{.struct_size = sizeof(kvlab_evicting_attention_args),
                                     .cache = cache,
                                     .now = word,
                                     .q = there,
                                     .out = there,
                                     .workspace = there};
  step.policy.states = there;
  step.policy.rules = &rule;
  step.policy.seeds = static_cast<std::uint64_t*>(there);
  step.policy.sequence_ids = word;

  const auto said = [&](auto change, const kvlab_policy* policy) {
    kvlab_evicting_attention_args changed = step;
    change(changed);
    CHECK(kvlab_evicting_attention(policy, &changed, nullptr) != cudaSuccess);
    return std::string(kvlab_last_error());
  };
  const std::string call = "kvlab_evicting_attention: ";
  CHECK(said([](auto& args) { args.cache.head_size = 80; }, h2o) ==
        call + "cache.head_size is 80; it should be 64, 96, 128 or 256");
  CHECK(said([](auto& args) { args.struct_size = 0; }, h2o) ==
        call + "struct_size is 0; it should be the sizeof of the struct, 296 in kvlab.h 0.6");
  CHECK_THAT(said([](auto& args) { args.cache.query_heads = 34; }, h2o),
             ContainsSubstring(call + "cache.query_heads is 34, kv_heads 2; at most "));
  CHECK(said([](auto& args) { args.cache.pages = {.blocks = args.cache.lengths, .page = 12}; },
             h2o) == call + "cache.pages.page is 12; it should be a power of two from 16 to 2^20");
  CHECK(said([](auto& args) { args.policy.states = nullptr; }, h2o) ==
        call + "policy.states is NULL, but policy h2o needs 8 bytes per slot");
  CHECK(said([](auto& args) { args.q = static_cast<const char*>(args.q) + 2; }, h2o) ==
        call + "q does not begin at a multiple of 16 bytes");
  CHECK(said([](auto& args) { args.numbering = KVLAB_CACHE_POSITIONS_ROTATED; }, h2o) ==
        call + "inv_freq, of cache positions, is NULL");
  CHECK(said([](auto&) {}, nullptr) == call + "an argument is NULL");

  kvlab_compact_args compact{
      .struct_size = sizeof(kvlab_compact_args), .from = cache, .to = cache, .policy = step.policy};
  CHECK(kvlab_compact(h2o, &compact, nullptr) == cudaErrorInvalidValue);
  CHECK(kvlab_last_error() ==
        std::string("kvlab_compact: to_states is NULL, but policy.states is not"));
  kvlab_prefill_args prompt{.struct_size = sizeof(kvlab_prefill_args),
                            .type = KVLAB_BF16,
                            .query_heads = 4,
                            .kv_heads = 2,
                            .head_size = 64};
  CHECK(kvlab_prefill_attention(&prompt, nullptr) == cudaErrorInvalidValue);
  CHECK(
      kvlab_last_error() ==
      std::string(
          "kvlab_prefill_attention: first is 0, queries 0; first should be at least 0, queries at "
          "least 1, and both below 2^26"));
}

TEST_CASE("Each refused call replaces the reason of the call before") {
  const kvlab_policy* const h2o = kvlab_find_policy("h2o");
  const kvlab_policy* const snapkv = kvlab_find_policy("snapkv");
  const kvlab_policy* policy = nullptr;
  std::array<double, 16> values{};
  std::array<std::byte, 128> params{};
  float weight = 0;
  std::uint32_t tail = 0;
  std::size_t bytes = 0;
  std::uint64_t rank = 0;
  kvlab_kv_cache* slots = nullptr;
  const auto reason = [](const char* call, cudaError_t error) {
    CAPTURE(call);
    CHECK(error != cudaSuccess);
    const std::string said = kvlab_last_error();
    CHECK_THAT(said, Catch::Matchers::StartsWith(std::string(call) + ": "));
    CHECK(said.find("invalid argument") == std::string::npos);
    return said.substr(said.find(": ") + 2);
  };
  reason("kvlab_kv_cache_create", kvlab_kv_cache_create(nullptr, nullptr, &slots));
  CHECK(reason("kvlab_policy_params", kvlab_policy_params(nullptr, nullptr, 0, nullptr)) ==
        "an argument is NULL");
  reason("kvlab_kv_cache_memory", kvlab_kv_cache_memory(nullptr, &bytes));
  CHECK_THAT(
      reason("kvlab_policy_params", kvlab_policy_params(h2o, values.data(), 99, params.data())),
      ContainsSubstring("count is 99; h2o has "));
  const auto count = static_cast<int>(kvlab_policy_params_bytes(snapkv) / sizeof(double));
  REQUIRE(count > 0);
  values.fill(-1e9);
  CHECK_THAT(reason("kvlab_policy_params",
                    kvlab_policy_params(snapkv, values.data(), count, params.data())),
             ContainsSubstring("a value is outside its range"));
  CHECK(reason("kvlab_policy_params", kvlab_policy_params(snapkv, nullptr, count, params.data())) ==
        "an argument is NULL");
  reason("kvlab_policy_weights", kvlab_policy_weights(nullptr, nullptr, 1, &weight, &tail));
  reason("kvlab_compile_policy", kvlab_compile_policy(nullptr, &policy, nullptr, 0));
  CHECK_THAT(
      reason("kvlab_compile_policy", kvlab_compile_policy("/nowhere/my.hpp", &policy, nullptr, 0)),
      ContainsSubstring("cannot be read"));
  reason("kvlab_cache_memory",
         kvlab_cache_memory(h2o, nullptr, 1, KVLAB_ORIGINAL_POSITIONS, nullptr));
  reason("kvlab_compute_ages", kvlab_compute_ages(nullptr, nullptr));
  reason("kvlab_read_policy_file", kvlab_read_policy_file(nullptr, nullptr));
  reason("kvlab_write", kvlab_write(nullptr, nullptr));
  reason("kvlab_compute_features", kvlab_compute_features(nullptr, nullptr));
  reason("kvlab_evicting_attention", kvlab_evicting_attention(h2o, nullptr, nullptr));
  reason("kvlab_attend", kvlab_attend(h2o, nullptr, nullptr));
  reason("kvlab_choose_victims", kvlab_choose_victims(h2o, nullptr, 1, nullptr));
  reason("kvlab_observe", kvlab_observe(nullptr, nullptr));
  reason("kvlab_copy_prefix", kvlab_copy_prefix(h2o, nullptr, nullptr));
  reason("kvlab_compact", kvlab_compact(h2o, nullptr, nullptr));
  reason("kvlab_compute_ranks", kvlab_compute_ranks(h2o, nullptr, &rank, nullptr));
  reason("kvlab_compact_ranked", kvlab_compact_ranked(h2o, nullptr, &rank, 1, nullptr));

  alignas(16) static char memory[32];
  const std::int64_t first = 0;
  kvlab_prefill_args prompt{.struct_size = sizeof(kvlab_prefill_args),
                            .type = KVLAB_BF16,
                            .query_heads = 4,
                            .kv_heads = 2,
                            .head_size = 64,
                            .softmax_scale = 1,
                            .queries = 1};
  prompt.first_slot = &first;
  prompt.q = prompt.keys = memory;
  CHECK(reason("kvlab_prefill_attention", kvlab_prefill_attention(&prompt, nullptr)) ==
        "values is NULL");
  prompt.values = memory;
  CHECK(reason("kvlab_prefill_attention", kvlab_prefill_attention(&prompt, nullptr)) ==
        "out is NULL");
  prompt.out = memory + 1;
  CHECK(reason("kvlab_prefill_attention", kvlab_prefill_attention(&prompt, nullptr)) ==
        "out does not begin at a multiple of 16 bytes");
}

TEST_CASE("Sizes that exceed 32 bits are refused before any launch") {
  const auto said = [](cudaError_t error) {
    CHECK(error == cudaErrorInvalidValue);
    return std::string(kvlab_last_error());
  };
  alignas(16) static char memory[32];
  const std::int64_t first = 0;
  kvlab_prefill_args prompt{.struct_size = sizeof(kvlab_prefill_args),
                            .type = KVLAB_BF16,
                            .query_heads = 64,
                            .kv_heads = 8,
                            .head_size = 64,
                            .softmax_scale = 1,
                            .queries = (1 << 26) - 1};
  prompt.first_slot = &first;
  prompt.q = prompt.keys = prompt.values = prompt.out = memory;
  CHECK_THAT(
      said(kvlab_prefill_attention(&prompt, nullptr)),
      ContainsSubstring("queries is 67108863, query_heads 64; their product should be below 2^31"));
  kvlab_observe_args observed{.struct_size = sizeof(kvlab_observe_args)};
  observed.prefill = prompt;
  observed.prefill.query_heads = observed.prefill.kv_heads = 8;
  observed.prefill.queries = observed.keys_end = 1 << 24;
  observed.needs = KVLAB_MASS;
  CHECK_THAT(said(kvlab_observe(&observed, nullptr)),
             ContainsSubstring("keys_end is 16777216, prefill.queries 16777216: too many"));
  kvlab_cache_view cache{.type = KVLAB_BF16,
                         .sequences = 1,
                         .query_heads = 8,
                         .kv_heads = 2,
                         .head_size = 64,
                         .max_slots = (1 << 30) + 1};
  kvlab_memory bytes{.struct_size = sizeof(kvlab_memory)};
  CHECK_THAT(said(kvlab_cache_memory(kvlab_find_policy("h2o"), &cache, 1, KVLAB_ORIGINAL_POSITIONS,
                                     &bytes)),
             ContainsSubstring("max_slots is 1073741825; it should be at most 2^30"));
}

TEST_CASE("The library compiles a header, and reports errors at the header's line") {
  const std::string h2o = read_bytes(KVLAB_SOURCE_DIR "/policies/mass/h2o.hpp");
  const Compiled whole = compiled(h2o);
  if (whole.error == cudaErrorNotSupported) return skip("no NVRTC");
  if (has_device()) {
    CHECK(whole.error == cudaSuccess);
    CHECK(whole.there);
    CHECK(whole.log.empty());
  } else {
    CHECK(whole.error != cudaErrorInvalidSource);
    CHECK_FALSE(whole.there);
    CHECK_THAT(whole.log, ContainsSubstring("my.hpp: compiles, but cannot be loaded: CUDA driver"));
  }

  const std::string good = "slot.mass += seen.mass;";
  const Compiled misspelt = compiled(h2o, good, "slot.mass += sen.mass;");
  CHECK(misspelt.error == cudaErrorInvalidSource);
  CHECK_FALSE(misspelt.there);
  const auto line =
      1 + std::count(h2o.begin(), h2o.begin() + static_cast<std::ptrdiff_t>(h2o.find(good)), '\n');
  CHECK_THAT(misspelt.log, ContainsSubstring("my.hpp(" + std::to_string(line) + "): error") &&
                               ContainsSubstring("\"sen\" is undefined"));

  const Compiled hook = compiled(h2o, " rank(", " rnk(");
  CHECK(hook.error == cudaErrorInvalidSource);
  CHECK_THAT(hook.log, ContainsSubstring("policy: needs") &&
                           ContainsSubstring("rank(const Slot&") && ContainsSubstring("my.hpp"));
  const Compiled slots = compiled(h2o, "slot.mass = 0;", "");
  CHECK(slots.error == cudaErrorInvalidSource);
  CHECK_THAT(slots.log, ContainsSubstring("policy: append() must set every member of Slot"));
  CHECK(compiled("int x;").error == cudaErrorInvalidSource);
  CHECK_THAT(compiled("int x;").log, ContainsSubstring("my.hpp: holds no struct"));
}

TEST_CASE(
    "The library reports files that it cannot read, and the message fits the caller's buffer") {
  const kvlab_policy* policy = nullptr;
  std::array<char, 9> log{};
  CHECK(kvlab_compile_policy("/nowhere/my.hpp", &policy, log.data(), 8) == cudaErrorFileNotFound);
  CHECK(std::string(log.data()) == "/nowher");
  CHECK(kvlab_compile_policy("/nowhere/my.hpp", &policy, nullptr, 0) == cudaErrorFileNotFound);
  CHECK(kvlab_compile_policy("/nowhere/my.hpp", &policy, nullptr, 1) == cudaErrorInvalidValue);
  CHECK(kvlab_compile_policy(nullptr, &policy, log.data(), 8) == cudaErrorInvalidValue);
  CHECK(kvlab_compile_policy("/nowhere/my.hpp", nullptr, log.data(), 8) == cudaErrorInvalidValue);
}
