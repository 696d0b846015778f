// Compares kvlab_cache_memory with the bytes of the engine's layout. Needs no device.
#include <algorithm>
#include <random>

#include "engine/cuda/cache/evicting_cache.hpp"
#include "kernels/kvlab.h"
#include "policies/catalogue.hpp"
#include "tests/catch.hpp"

using namespace kvlab;

namespace {

/// A cache of the engine with random settings.
struct SampledCache {
  DeviceShape model;
  CudaDecoderOptions options;
};

class ShapeSampler {
 public:
  explicit ShapeSampler(std::uint64_t seed) : random_(seed) {}

  int number(int min_value, int max_value) {
    return std::uniform_int_distribution<int>(min_value, max_value)(random_);
  }
  template <class T>
  T one_of(std::initializer_list<T> all) {
    return all.begin()[number(0, static_cast<int>(all.size()) - 1)];
  }

 private:
  std::mt19937_64 random_;
};

ModelConfig sampled_config(ShapeSampler& sampler) {
  ModelConfig config;
  config.layers = static_cast<std::uint32_t>(sampler.number(1, 5));
  config.kv_heads = static_cast<std::uint32_t>(sampler.number(1, 8));
  config.query_heads = config.kv_heads * static_cast<std::uint32_t>(sampler.number(1, 8));
  config.head_size = sampler.one_of({64u, 96u, 128u, 256u});
  config.rows.resize(config.layers);
  if (config.layers > 1) config.rows[1].window = sampler.one_of({0u, 16u});
  return config;
}

/// A policy whose features the engine computes.
std::string sampled_policy(ShapeSampler& sampler) {
  for (;;) {
    const auto& all = policy_catalogue();
    const PolicyEntry& entry =
        all[static_cast<std::size_t>(sampler.number(0, int(all.size()) - 1))];
    const PolicySpec policy = parse_policy(entry.info.name);
    if (entry.info.evicts && !entry.has_order_hooks() &&
        std::ranges::all_of(policy.features, [](const std::string& feature) {
          return built_in_feature(feature).has_value();
        }))
      return std::string(entry.info.name) + sampler.one_of({"", ":every=8:once=no", ":once"});
  }
}

SampledCache sampled(ShapeSampler& sampler) {
  const ModelConfig config = sampled_config(sampler);
  const PolicySpec policy = parse_policy(sampled_policy(sampler));
  CudaDecoderOptions options;
  options.sequences = sampler.number(1, 4);
  options.slots = 500;
  options.watched = sampler.number(0, 1) == 1;
  const Positions positions = sampler.one_of({Positions::original, Positions::cache});
  for (int sequence = 0; sequence < options.sequences; ++sequence)
    options.caches.push_back(resolve(
        {.policy = policy,
         .budget = parse_budget(sampler.one_of({"96", "200", "pyramid(100)", "pyramid(160)"})),
         .positions = positions},
        500, static_cast<std::uint32_t>(sequence), config.heads()));
  return {{config, sampler.one_of({Dtype::bf16, Dtype::f32})}, options};
}

kvlab_cache_view shape_of(const SampledCache& sampled, int sequences, int max_slots) {
  const ModelConfig& config = sampled.model.config();
  return {.type = sampled.model.dtype() == Dtype::bf16 ? KVLAB_BF16 : KVLAB_F32,
          .sequences = sequences,
          .query_heads = static_cast<int>(config.query_heads),
          .kv_heads = static_cast<int>(config.kv_heads),
          .head_size = static_cast<int>(config.head_size),
          .softmax_scale = 1,
          .max_slots = max_slots};
}

kvlab_memory bytes_of(const SampledCache& sampled, const kvlab_cache_view& cache,
                      std::int64_t slots) {
  const CudaDecoderOptions& options = sampled.options;
  kvlab_memory bytes{.struct_size = sizeof(kvlab_memory)};
  const auto numbering = static_cast<kvlab_numbering>(options.numbering() == KVLAB_CACHE_POSITIONS
                                                          ? KVLAB_CACHE_POSITIONS
                                                          : KVLAB_ORIGINAL_POSITIONS);
  const std::string name(options.policy().name);
  REQUIRE(kvlab_cache_memory(kvlab_find_policy(name.c_str()), &cache, slots, numbering, &bytes) ==
          cudaSuccess);
  return bytes;
}

std::size_t sum(std::initializer_list<std::size_t> parts) {
  std::size_t all = 0;
  for (const std::size_t part : parts) all += cuda::Arena::align_up(part);
  return all;
}

/// The bytes of the arrays that all layers share. `slots`: the number of slots of each layer.
std::size_t storage_of(const SampledCache& sampled, const kernels::KvCacheConfig& config,
                       const kernels::PairSlots& pairs, const std::vector<std::int64_t>& slots) {
  const kvlab_cache_view cache = shape_of(sampled, sampled.options.sequences, pairs.max_slots());
  kvlab_memory all{};
  for (const std::int64_t layer : slots) {
    const kvlab_memory one = bytes_of(sampled, cache, layer);
    for (const auto member :
         {&kvlab_memory::keys, &kvlab_memory::values, &kvlab_memory::positions, &kvlab_memory::ages,
          &kvlab_memory::states, &kvlab_memory::features, &kvlab_memory::seen,
          &kvlab_memory::first_slot, &kvlab_memory::lengths, &kvlab_memory::next_slots,
          &kvlab_memory::rules, &kvlab_memory::evict_at, &kvlab_memory::unit_keys})
      all.*member += one.*member;
    all.params = one.params, all.threshold16 = one.threshold16;
    all.seeds = one.seeds, all.sequence_ids = one.sequence_ids;
  }
  // The engine has three tables of the lengths at which eviction starts: one for steps, one for
  // compactions, and one with lengths so large that nothing is evicted.
  const std::size_t evict_at = config.has_modifiers() ? all.evict_at : 0;
  return sum({all.keys, all.values, all.positions, all.ages, all.states, all.features,
              all.unit_keys, sampled.options.watched ? all.seen : 0, all.first_slot, all.lengths,
              all.next_slots, all.rules, evict_at, evict_at, evict_at, all.params, all.threshold16,
              all.sequence_ids, all.seeds});
}

/// The bytes for a prompt of one sequence. The layers use this memory one after another.
std::size_t prompt_of(const SampledCache& sampled, int tokens) {
  const CudaDecoderOptions& options = sampled.options;
  const kvlab_cache_view cache = shape_of(sampled, 1, tokens);
  const kvlab_memory one = bytes_of(sampled, cache, std::int64_t{tokens} * cache.kv_heads);
  kvlab_observe_args observe{.struct_size = sizeof observe,
                             .prefill = {.struct_size = sizeof observe.prefill,
                                         .type = cache.type,
                                         .query_heads = cache.query_heads,
                                         .kv_heads = cache.kv_heads,
                                         .head_size = cache.head_size,
                                         .queries = static_cast<int>(options.prefill_tokens)}};
  const std::size_t rows = options.prefill_tokens * sampled.model.config().query_heads;
  const bool features = one.features > 0, seen = one.seen > 0;
  return sum({one.keys, one.values, one.positions, one.lengths, one.next_slots, one.first_slot,
              one.states, one.features, features ? one.keys : 0,
              options.numbering() == KVLAB_ORIGINAL_POSITIONS ? 0 : one.keys,
              options.policy().weighted ? static_cast<std::size_t>(tokens) * sizeof(float) : 0,
              one.seen, seen ? rows * sizeof(kvlab_row_softmax) : 0,
              seen ? kvlab_observe_workspace(&observe) : 0, one.compact_workspace});
}

}  // namespace

TEST_CASE("kvlab_cache_memory reports the bytes that the engine allocates") {
  ShapeSampler sampler(1);
  for (int shape = 0; shape < 200; ++shape) {
    const SampledCache some = sampled(sampler);
    const kernels::KvCacheConfig config = slots_config(some.model, some.options);
    const kernels::PairSlots pairs(config);
    const std::size_t layer_pairs = pairs.pairs();
    std::vector<std::int64_t> slots;
    for (std::size_t at = layer_pairs; at <= pairs.all(); at += layer_pairs) {
      const bool last = at == pairs.all();
      slots.push_back((last ? pairs.total() : pairs.first_slots()[at]) -
                      pairs.first_slots()[at - layer_pairs]);
    }
    CAPTURE(shape, some.options.policy().name, some.model.config().head_size, slots);
    CHECK(storage_of(some, config, pairs, slots) ==
          cuda::Placed<kernels::SlotStorage>::bytes(config, pairs));
    const int tokens = sampler.number(1, 3000);
    CHECK(prompt_of(some, tokens) ==
          cuda::Placed<kernels::AppendMemory>::bytes(config, static_cast<std::uint32_t>(tokens)) +
              cuda::Placed<kernels::AppendScratch>::bytes(config,
                                                          static_cast<std::uint32_t>(tokens)));
  }
}

TEST_CASE("The library measures pages, and refuses invalid shapes") {
  const kvlab_policy* const h2o = kvlab_find_policy("h2o");
  kvlab_cache_view cache{.type = KVLAB_BF16,
                         .sequences = 3,
                         .query_heads = 32,
                         .kv_heads = 8,
                         .head_size = 128,
                         .softmax_scale = 1,
                         .max_slots = 1000};
  kvlab_memory bytes{.struct_size = sizeof bytes};
  const auto ask = [&](std::int64_t slots) {
    return kvlab_cache_memory(h2o, &cache, slots, KVLAB_ORIGINAL_POSITIONS, &bytes);
  };
  REQUIRE(ask(24'000) == cudaSuccess);
  CHECK(bytes.keys == 24'000 * 256);
  CHECK(bytes.blocks == 0);
  cache.pages.page = 16;
  REQUIRE(ask(24'000) == cudaSuccess);
  CHECK(bytes.keys == 24 * 1008 * 256);
  CHECK(bytes.positions == 24'000 * 4);
  CHECK(bytes.blocks == 3 * 63 * 4);
  CHECK(ask(24'001) == cudaErrorInvalidValue);
  CHECK(kvlab_last_error() ==
        std::string("kvlab_cache_memory: slots is 24001; it should be 1 to 24000, which is "
                    "sequences times kv_heads times max_slots"));
  cache.pages.page = 17;
  CHECK(ask(1) == cudaErrorInvalidValue);
  bytes.struct_size = 0;
  CHECK(ask(1) == cudaErrorInvalidValue);
  CHECK(kvlab_last_error() == std::string("kvlab_cache_memory: struct_size is 0; it should be the "
                                          "sizeof of the struct, 168 in kvlab.h 0.6"));
}
