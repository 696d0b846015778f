#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "engine/cuda/bench/bench_tools.hpp"
#include "engine/cuda/bench/paged_bench.hpp"
#include "engine/cuda/cuda_decoder.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

constexpr std::uint32_t kKvHeads = 8;
constexpr std::uint64_t kPool = std::uint64_t{8} << 30;  // maximum bytes of keys and values
constexpr std::uint64_t kMaxLayers = 32;
constexpr int kRepeats = 9;

struct Shape {
  std::uint32_t head_size, group, batch, slots;

  /// Bytes of one layer's keys and values.
  std::uint64_t bytes() const {
    return std::uint64_t{2} * batch * kKvHeads * slots * head_size * bytes_of(Dtype::bf16);
  }
};

/// A model with as many layers as fit into the pool, and with almost no work besides attention.
DeviceModel model_of(const Shape& shape) {
  constexpr std::uint32_t little = 64;
  ModelConfig config{.name = "attention", .layers = 0, .hidden = little, .mlp = little};
  config.layers = static_cast<std::uint32_t>(
      std::min(std::max<std::uint64_t>(kPool / shape.bytes(), 2), kMaxLayers));
  config.query_heads = kKvHeads * shape.group;
  config.kv_heads = kKvHeads;
  config.head_size = shape.head_size;
  config.vocab = little;
  config.norm_epsilon = 1e-5f;
  config.tied_head = true;
  config.rows.assign(config.layers, {.scale = 1 / std::sqrt(static_cast<float>(shape.head_size)),
                                     .rope = {std::vector<float>(shape.head_size / 2, 0.01f)}});
  return DeviceModel::random(std::move(config));
}

/// Median microseconds of one layer's attention. Every sequence has as many tokens as slots. So a
/// cache that evicts is full, and every step evicts a token from it.
double microseconds(const DeviceModel& model, const Shape& shape,
                    std::vector<ResolvedConfig> caches) {
  const bool evicts = !caches.empty();
  const std::uint32_t held = evicts ? caches.front().budget_tokens : shape.slots;
  // A full cache has one slot more than `slots`, so this requests one slot less.
  CudaDecoder decoder(model, {.sequences = static_cast<int>(shape.batch),
                              .slots = evicts ? 0 : shape.slots - 1,
                              .prefill_tokens = 1,
                              .caches = std::move(caches)});
  const auto batch = static_cast<int>(shape.batch);
  decoder.pretend(evicts ? 2 * held : held - 2);
  decoder.step(batch);  // computes queries for the launches below
  const DecodeStep step = decoder.decode_step(batch);
  const auto parts = step.parts(0);
  const auto attention = std::ranges::find(parts, "attention", &DecodeStep::Part::name);
  const cuda::Graph graph(decoder.stream(), attention->enqueue);
  const auto launch = [&] { graph.launch(decoder.stream()); };
  return median_milliseconds(decoder.stream(), launch, kRepeats) * 1e3 / model.config().layers;
}

/// Bytes of one layer's keys and values in caches of this shape.
std::uint64_t bytes_held(const Shape& shape, const ResolvedConfig& cache) {
  const auto tiers = cache.tiers.find(cache.budget_tokens);
  if (tiers == cache.tiers.end()) return shape.bytes();
  std::uint64_t bytes = 0;
  for (const TierSlots& tier : tiers->second)
    bytes += std::uint64_t{tier.slots} * tier.format.block_bytes();
  return bytes * (shape.head_size / kQuantBlock) * shape.batch * kKvHeads;
}

/// The rate of reading all layers, which have `bytes` of keys and values each, as a share of the
/// read limit. `microseconds`: time of one layer.
double share_of_read(ReadLimits& limits, const DeviceModel& model, const Shape& shape,
                     const std::string& policy, std::uint64_t bytes, double microseconds) {
  const std::uint32_t layers = model.config().layers;
  return limits.share(fmt::format("attention, {}, head size {}, group {}, batch {}, {} slots",
                                  policy, shape.head_size, shape.group, shape.batch, shape.slots),
                      bytes * layers, microseconds * 1e-3 * layers);
}

ordered_json row_of(const Shape& shape, const std::vector<PolicySpec>& policies,
                    ReadLimits& limits) {
  const DeviceModel model = model_of(shape);
  const double plain = microseconds(model, shape, {});
  const double rate = static_cast<double>(shape.bytes()) / (plain * 1e-6);
  ordered_json evicting = ordered_json::array();
  for (const PolicySpec& policy : policies) {
    const CacheConfig cache{.policy = policy,
                            .budget = {.extent = tokens(shape.slots)},
                            .positions = policy.entry->info.positions};
    std::vector<ResolvedConfig> caches;
    for (std::uint32_t row = 0; row < shape.batch; ++row)
      caches.push_back(resolve(cache, shape.slots, row));
    const std::uint64_t bytes = bytes_held(shape, caches.front());
    const std::uint32_t held = caches.front().budget_tokens;
    const double time = microseconds(model, shape, std::move(caches));
    evicting.push_back(
        {{"policy", policy.text()},
         {"positions", name_of(cache.positions)},
         {"tokens", held},
         {"share_of_read", share_of_read(limits, model, shape, policy.text(), bytes, time)},
         {"microseconds", time},
         {"percent_over", 100 * (time / plain - 1)}});
  }
  return {{"kv_heads", kKvHeads},
          {"head_size", shape.head_size},
          {"group", shape.group},
          {"batch", shape.batch},
          {"slots", shape.slots},
          {"bytes", shape.bytes()},
          {"microseconds", plain},
          {"bytes_per_second", rate},
          {"limit_bytes_per_second", limits.limit(shape.bytes() * model.config().layers)},
          {"share_of_read",
           share_of_read(limits, model, shape, "the full cache", shape.bytes(), plain)},
          {"evicting", std::move(evicting)},
          {"pages",
           bench_pages({shape.head_size, shape.group, kKvHeads, shape.batch, shape.slots, kPool})}};
}

}  // namespace

ordered_json bench_attention(const AttentionBenchOptions& options) {
  refuse_without_device();
  std::vector<PolicySpec> policies;
  for (const std::string& policy : options.policies) policies.push_back(parse_policy(policy));
  ReadLimits limits;
  ordered_json rows = ordered_json::array();
  for (const std::uint32_t head_size : options.head_sizes)
    for (const std::uint32_t group : options.groups)
      for (const std::uint32_t batch : options.batches)
        rows.push_back(row_of({head_size, group, batch, options.slots}, policies, limits));
  return {{"bench", "attention"},
          {"dtype", torch_name(Dtype::bf16)},
          {"device", cuda::device_name()},
          {"read_bytes_per_second", limits.memory()},
          {"rows", std::move(rows)}};
}

}  // namespace kvlab
