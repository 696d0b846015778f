#include "engine/cuda/bench/paged_bench.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "engine/cuda/bench/bench_tools.hpp"
#include "engine/cuda/fill.hpp"
#include "kernels/evict/eviction_kernels.hpp"
#include "kernels/host/transfer.hpp"

namespace kvlab {
namespace {

constexpr kernels::Type kType = KVLAB_BF16;
constexpr std::uint32_t kMaxPagedLayers = 32;
constexpr std::uint32_t kLargestPage = 64;
constexpr int kPagedRepeats = 9;
constexpr const char* kMeasuringBlocks = "measuring attention over blocks";

kernels::EvictionKernels window_kernels() {
  const auto& all = kernels::device_policies();
  return kernels::observing_kernels(
      *std::ranges::find(all, "window", &kernels::DevicePolicy::name));
}

/// Full caches of some layers, and buffers for their attention. The policy is `window`, which does
/// not change attention.
class PagedLayers {
 public:
  explicit PagedLayers(const PagedBenchShape& shape);
  /// Microseconds of one layer's attention. `page`: slots per block; 0: contiguous slots.
  /// `by_head`: blocks are [kv_head, slot, dim] instead of [slot, kv_head, dim].
  double microseconds(std::uint32_t page, bool by_head) const;

 private:
  std::uint64_t slots() const {
    return (shape_.slots + kLargestPage - 1) / kLargestPage * kLargestPage;
  }
  std::uint64_t pairs() const { return std::uint64_t{shape_.batch} * shape_.kv_heads; }
  /// Number of elements of a layer's keys, which is also that of its values.
  std::uint64_t elements() const { return pairs() * slots() * shape_.head_size; }
  kvlab_cache_view cache(std::uint32_t layer) const;
  cuda::DeviceBuffer blocks(std::uint32_t page) const;
  kvlab_pages make_pages(std::uint32_t page, bool by_head, const cuda::DeviceBuffer& blocks) const;

  PagedBenchShape shape_;
  kernels::EvictionKernels window_ = window_kernels();
  std::uint32_t layers_;
  cuda::DeviceBuffer pool_, q_, out_, zeroes_, first_slot_, lengths_, next_slots_, now_, workspace_;
};

PagedLayers::PagedLayers(const PagedBenchShape& shape) : shape_(shape) {
  const std::uint64_t bytes = 2 * elements() * kernels::bytes_of(kType);
  layers_ =
      static_cast<std::uint32_t>(std::clamp<std::uint64_t>(shape.pool / bytes, 2, kMaxPagedLayers));
  pool_ = {layers_ * bytes, kMeasuringBlocks};
  const std::uint64_t queries = pairs() * shape.group * shape.head_size;
  q_ = {queries * kernels::bytes_of(kType), kMeasuringBlocks};
  out_ = {queries * kernels::bytes_of(kType), kMeasuringBlocks};
  cuda::check(cuda::fill_normal(kType, pool_.data(), layers_ * 2 * elements(), 1, 1, nullptr),
              kMeasuringBlocks);
  cuda::check(cuda::fill_normal(kType, q_.data(), queries, 1, 2, nullptr), kMeasuringBlocks);
  zeroes_ = cuda::zeroes(
      std::max(pairs() * sizeof(kvlab_rule), pairs() * slots() * sizeof(std::uint32_t)),
      kMeasuringBlocks);
  std::vector<std::int64_t> first_slot(pairs());
  for (std::uint64_t pair = 0; pair < pairs(); ++pair)
    first_slot[pair] = static_cast<std::int64_t>(pair * slots());
  first_slot_ = cuda::upload(first_slot, kMeasuringBlocks);
  const auto live = static_cast<std::int32_t>(shape.slots);
  lengths_ = cuda::upload(std::vector<std::int32_t>(pairs(), live), kMeasuringBlocks);
  next_slots_ = cuda::upload(std::vector<std::int32_t>(pairs(), live - 1), kMeasuringBlocks);
  now_ = cuda::upload(std::vector<std::uint32_t>(shape.batch, shape.slots), kMeasuringBlocks);
  workspace_ = cuda::zeroes(window_.attention_workspace(cache(0), false), kMeasuringBlocks);
}

kvlab_cache_view PagedLayers::cache(std::uint32_t layer) const {
  const std::uint64_t bytes = elements() * kernels::bytes_of(kType);
  kvlab_cache_view cache{};
  cache.type = kType;
  cache.sequences = static_cast<int>(shape_.batch);
  cache.query_heads = static_cast<int>(shape_.kv_heads * shape_.group);
  cache.kv_heads = static_cast<int>(shape_.kv_heads);
  cache.head_size = static_cast<int>(shape_.head_size);
  cache.softmax_scale = 1 / std::sqrt(static_cast<float>(shape_.head_size));
  cache.max_slots = static_cast<int>(shape_.slots);
  cache.first_slot = first_slot_.as<std::int64_t>();
  cache.keys = pool_.data() + 2 * layer * bytes;
  cache.values = pool_.data() + (2 * layer + 1) * bytes;
  cache.positions = zeroes_.as<std::uint32_t>();
  cache.lengths = lengths_.as<std::int32_t>();
  cache.next_slots = next_slots_.as<std::int32_t>();
  return cache;
}

/// The numbers of all blocks of the pool, shuffled.
cuda::DeviceBuffer PagedLayers::blocks(std::uint32_t page) const {
  std::vector<std::int32_t> numbers(shape_.batch * slots() / page);
  std::iota(numbers.begin(), numbers.end(), 0);
  std::shuffle(numbers.begin(), numbers.end(), std::mt19937(3));
  return cuda::upload(numbers, kMeasuringBlocks);
}

kvlab_pages PagedLayers::make_pages(std::uint32_t page, bool by_head,
                                    const cuda::DeviceBuffer& blocks) const {
  const std::uint32_t slot = shape_.kv_heads * shape_.head_size;
  return {.blocks = blocks.as<std::int32_t>(),
          .page = static_cast<int>(page),
          .max_blocks = static_cast<int>(slots() / page),
          .block_stride = std::int64_t{page} * slot,
          .slot_stride = by_head ? shape_.head_size : slot,
          .head_stride = std::int64_t{by_head ? page : 1} * shape_.head_size};
}

double PagedLayers::microseconds(std::uint32_t page, bool by_head) const {
  const cuda::DeviceBuffer numbers = page == 0 ? cuda::DeviceBuffer() : blocks(page);
  const cuda::Stream stream;
  cuda::check(cudaDeviceSynchronize(), kMeasuringBlocks);
  const cuda::Graph graph(stream.get(), [&] {
    for (std::uint32_t layer = 0; layer < layers_; ++layer) {
      kernels::EvictingAttentionArgs args{};
      args.cache = cache(layer);
      if (page != 0) args.cache.pages = make_pages(page, by_head, numbers);
      args.policy.rules = zeroes_.as<kvlab_rule>();
      args.policy.seeds = zeroes_.as<std::uint64_t>();
      args.policy.sequence_ids = zeroes_.as<std::uint32_t>();
      args.now = now_.as<std::uint32_t>();
      args.q = q_.data();
      args.out = out_.data();
      args.workspace = workspace_.data();
      args.settled = true;
      cuda::check(window_.attend(window_, args, stream.get()), kMeasuringBlocks);
    }
  });
  const auto launch = [&] { graph.launch(stream.get()); };
  return median_milliseconds(stream.get(), launch, kPagedRepeats) * 1e3 / layers_;
}

}  // namespace

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

}  // namespace kvlab
