#include "kernels/cache/tier_storage.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "kernels/host/transfer.hpp"
#include "kernels/types.hpp"

namespace kvlab::kernels {
namespace {

constexpr const char* kWhat = "the cache's tiers";

}  // namespace

TierLayout::TierLayout(const KvCacheConfig& config, const PairSlots& slots) {
  const int head_size = config.head_size, element = static_cast<int>(bytes_of(config.type));
  for (std::size_t at = 0; at < slots.first_slots().size(); ++at) {
    const auto layer = static_cast<std::uint32_t>(at / slots.pairs());
    DeviceTierPlan& tier_plan = tier_plans.emplace_back();
    tier_plan.first_row = rows;
    const std::int64_t first_byte = bytes;
    const std::vector<TierSlots> tiers = slots.tiers(layer, at % slots.pairs());
    std::uint32_t first_row = 0;
    for (std::size_t r = 0; r < tiers.size(); ++r) {
      const std::uint32_t held = slots.rows(at % slots.pairs(), tiers, r),
                          whole = (held + kRowsOfTile - 1) / kRowsOfTile * kRowsOfTile;
      const DeviceFormat format = device_format(tiers[r].format);
      const std::int64_t row = row_bytes(format, head_size, element);
      if (std::uint64_t{first_row} + whole > kMaxSlots)
        throw std::invalid_argument(
            "a KV head's tiers have too many tokens; at most 2^30 are supported");
      tier_plan.tier[tier_plan.tiers++] = {format, tiers[r].slots, whole, first_row, bytes};
      first_row += whole;
      max_row_bytes = std::max(max_row_bytes, static_cast<int>(row));
      bytes += row * whole;
      padding += row * (whole - held);
    }
    regions.push_back({rows, first_row, first_byte, bytes - first_byte});
    rows += first_row;
    max_rows = std::max(max_rows, static_cast<int>(first_row));
    max_tiers = std::max(max_tiers, tier_plan.tiers);
  }
}

TierStorage::TierStorage(cuda::Arena& arena, const KvCacheConfig& config, const PairSlots& slots)
    : pairs_(slots.pairs()),
      kv_heads_(static_cast<std::size_t>(config.kv_heads)),
      key_bytes_(config.key_bytes()),
      head_size_(config.head_size),
      element_(static_cast<int>(bytes_of(config.type))) {
  if (!config.is_quantized()) return;
  const TierLayout plan(config, slots);
  regions_ = plan.regions;
  tier_plans = arena.take<DeviceTierPlan>(plan.tier_plans.size());
  bytes = arena.take<std::byte>(static_cast<std::size_t>(plan.bytes));
  row_of_slot = arena.take<std::uint32_t>(static_cast<std::size_t>(slots.total()));
  slot_of_row = arena.take<std::uint32_t>(static_cast<std::size_t>(plan.rows));
  counts = arena.take<std::int32_t>(plan.tier_plans.size() * kMaxDeviceTiers);
  next_rows = arena.take<std::uint32_t>(plan.tier_plans.size());
  newest_keys = arena.take<std::byte>(pairs_ * key_bytes_);
  newest_values = arena.take<std::byte>(pairs_ * key_bytes_);
  extents = arena.take<std::int32_t>(plan.tier_plans.size());
  const std::size_t channels = plan.tier_plans.size() * static_cast<std::size_t>(config.head_size);
  if (config.centres_keys()) centres = arena.take<float>(channels);
  if (config.has_constant_centres()) constant_centres = arena.take<float>(channels);
  max_rows_ = plan.max_rows, max_row_bytes_ = plan.max_row_bytes;
  max_tiers_ = plan.max_tiers;
  nothing = arena.take<std::int32_t>(pairs_);
  newest = arena.take<std::int64_t>(pairs_);
}

void TierStorage::initialize(const KvCacheConfig& config, const PairSlots& slots,
                             cudaStream_t stream) const {
  const TierLayout plan(config, slots);
  cuda::enqueue_write(tier_plans, plan.tier_plans, stream, kWhat);
  cuda::enqueue_zeros(nothing, pairs_, stream, kWhat);
  std::vector<std::int64_t> newest_slots(pairs_);
  std::iota(newest_slots.begin(), newest_slots.end(), 0);
  cuda::enqueue_write(newest, newest_slots, stream, kWhat);
  if (!constant_centres) return;
  const auto dim = static_cast<std::size_t>(head_size_);
  std::vector<float> constants(config.pairs.size() * dim);
  for (std::size_t at = 0; at < config.pairs.size(); ++at)
    std::ranges::copy(config.pairs[at].centre,
                      constants.begin() + static_cast<std::ptrdiff_t>(at * dim));
  cuda::enqueue_write(constant_centres, constants, stream, kWhat);
}

void TierStorage::start(std::size_t first, std::size_t count, cudaStream_t stream) const {
  if (count == 0) return;
  // Unused rows must hold finite numbers, because kernels read whole tiles. The sequence that had
  // the rows before may have left infinities or NaN in them.
  const TierRegion &begin = regions_[first], &last = regions_[first + count - 1];
  cuda::enqueue_zeros(bytes + begin.first_byte,
                      static_cast<std::size_t>(last.first_byte + last.bytes - begin.first_byte),
                      stream, kWhat);
  cuda::enqueue_zeros(counts + first * kMaxDeviceTiers, count * kMaxDeviceTiers, stream, kWhat);
  cuda::enqueue_zeros(next_rows + first, count, stream, kWhat);
  cuda::enqueue_zeros(extents + first, count, stream, kWhat);
  const auto dim = static_cast<std::size_t>(head_size_);
  if (constant_centres)
    cuda::copy(centres + first * dim, constant_centres + first * dim, count * dim, stream);
  else if (centres)
    cuda::enqueue_zeros(centres + first * dim, count * dim, stream, kWhat);
}

void TierStorage::copy(std::size_t from, std::size_t to, std::size_t count,
                       cudaStream_t stream) const {
  for (std::size_t pair = 0; pair < count; ++pair) {
    const TierRegion &source = regions_[from + pair], &target = regions_[to + pair];
    cuda::copy(bytes + target.first_byte, bytes + source.first_byte,
               static_cast<std::size_t>(source.bytes), stream);
    cuda::copy(slot_of_row + target.first_row, slot_of_row + source.first_row,
               static_cast<std::size_t>(source.rows), stream);
  }
  cuda::copy(counts + to * kMaxDeviceTiers, counts + from * kMaxDeviceTiers,
             count * kMaxDeviceTiers, stream);
  cuda::copy(next_rows + to, next_rows + from, count, stream);
  cuda::copy(extents + to, extents + from, count, stream);
  const auto dim = static_cast<std::size_t>(head_size_);
  if (centres) cuda::copy(centres + to * dim, centres + from * dim, count * dim, stream);
}

void TierStorage::pretend(const PairSlots& slots, std::size_t at, const TierCounts& live) const {
  const auto tier_plan = cuda::read(tier_plans + at, 1, nullptr, kWhat)[0];
  std::vector<std::uint32_t> rows, slot_of;
  std::vector<std::int32_t> on(kMaxDeviceTiers);
  for (std::size_t r = 0; r < live.tier_plan().size(); ++r) {
    const DeviceTier& tier = tier_plan.tier[r];
    on[r] = static_cast<std::int32_t>(live.on(r));
    slot_of.resize(tier.first_row + tier.rows);
    for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(on[r]); ++i) {
      slot_of[tier.first_row + i] = static_cast<std::uint32_t>(rows.size());
      rows.push_back(tier.first_row + i);
    }
    constexpr int kNumbers =
        0x2c;  // this byte, repeated, is a small finite number in fp16 and in bf16
    const auto row = row_bytes(tier.format, head_size_, element_);
    cuda::check(
        cudaMemset(bytes + tier.first_byte, kNumbers, static_cast<std::size_t>(row) * tier.rows),
        kWhat);
  }
  cuda::write(row_of_slot + slots.first_slots()[at], rows, kWhat);
  cuda::write(slot_of_row + tier_plan.first_row, slot_of, kWhat);
  cuda::write(counts + at * kMaxDeviceTiers, on, kWhat);
  cuda::write(next_rows + at, std::vector{static_cast<std::uint32_t>(on[0])}, kWhat);
  cuda::write(extents + at,
              std::vector{rows.empty() ? 0 : static_cast<std::int32_t>(rows.back() + 1)}, kWhat);
}

float* TierStorage::centres_of(std::uint32_t layer, int sequence) const {
  if (!centres) return nullptr;
  const std::size_t pair = layer * pairs_ + static_cast<std::size_t>(sequence) * kv_heads_;
  return centres + pair * static_cast<std::size_t>(head_size_);
}

QuantizedCache TierStorage::quantized_cache(std::uint32_t layer, int sequence) const {
  const std::size_t first = static_cast<std::size_t>(sequence) * kv_heads_,
                    at = layer * pairs_ + first;
  return {.tier_plans = tier_plans + at,
          .bytes = bytes,
          .row_of_slot = row_of_slot,
          .slot_of_row = slot_of_row,
          .counts = counts + at * kMaxDeviceTiers,
          .next_rows = next_rows + at,
          .newest_keys = newest_keys + first * key_bytes_,
          .newest_values = newest_values + first * key_bytes_,
          .extents = extents + at,
          .max_rows = max_rows_,
          .max_row_bytes = max_row_bytes_,
          .max_tiers = max_tiers_,
          .centres = centres_of(layer, sequence)};
}

}  // namespace kvlab::kernels
