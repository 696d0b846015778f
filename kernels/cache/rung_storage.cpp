#include "kernels/cache/rung_storage.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "kernels/host/transfer.hpp"
#include "kernels/types.hpp"

namespace kvlab::kernels {
namespace {

constexpr const char* kWhat = "the cache's rungs";

}  // namespace

RungPlan::RungPlan(const SlotsConfig& config, const PairSlots& slots) {
  const int head_size = config.head_size, element = static_cast<int>(bytes_of(config.type));
  for (std::size_t at = 0; at < slots.first_slots().size(); ++at) {
    const auto layer = static_cast<std::uint32_t>(at / slots.pairs());
    DeviceLadder& ladder = ladders.emplace_back();
    ladder.first_row = rows;
    const std::vector<RungSlots> rungs = slots.rungs(layer, at % slots.pairs());
    std::uint32_t first_row = 0;
    for (std::size_t r = 0; r < rungs.size(); ++r) {
      const std::uint32_t held = slots.rows(at % slots.pairs(), rungs, r),
                          whole = (held + kRowsOfTile - 1) / kRowsOfTile * kRowsOfTile;
      const DeviceForm form = device_form(*rungs[r].form);
      const std::int64_t row = row_bytes(form, head_size, element);
      if (std::uint64_t{first_row} + whole > kMostSlots)
        throw std::invalid_argument(
            "a KV head's tiers have too many tokens; at most 2^30 are expected");
      ladder.rung[ladder.rungs++] = {form, rungs[r].slots, whole, first_row, bytes};
      first_row += whole;
      most_row_bytes = std::max(most_row_bytes, static_cast<int>(row));
      bytes += row * whole;
      padding += row * (whole - held);
    }
    rows += first_row;
    most_rows = std::max(most_rows, static_cast<int>(first_row));
    most_rungs = std::max(most_rungs, ladder.rungs);
  }
}

RungStorage::RungStorage(cuda::Arena& arena, const SlotsConfig& config, const PairSlots& slots)
    : pairs_(slots.pairs()),
      kv_heads_(static_cast<std::size_t>(config.kv_heads)),
      key_bytes_(config.key_bytes()),
      head_size_(config.head_size),
      element_(static_cast<int>(bytes_of(config.type))) {
  if (!config.coded()) return;
  const RungPlan plan(config, slots);
  ladders = arena.take<DeviceLadder>(plan.ladders.size());
  bytes = arena.take<std::byte>(static_cast<std::size_t>(plan.bytes));
  places = arena.take<std::uint32_t>(static_cast<std::size_t>(slots.total()));
  owners = arena.take<std::uint32_t>(static_cast<std::size_t>(plan.rows));
  counts = arena.take<std::int32_t>(plan.ladders.size() * kMostRungs);
  next_rows = arena.take<std::uint32_t>(plan.ladders.size());
  newest_keys = arena.take<std::byte>(pairs_ * key_bytes_);
  newest_values = arena.take<std::byte>(pairs_ * key_bytes_);
  extents = arena.take<std::int32_t>(plan.ladders.size());
  most_rows_ = plan.most_rows, most_row_bytes_ = plan.most_row_bytes;
  most_rungs_ = plan.most_rungs;
  nothing = arena.take<std::int32_t>(pairs_);
  newest = arena.take<std::int64_t>(pairs_);
}

void RungStorage::clear(const SlotsConfig& config, const PairSlots& slots) const {
  const RungPlan plan(config, slots);
  const auto clear = [](auto* part, std::size_t count) {
    cuda::check(cudaMemset(part, 0, count * sizeof *part), kWhat);
  };
  cuda::write(ladders, plan.ladders, kWhat);
  clear(bytes, static_cast<std::size_t>(plan.bytes));  // what no token has is a number
  clear(counts, plan.ladders.size() * kMostRungs);
  clear(next_rows, plan.ladders.size());
  clear(extents, plan.ladders.size());
  clear(nothing, pairs_);
  std::vector<std::int64_t> places_of_newest(pairs_);
  std::iota(places_of_newest.begin(), places_of_newest.end(), 0);
  cuda::write(newest, places_of_newest, kWhat);
}

void RungStorage::pretend(const PairSlots& slots, std::size_t at, std::size_t pair,
                          std::uint32_t live) const {
  const auto layer = static_cast<std::uint32_t>(at / pairs_);
  const std::vector<RungSlots> rungs = slots.rungs(layer, pair);
  const auto ladder = cuda::read(ladders + at, 1, nullptr, kWhat)[0];
  std::vector<std::uint32_t> rows, slot_of;
  std::vector<std::int32_t> on(kMostRungs);
  for (std::size_t r = 0; r < rungs.size(); ++r) {
    const DeviceRung& rung = ladder.rung[r];
    const auto left = live - static_cast<std::uint32_t>(rows.size());
    on[r] = static_cast<std::int32_t>(std::min(left, rung.slots - (r == 0 ? 1 : 0)));
    slot_of.resize(rung.first_row + rung.rows);
    for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(on[r]); ++i) {
      slot_of[rung.first_row + i] = static_cast<std::uint32_t>(rows.size());
      rows.push_back(rung.first_row + i);
    }
    constexpr int kNumbers = 0x2c;  // small ones, as fp16 and as bf16
    const auto row = row_bytes(rung.form, head_size_, element_);
    cuda::check(
        cudaMemset(bytes + rung.first_byte, kNumbers, static_cast<std::size_t>(row) * rung.rows),
        kWhat);
  }
  cuda::write(places + slots.first_slots()[at], rows, kWhat);
  cuda::write(owners + ladder.first_row, slot_of, kWhat);
  cuda::write(counts + at * kMostRungs, on, kWhat);
  cuda::write(next_rows + at, std::vector{static_cast<std::uint32_t>(on[0])}, kWhat);
  cuda::write(extents + at,
              std::vector{rows.empty() ? 0 : static_cast<std::int32_t>(rows.back() + 1)}, kWhat);
}

CodedCache RungStorage::coded(std::uint32_t layer, int sequence) const {
  const std::size_t first = static_cast<std::size_t>(sequence) * kv_heads_,
                    at = layer * pairs_ + first;
  return {.ladders = ladders + at,
          .bytes = bytes,
          .places = places,
          .owners = owners,
          .counts = counts + at * kMostRungs,
          .next_rows = next_rows + at,
          .newest_keys = newest_keys + first * key_bytes_,
          .newest_values = newest_values + first * key_bytes_,
          .extents = extents + at,
          .most_rows = most_rows_,
          .most_row_bytes = most_row_bytes_,
          .most_rungs = most_rungs_};
}

}  // namespace kvlab::kernels
