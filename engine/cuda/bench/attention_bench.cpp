#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "engine/cuda/bench/bench_tools.hpp"
#include "engine/cuda/cuda_decoder.hpp"
#include "engine/cuda/fill.hpp"
#include "kernels/evict/eviction_kernels.hpp"
#include "kernels/host/transfer.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

// Decode attention over blocks of slots beside slots one behind the other.

/// Sequences of `slots` live tokens each, in bfloat16.
struct PagedBenchShape {
  std::uint32_t head_size, group, kv_heads, batch, slots;
  std::uint64_t pool;  ///< bytes of keys and values, of all layers, at most
};

constexpr kernels::Type kType = kernels::Type::bf16;
constexpr std::uint32_t kMostLayers = 32;
constexpr std::uint32_t kLargestPage = 64;
constexpr int kRepeats = 9;
constexpr const char* kWhat = "measuring attention over blocks";

kernels::EvictionKernels window_kernels() {
  const auto& all = kernels::device_policies();
  return kernels::observing_kernels(
      *std::ranges::find(all, "window", &kernels::DevicePolicy::name));
}

/// Some layers' caches, full, and what their attention needs. The policy is `window`, which leaves
/// attention alone.
class PagedLayers {
 public:
  explicit PagedLayers(const PagedBenchShape& shape);
  /// Of one layer. `by_head`: blocks are [kv_head, slot, dim], else [slot, kv_head, dim].
  double microseconds(std::uint32_t page, bool by_head) const;

 private:
  std::uint64_t slots() const {
    return (shape_.slots + kLargestPage - 1) / kLargestPage * kLargestPage;
  }
  std::uint64_t pairs() const { return std::uint64_t{shape_.batch} * shape_.kv_heads; }
  /// Of a layer's keys, or values.
  std::uint64_t elements() const { return pairs() * slots() * shape_.head_size; }
  kernels::SlotCache cache(std::uint32_t layer) const;
  cuda::DeviceBuffer blocks(std::uint32_t page) const;
  kernels::PagedRows paged(std::uint32_t page, bool by_head,
                           const cuda::DeviceBuffer& blocks) const;

  PagedBenchShape shape_;
  kernels::EvictionKernels window_ = window_kernels();
  std::uint32_t layers_;
  cuda::DeviceBuffer pool_, q_, out_, zeroes_, first_slot_, lengths_, next_slots_, now_, workspace_;
};

PagedLayers::PagedLayers(const PagedBenchShape& shape) : shape_(shape) {
  const std::uint64_t bytes = 2 * elements() * kernels::bytes_of(kType);
  layers_ =
      static_cast<std::uint32_t>(std::clamp<std::uint64_t>(shape.pool / bytes, 2, kMostLayers));
  pool_ = {layers_ * bytes, kWhat};
  const std::uint64_t queries = pairs() * shape.group * shape.head_size;
  q_ = {queries * kernels::bytes_of(kType), kWhat};
  out_ = {queries * kernels::bytes_of(kType), kWhat};
  cuda::check(cuda::fill_normal(kType, pool_.data(), layers_ * 2 * elements(), 1, 1, nullptr),
              kWhat);
  cuda::check(cuda::fill_normal(kType, q_.data(), queries, 1, 2, nullptr), kWhat);
  zeroes_ = cuda::zeroes(
      std::max(pairs() * sizeof(kernels::PairRule), pairs() * slots() * sizeof(std::uint32_t)),
      kWhat);
  std::vector<std::int64_t> first_slot(pairs());
  for (std::uint64_t pair = 0; pair < pairs(); ++pair)
    first_slot[pair] = static_cast<std::int64_t>(pair * slots());
  first_slot_ = cuda::upload(first_slot, kWhat);
  const auto live = static_cast<std::int32_t>(shape.slots);
  lengths_ = cuda::upload(std::vector<std::int32_t>(pairs(), live), kWhat);
  next_slots_ = cuda::upload(std::vector<std::int32_t>(pairs(), live - 1), kWhat);
  now_ = cuda::upload(std::vector<std::uint32_t>(shape.batch, shape.slots), kWhat);
  workspace_ = cuda::zeroes(window_.attention_workspace(cache(0)), kWhat);
}

kernels::SlotCache PagedLayers::cache(std::uint32_t layer) const {
  const std::uint64_t bytes = elements() * kernels::bytes_of(kType);
  kernels::SlotCache cache{};
  cache.type = kType;
  cache.sequences = static_cast<int>(shape_.batch);
  cache.query_heads = static_cast<int>(shape_.kv_heads * shape_.group);
  cache.kv_heads = static_cast<int>(shape_.kv_heads);
  cache.head_size = static_cast<int>(shape_.head_size);
  cache.softmax_scale = 1 / std::sqrt(static_cast<float>(shape_.head_size));
  cache.most_slots = static_cast<int>(shape_.slots);
  cache.first_slot = first_slot_.as<std::int64_t>();
  cache.keys = pool_.data() + 2 * layer * bytes;
  cache.values = pool_.data() + (2 * layer + 1) * bytes;
  cache.positions = zeroes_.as<std::uint32_t>();
  cache.lengths = lengths_.as<std::int32_t>();
  cache.next_slots = next_slots_.as<std::int32_t>();
  return cache;
}

/// All blocks of the pool, in any order.
cuda::DeviceBuffer PagedLayers::blocks(std::uint32_t page) const {
  std::vector<std::int32_t> numbers(shape_.batch * slots() / page);
  std::iota(numbers.begin(), numbers.end(), 0);
  std::shuffle(numbers.begin(), numbers.end(), std::mt19937(3));
  return cuda::upload(numbers, kWhat);
}

kernels::PagedRows PagedLayers::paged(std::uint32_t page, bool by_head,
                                      const cuda::DeviceBuffer& blocks) const {
  const std::uint32_t slot = shape_.kv_heads * shape_.head_size;
  return {.blocks = blocks.as<std::int32_t>(),
          .block_stride = std::int64_t{page} * slot,
          .head_stride = std::int64_t{by_head ? page : 1} * shape_.head_size,
          .slot_stride = static_cast<std::int32_t>(by_head ? shape_.head_size : slot),
          .most_blocks = static_cast<std::int32_t>(slots() / page),
          .shift = std::countr_zero(page),
          .by_pair = false};
}

double PagedLayers::microseconds(std::uint32_t page, bool by_head) const {
  const cuda::DeviceBuffer numbers = page == 0 ? cuda::DeviceBuffer() : blocks(page);
  const cuda::Stream stream;
  cuda::check(cudaDeviceSynchronize(), kWhat);
  const cuda::Graph graph(stream.get(), [&] {
    for (std::uint32_t layer = 0; layer < layers_; ++layer) {
      kernels::EvictingAttentionArgs args{};
      args.cache = cache(layer);
      if (page != 0) args.cache.paged = paged(page, by_head, numbers);
      args.policy.rules = zeroes_.as<kernels::PairRule>();
      args.policy.seeds = zeroes_.as<std::uint64_t>();
      args.policy.sequence_ids = zeroes_.as<std::uint32_t>();
      args.now = now_.as<std::uint32_t>();
      args.q = q_.data();
      args.out = out_.data();
      args.workspace = workspace_.data();
      args.settled = true;
      cuda::check(window_.attend(window_, args, stream.get()), kWhat);
    }
  });
  const auto launch = [&] { graph.launch(stream.get()); };
  return median_milliseconds(stream.get(), launch, kRepeats) * 1e3 / layers_;
}

/// Microseconds of one layer's attention, by pages: 0 (no blocks), 16 and 64 slots, where a block
/// is [slot, kv_head, dim] (NHD) and where it is [kv_head, slot, dim] (HND).
nlohmann::ordered_json bench_pages(const PagedBenchShape& shape) {
  const PagedLayers layers(shape);
  const double contiguous = layers.microseconds(0, false);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  rows.push_back({{"page", 0}, {"microseconds", contiguous}});
  for (const std::uint32_t page : {16u, 64u})
    for (const bool by_head : {false, true}) {
      const double time = layers.microseconds(page, by_head);
      rows.push_back({{"page", page},
                      {"block", by_head ? "HND" : "NHD"},
                      {"microseconds", time},
                      {"percent_over", 100 * (time / contiguous - 1)}});
    }
  return rows;
}

using nlohmann::ordered_json;

constexpr std::uint32_t kKvHeads = 8;
constexpr std::uint64_t kPool = std::uint64_t{8} << 30;  // bytes of keys and values, at most
constexpr std::uint64_t kMostLayers = 32;
constexpr int kRepeats = 9;

struct Shape {
  std::uint32_t head_size, group, batch, slots;

  /// Of one layer's keys and values.
  std::uint64_t bytes() const {
    return std::uint64_t{2} * batch * kKvHeads * slots * head_size * bytes_of(Dtype::bf16);
  }
};

/// As many layers as the pool holds, and next to nothing but attention.
DeviceModel model_of(const Shape& shape) {
  constexpr std::uint32_t little = 64;
  ModelConfig config{.name = "attention", .layers = 0, .hidden = little, .mlp = little};
  config.layers = static_cast<std::uint32_t>(
      std::min(std::max<std::uint64_t>(kPool / shape.bytes(), 2), kMostLayers));
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

/// Median microseconds of one layer's attention. Every sequence holds so many slots' tokens; a
/// cache that evicts is full, so that every step evicts.
double microseconds(const DeviceModel& model, const Shape& shape,
                    std::vector<ResolvedConfig> caches) {
  const bool evicts = !caches.empty();
  // The whole cache has one slot more than tokens.
  CudaDecoder decoder(model, {.sequences = static_cast<int>(shape.batch),
                              .slots = evicts ? 0 : shape.slots - 1,
                              .prefill_tokens = 1,
                              .caches = std::move(caches)});
  const auto batch = static_cast<int>(shape.batch);
  for (int row = 0; row < batch; ++row)
    decoder.pretend(row, evicts ? 2 * shape.slots : shape.slots - 2);
  decoder.step(batch);  // leaves queries
  const DecodeStep step = decoder.decode_step(batch);
  const auto parts = step.parts(0);
  const auto attention = std::ranges::find(parts, "attention", &DecodeStep::Part::name);
  const cuda::Graph graph(decoder.stream(), attention->enqueue);
  const auto launch = [&] { graph.launch(decoder.stream()); };
  return median_milliseconds(decoder.stream(), launch, kRepeats) * 1e3 / model.config().layers;
}

ordered_json row_of(const Shape& shape, const std::vector<PolicySpec>& policies, double read) {
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
    const double time = microseconds(model, shape, std::move(caches));
    evicting.push_back({{"policy", policy.text()},
                        {"positions", name_of(cache.positions)},
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
          {"share_of_read", rate / read},
          {"evicting", std::move(evicting)},
          {"pages",
           bench_pages({shape.head_size, shape.group, kKvHeads, shape.batch, shape.slots, kPool})}};
}

}  // namespace

ordered_json bench_attention(const AttentionBenchOptions& options) {
  refuse_without_device();
  std::vector<PolicySpec> policies;
  for (const std::string& policy : options.policies) policies.push_back(parse_policy(policy));
  const double read = read_bytes_per_second();
  ordered_json rows = ordered_json::array();
  for (const std::uint32_t head_size : options.head_sizes)
    for (const std::uint32_t group : options.groups)
      for (const std::uint32_t batch : options.batches)
        rows.push_back(row_of({head_size, group, batch, options.slots}, policies, read));
  return {{"bench", "attention"},
          {"dtype", torch_name(Dtype::bf16)},
          {"device", cuda::device_name()},
          {"read_bytes_per_second", read},
          {"rows", std::move(rows)}};
}

}  // namespace kvlab
