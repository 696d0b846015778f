// Checks that the device quantizes tokens to the same bits as the host, and attends to them
// correctly.
#include <cmath>
#include <random>
#include <utility>

#include "kernels/evict/eviction_kernels.hpp"
#include "kernels/loaded_code.hpp"
#include "kernels/quantized/centre.hpp"
#include "kernels/quantized/tiers.hpp"
#include "policies/rule/eviction_order.hpp"
#include "policies/tiers/format.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/kernels/attention_reference.hpp"
#include "tests/skip.hpp"
#include "traces/base/numeric/dtype.hpp"
#include "traces/base/numeric/quantize.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

constexpr int kPairs = 7;

/// Random rows, and special ones: constant rows, zeros, rows with one outlier, rows that are too
/// small for an fp16 scale, and rows of large numbers.
std::vector<float> rows_of(Type type, int head_size) {
  std::mt19937 random(static_cast<unsigned>(head_size));
  std::vector<float> rows =
      random_values(type, static_cast<std::size_t>(kPairs * head_size), random);
  const auto row = [&](int pair) { return rows.begin() + pair * head_size; };
  std::fill_n(row(1), head_size, 0.75f);
  std::fill_n(row(2), head_size, 0.0f);
  row(3)[5] = 100;
  for (int d = 0; d < head_size; ++d) {
    row(4)[d] = round_to(type, row(4)[d] * 1e-7f);
    row(5)[d] = round_to(type, row(5)[d] * 300);
  }
  return rows;
}

bool is_floating(const KvFormat& format) { return format.key->encoding == Encoding::e4m3_block; }

DeviceFormat device_format(const KvFormat& format) {
  return {static_cast<std::uint8_t>(format.key->bits),
          static_cast<std::uint8_t>(format.value->bits), is_floating(format)};
}

/// Dequantizes a row.
std::vector<float> read_back(const RowPart& part, const KvFormat& format, bool key, int head_size) {
  const int bits = (key ? format.key : format.value)->bits;
  const std::byte* const metadata = part.metadata;
  std::vector<float> row;
  for (int d = 0; d < head_size; ++d) {
    const int bit = quantized_bit(key, bits, part.row, d, head_size / 32);
    const auto quantized =
        static_cast<std::uint8_t>(part.data[bit / 8]) >> bit % 8 & ((1 << bits) - 1);
    if (is_floating(format)) {
      const int exponent = quantized >> 3 & 15, fraction = quantized & 7;
      const float value = exponent > 0 ? std::ldexp(static_cast<float>(8 + fraction), exponent - 10)
                                       : std::ldexp(static_cast<float>(fraction), -9);
      row.push_back(
          std::ldexp(quantized >> 7 ? -value : value, static_cast<int>(metadata[d / 32]) - 127));
      continue;
    }
    std::uint16_t two[2];
    std::copy_n(metadata + d / 32 * 4, 4, reinterpret_cast<std::byte*>(two));
    const float product = static_cast<float>(quantized) * f16_to_float(two[0]);
    row.push_back(product + f16_to_float(two[1]));
  }
  return row;
}

void check_format_of(const KvFormat& format, Type type, int head_size) {
  const auto keys = rows_of(type, head_size);
  std::vector<float> values(keys.rbegin(), keys.rend());
  const int element = static_cast<int>(bytes_of(type));
  const DeviceFormat own = device_format(format);
  const std::int64_t row = row_bytes(own, head_size, element);
  std::vector<DeviceTierPlan> tier_plans(kPairs);
  std::vector<std::int64_t> first_slot;
  for (int pair = 0; pair < kPairs; ++pair) {
    auto& tier_plan = tier_plans[static_cast<std::size_t>(pair)];
    tier_plan.tiers = 1;
    tier_plan.first_row = pair * 16;
    tier_plan.tier[0] = {own, 3, 16, 0, pair * 16 * row};
    first_slot.push_back(pair * 3);
  }
  const DeviceArray<DeviceTierPlan> device_tier_plans{std::span<const DeviceTierPlan>(tier_plans)};
  const DeviceArray<std::int64_t> first_slots{std::span<const std::int64_t>(first_slot)};
  const DeviceArray<std::byte> bytes(static_cast<std::size_t>(kPairs * 16 * row));
  const DeviceArray<std::byte> newest_keys{std::span<const std::byte>(encode(type, keys))},
      newest_values{std::span<const std::byte>(encode(type, values))};
  const DeviceArray<std::uint32_t> row_of_slot(kPairs * 3), slot_of_row(kPairs * 16),
      positions(kPairs * 3), now{std::span<const std::uint32_t>(std::vector{41u})};
  const DeviceArray<std::uint32_t> next_rows{
      std::span<const std::uint32_t>(std::vector(kPairs, 2u))};
  const DeviceArray<std::int32_t> extents(kPairs), counts(kPairs * kMaxDeviceTiers),
      lengths(kPairs), next_slots{std::span<const std::int32_t>(std::vector(kPairs, 1))};
  const QuantizedCache quantized_cache{device_tier_plans.data(),
                                       bytes.data(),
                                       row_of_slot.data(),
                                       slot_of_row.data(),
                                       counts.data(),
                                       next_rows.data(),
                                       newest_keys.data(),
                                       newest_values.data(),
                                       extents.data(),
                                       16,
                                       static_cast<int>(row),
                                       8};
  const kvlab_cache_view cache{.type = type,
                               .sequences = 1,
                               .query_heads = kPairs,
                               .kv_heads = kPairs,
                               .head_size = head_size,
                               .softmax_scale = 1,
                               .max_slots = 3,
                               .first_slot = first_slots.data(),
                               .keys = newest_keys.data(),
                               .values = newest_values.data(),
                               .positions = positions.data(),
                               .lengths = lengths.data(),
                               .next_slots = next_slots.data()};
  check_cuda(store_newest(cache, quantized_cache, now.data(), nullptr));
  const auto written = bytes.to_host();
  for (int pair = 0; pair < kPairs; ++pair)
    for (const bool key : {true, false}) {
      const auto& from = key ? keys : values;
      std::vector<float> expected(from.begin() + pair * head_size,
                                  from.begin() + (pair + 1) * head_size);
      if (!format.exact()) {
        hadamard_rotate(expected);
        quantize_row(expected, (key ? format.key : format.value)->bits, is_floating(format));
      }
      std::byte* const all = const_cast<std::byte*>(written.data());
      const RowPart part = part_of(all, tier_plans[static_cast<std::size_t>(pair)].tier[0], 2, key,
                                   head_size, element);
      const std::size_t wide = static_cast<std::size_t>(head_size * element);
      const std::vector<float> found = format.exact() ? decode(type, std::span(part.data, wide))
                                                      : read_back(part, format, key, head_size);
      CAPTURE(format.name(), static_cast<int>(type), head_size, pair, key);
      CHECK(found == expected);
    }
  CHECK(row_of_slot.to_host()[4] == 2);
  CHECK(slot_of_row.to_host()[16 + 2] == 1);
  CHECK(positions.to_host()[4] == 41);
  CHECK(counts.to_host()[kMaxDeviceTiers] == 3);
  CHECK(extents.to_host()[1] == 3);
}

}  // namespace

TEST_CASE("A token in a tier has the same quantized values as on the host, bit for bit", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const KvFormat& format : kKvFormats)
    for (const Type type : {KVLAB_F32, KVLAB_BF16, KVLAB_F16})
      for (const int head_size : {64, 96, 128, 256})
        if (!format.kivi) check_format_of(format, type, head_size);
}

namespace {

/// Computes the centres of three heads' keys and the centred keys on the device, and compares both
/// with the host's. The first two tokens of each head are live, and the others are new.
void check_centres_of(Type type, int head_size) {
  constexpr int kHeads = 3, kSlots = 150, kLive = 2, kFirst = 3, kTokens = 100;
  std::mt19937 random(3);
  const auto dim = static_cast<std::size_t>(head_size);
  std::vector<float> keys = random_values(type, std::size_t{kHeads} * kSlots * dim, random);
  const DeviceArray<std::byte> bytes{std::span<const std::byte>(encode(type, keys))};
  const DeviceArray<std::int64_t> first_slots{
      std::span<const std::int64_t>(std::vector<std::int64_t>{0, kSlots, 2 * kSlots})};
  const DeviceArray<std::int32_t> lengths{
      std::span<const std::int32_t>(std::vector(kHeads, kLive))};
  const DeviceArray<float> centres(kHeads * dim);
  const kvlab_cache_view cache{.type = type,
                               .sequences = 1,
                               .query_heads = kHeads,
                               .kv_heads = kHeads,
                               .head_size = head_size,
                               .softmax_scale = 1,
                               .max_slots = kSlots,
                               .first_slot = first_slots.data(),
                               .keys = bytes.data(),
                               .lengths = lengths.data()};
  check_cuda(find_centres(cache, kCentreKeys, centres.data(), nullptr));
  check_cuda(subtract_centres(cache, kFirst, kTokens, centres.data(), nullptr));
  std::vector<float> expected;
  for (std::size_t head = 0; head < kHeads; ++head)
    for (std::size_t d = 0; d < dim; ++d) {
      CentreChannel channel;
      for (std::size_t i = 0; i < kCentreKeys; ++i)
        channel.add(keys[(head * kSlots + i) * dim + d]);
      expected.push_back(channel.mean());
    }
  CAPTURE(static_cast<int>(type), head_size);
  CHECK(centres.to_host() == expected);
  for (std::size_t head = 0; head < kHeads; ++head)
    for (std::size_t i = kLive + kFirst; i < kLive + kFirst + kTokens; ++i)
      for (std::size_t d = 0; d < dim; ++d) {
        float& key = keys[(head * kSlots + i) * dim + d];
        key = round_to(type, key - expected[head * dim + d]);
      }
  CHECK(decode(type, bytes.to_host()) == keys);
}

}  // namespace

TEST_CASE("Centres and centred keys equal those of the host, bit for bit", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_F32, KVLAB_BF16, KVLAB_F16})
    for (const int head_size : {64, 96, 128, 256}) check_centres_of(type, head_size);
}

namespace {

/// The layout of EvictionCandidate.
struct First {
  EvictionKey key{~0u, ~std::uint64_t{0}, ~0u};
  int slot = -1;
};

/// The rows of a layer with random quantized values, to which the plain and the fast kernel attend.
class RandomTiers {
 public:
  /// `exact_keys`: factor of the keys in exact tiers.
  RandomTiers(Type type, int head_size, int group, const std::vector<KvFormat>& tier_plan,
              float exact_keys = 1)
      : type_(type),
        head_size_(head_size),
        group_(group),
        formats_(tier_plan),
        exact_keys_(exact_keys) {
    for (int pair = 0; pair < kPairs; ++pair) add_pair(pair, tier_plan);
    for (const std::uint32_t live : lives_) total_ += live;
    q_ = random_values(type, static_cast<std::size_t>(kPairs * group * head_size), random_);
  }

  struct Result {
    std::vector<float> out, lse;
  };
  Result attend(bool plain) const {
    const DeviceArray<DeviceTierPlan> tier_plans{std::span<const DeviceTierPlan>(tier_plans_)};
    const DeviceArray<std::byte> bytes{std::span<const std::byte>(bytes_)},
        q{std::span<const std::byte>(encode(type_, q_))}, out(q_.size() * bytes_of(type_));
    const DeviceArray<std::uint32_t> row_of_slot{std::span<const std::uint32_t>(row_of_slot_)},
        slot_of_row{std::span<const std::uint32_t>(slot_of_row_)}, positions(total_), now(1),
        ids(1), next_rows{std::span<const std::uint32_t>(std::vector(kPairs, 0u))};
    const DeviceArray<std::int32_t> counts{std::span<const std::int32_t>(counts_)},
        extents{std::span<const std::int32_t>(extents_)}, lengths(live()),
        next_slots{std::span<const std::int32_t>(newest())};
    const DeviceArray<std::int64_t> first_slots{std::span<const std::int64_t>(first_slots_)};
    const DeviceArray<kvlab_rule> rules(kPairs);
    const DeviceArray<std::uint64_t> seeds(1);
    const DeviceArray<float> lse(static_cast<std::size_t>(kPairs * group_));
    QuantizedCache quantized_cache{.tier_plans = tier_plans.data(),
                                   .bytes = bytes.data(),
                                   .row_of_slot = row_of_slot.data(),
                                   .slot_of_row = slot_of_row.data(),
                                   .counts = counts.data(),
                                   .next_rows = next_rows.data(),
                                   .extents = extents.data(),
                                   .max_rows = max_rows_,
                                   .max_row_bytes = max_row_bytes_,
                                   .max_tiers = kMaxDeviceTiers};
    const kvlab_cache_view cache{.type = type_,
                                 .sequences = 1,
                                 .query_heads = kPairs * group_,
                                 .kv_heads = kPairs,
                                 .head_size = head_size_,
                                 .softmax_scale = 0.1f,
                                 .max_slots = static_cast<int>(*std::ranges::max_element(lives_)),
                                 .first_slot = first_slots.data(),
                                 .keys = bytes.data(),
                                 .values = bytes.data(),
                                 .positions = positions.data(),
                                 .lengths = lengths.data(),
                                 .next_slots = next_slots.data()};
    const EvictionKernels kernels = plain ? plain_kernels({}) : observing_kernels({});
    const DeviceArray<std::byte> workspace(kernels.attention_workspace(cache, true));
    const EvictingAttentionArgs args{
        {.cache = cache,
         .policy = {.rules = rules.data(), .seeds = seeds.data(), .sequence_ids = ids.data()},
         .now = now.data(),
         .q = q.data(),
         .out = out.data(),
         .lse = lse.data(),
         .workspace = workspace.data()},
        &quantized_cache};
    check_cuda(kernels.attend(kernels, args, nullptr));
    return {decode(type_, out.to_host()), lse.to_host()};
  }
  std::size_t tokens() const { return total_; }
  int head_size() const { return head_size_; }
  std::string name() const {
    std::string formats;
    for (const KvFormat& format : formats_) formats += format.name() + " ";
    return formats + "type " + std::to_string(static_cast<int>(type_)) + " head size " +
           std::to_string(head_size_) + " group " + std::to_string(group_);
  }
  /// In fp8: gives the last token of each pair a value of 0, and logits of plus or minus several
  /// hundred.
  void add_empty_values() {
    constexpr unsigned kExponent = 12;  // keys are this many powers of two larger
    for (std::size_t pair = 0; pair < tier_plans_.size(); ++pair) {
      const DeviceTier& tier = tier_plans_[pair].tier[0];
      const auto last = static_cast<std::uint32_t>(counts_[pair * kMaxDeviceTiers]) - 1;
      const int element = static_cast<int>(bytes_of(type_));
      for (const bool key : {true, false}) {
        const RowPart part = part_of(bytes_.data(), tier, last, key, head_size_, element);
        for (int b = 0; b < head_size_ / 32; ++b) {
          auto& exponent = reinterpret_cast<std::uint8_t&>(part.metadata[b]);
          exponent = static_cast<std::uint8_t>(key ? exponent + kExponent : 0);
        }
      }
    }
  }

  /// The rows of all tokens, and their contents.
  struct State {
    std::vector<std::byte> bytes;
    std::vector<std::uint32_t> row_of_slot, slot_of_row, next_rows;
    std::vector<std::int32_t> counts;
  };
  State state() const {
    return {bytes_, row_of_slot_, slot_of_row_, std::vector(kPairs, 0u), counts_};
  }
  /// The state after a step in which `firsts` [pair, kMaxDeviceTiers] are the first victims. A pair
  /// is a sequence; the fifth one is idle.
  State demote(const std::vector<First>& firsts) const {
    const DeviceArray<DeviceTierPlan> tier_plans{std::span<const DeviceTierPlan>(tier_plans_)};
    const DeviceArray<std::byte> bytes{std::span<const std::byte>(bytes_)};
    const std::vector nows{41u, 41u, 41u, 41u, kIdle, 41u, 41u};
    const DeviceArray row_of_slot{std::span(row_of_slot_)}, slot_of_row{std::span(slot_of_row_)},
        now{std::span(nows)};
    const DeviceArray<std::uint32_t> next_rows(kPairs);
    const DeviceArray<std::int32_t> counts{std::span<const std::int32_t>(counts_)}, extents(kPairs);
    const DeviceArray<std::int64_t> first_slots{std::span<const std::int64_t>(first_slots_)};
    const DeviceArray<kvlab_rule> rules(kPairs);
    const DeviceArray candidates{std::span(firsts)};
    QuantizedCache quantized_cache{};
    quantized_cache.tier_plans = tier_plans.data(), quantized_cache.bytes = bytes.data(),
    quantized_cache.row_of_slot = row_of_slot.data();
    quantized_cache.slot_of_row = slot_of_row.data(), quantized_cache.counts = counts.data(),
    quantized_cache.extents = extents.data();
    quantized_cache.next_rows = next_rows.data(), quantized_cache.max_tiers = kMaxDeviceTiers;
    EvictingAttentionArgs args{};
    args.cache.type = type_, args.cache.sequences = kPairs, args.cache.kv_heads = 1;
    args.cache.head_size = head_size_, args.cache.first_slot = first_slots.data();
    args.quantized_cache = &quantized_cache, args.policy.rules = rules.data(),
    args.now = now.data();
    check_cuda(
        demote_pairs(args, reinterpret_cast<const EvictionCandidate*>(candidates.data()), nullptr));
    return {bytes.to_host(), row_of_slot.to_host(), slot_of_row.to_host(), next_rows.to_host(),
            counts.to_host()};
  }
  const DeviceTierPlan& tier_plan(std::size_t pair) const { return tier_plans_[pair]; }
  std::size_t at(std::size_t pair, int slot) const {
    return static_cast<std::size_t>(first_slots_[pair] + slot);
  }
  std::size_t owner_at(std::size_t pair, std::uint32_t row) const {
    return static_cast<std::size_t>(tier_plans_[pair].first_row + row);
  }
  /// The key or value that is read from a row. Quantized ones are still Hadamard-rotated.
  std::vector<float> read(const State& from, std::size_t pair, std::uint32_t row, bool key) const {
    const DeviceTier& tier = tier_plan(pair).tier[tier_of(tier_plan(pair), row)];
    const int element = static_cast<int>(bytes_of(type_));
    const RowPart part = part_of(const_cast<std::byte*>(from.bytes.data()), tier,
                                 row - tier.first_row, key, head_size_, element);
    if (tier.format.exact())
      return decode(type_, std::span(part.data, static_cast<std::size_t>(head_size_ * element)));
    return read_back(part, *std::ranges::find(kKvFormats, tier.format, device_format), key,
                     head_size_);
  }

 private:
  /// Adds a pair. The number of its tokens and whether its tiers are full depend on `pair`.
  void add_pair(int pair, const std::vector<KvFormat>& tier_plan) {
    DeviceTierPlan own{.tiers = static_cast<int>(tier_plan.size()),
                       .first_row = static_cast<std::int64_t>(slot_of_row_.size())};
    std::uint32_t first_row = 0, live = 0;
    const int element = static_cast<int>(bytes_of(type_));
    first_slots_.push_back(static_cast<std::int64_t>(row_of_slot_.size()));
    std::vector<std::uint32_t> rows;
    for (std::size_t r = 0; r < tier_plan.size(); ++r) {
      const DeviceFormat format = device_format(tier_plan[r]);
      const auto slots = static_cast<std::uint32_t>(pair == 0 ? 1 : 5 + 37 * pair + 11 * r),
                 whole = (slots + 15) / 16 * 16;
      const std::int64_t row = row_bytes(format, head_size_, element);
      own.tier[r] = {format, slots, whole, first_row, static_cast<std::int64_t>(bytes_.size())};
      const std::uint32_t count = pair == 2 && r > 0 ? 0 : slots;
      counts_.resize(static_cast<std::size_t>(pair * kMaxDeviceTiers) + r + 1);
      counts_.back() = static_cast<std::int32_t>(count);
      bytes_.resize(bytes_.size() + static_cast<std::size_t>(row * whole));
      for (std::uint32_t i = 0; i < whole; ++i) draw_row(own.tier[r], i);
      for (std::uint32_t i = 0; i < count; ++i) rows.push_back(first_row + i);
      first_row += whole, live += count;
      max_row_bytes_ = std::max(max_row_bytes_, static_cast<int>(row));
    }
    counts_.resize(static_cast<std::size_t>(pair + 1) * kMaxDeviceTiers);
    extents_.push_back(static_cast<std::int32_t>(rows.back() + 1));
    std::ranges::shuffle(rows, random_);
    slot_of_row_.resize(slot_of_row_.size() + first_row);
    for (std::uint32_t slot = 0; slot < live; ++slot)
      slot_of_row_[static_cast<std::size_t>(own.first_row) + rows[slot]] = slot;
    row_of_slot_.insert(row_of_slot_.end(), rows.begin(), rows.end());
    lives_.push_back(live);
    tier_plans_.push_back(own);
    max_rows_ = std::max(max_rows_, static_cast<int>(first_row));
  }
  void draw_row(const DeviceTier& tier, std::uint32_t row) {
    const int element = static_cast<int>(bytes_of(type_));
    for (const bool key : {true, false}) {
      const RowPart part = part_of(bytes_.data(), tier, row, key, head_size_, element);
      const auto wide = static_cast<std::size_t>(data_bytes(tier.format, key, head_size_, element));
      if (tier.format.exact()) {
        auto values = random_values(type_, static_cast<std::size_t>(head_size_), random_);
        for (float& value : values) value *= key ? exact_keys_ : 1;
        std::ranges::copy(encode(type_, values), part.data);
        continue;
      }
      for (std::size_t i = 0; part.row == 0 && i < wide * kRowsOfTile; ++i) {
        auto byte = static_cast<std::uint8_t>(random_());
        if (tier.format.floating && (byte & 0x7f) == 0x7f) byte ^= 1;  // avoids NaN
        part.data[i] = std::byte{byte};
      }
      for (int b = 0; b < head_size_ / 32; ++b) draw_metadata(tier.format, key, part, b);
    }
  }
  void draw_metadata(const DeviceFormat& format, bool key, const RowPart& part, int b) {
    if (format.floating) {
      part.metadata[b] = std::byte{static_cast<std::uint8_t>(118 + random_() % 3)};
      return;
    }
    const auto levels = static_cast<float>((1 << format.bits(key)) - 1);
    const float range = 8 + static_cast<float>(random_() % 8);
    const std::uint16_t two[] = {float_to_f16(range / levels), float_to_f16(-range * 0.6f)};
    std::copy_n(reinterpret_cast<const std::byte*>(two), 4, part.metadata + b * 4);
  }
  std::span<const std::int32_t> live() const {
    return {reinterpret_cast<const std::int32_t*>(lives_.data()), lives_.size()};
  }
  std::vector<std::int32_t> newest() const {
    std::vector<std::int32_t> slots;
    for (const std::uint32_t live : lives_) slots.push_back(static_cast<std::int32_t>(live) - 1);
    return slots;
  }

  Type type_;
  int head_size_, group_;
  std::vector<KvFormat> formats_;
  float exact_keys_;
  std::mt19937 random_{5};
  std::vector<DeviceTierPlan> tier_plans_;
  std::vector<std::byte> bytes_;
  std::vector<std::uint32_t> row_of_slot_, slot_of_row_, lives_;
  std::vector<std::int32_t> counts_, extents_;
  std::vector<std::int64_t> first_slots_;
  std::vector<float> q_;
  std::size_t total_ = 0;
  int max_rows_ = 0, max_row_bytes_ = 0;
};

void check_attention(const RandomTiers& tiers) {
  const auto plain = tiers.attend(true), fast = tiers.attend(false);
  const int head_size = tiers.head_size();
  CAPTURE(tiers.name(), tiers.tokens());
  double worst = 0, scale = 0;
  std::size_t at = 0, wrong = 0;
  for (std::size_t i = 0; i < plain.out.size(); ++i) {
    const double error = std::fabs(static_cast<double>(plain.out[i]) - double{fast.out[i]});
    scale = std::max(scale, std::fabs(double{plain.out[i]}));
    wrong += !(error <= 0.02 * std::max(1.0, scale));
    if (!(error <= worst)) worst = error, at = i;
  }
  CAPTURE(worst, scale, wrong, at, at / head_size, at % head_size, plain.out[at], fast.out[at]);
  CHECK(wrong == 0);
  double worst_lse = 0;
  for (std::size_t i = 0; i < plain.lse.size(); ++i)
    if (const double error = std::fabs(double{plain.lse[i]} - double{fast.lse[i]});
        !(error <= worst_lse))
      worst_lse = error, at = i;
  CAPTURE(worst_lse, at, plain.lse[at], fast.lse[at]);
  CHECK(worst_lse < 2e-3);
}
void check_attention(Type type, int head_size, int group, const std::vector<KvFormat>& tier_plan) {
  check_attention(RandomTiers(type, head_size, group, tier_plan));
}

}  // namespace

TEST_CASE("Attention over tiers by tensor cores equals the plain attention", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16})
    for (const int head_size : {64, 96, 128, 256}) {
      for (const KvFormat& format : kKvFormats)
        if (!format.kivi) check_attention(type, head_size, 3, {format});
      for (const int group : {1, 4, 8})
        check_attention(
            type, head_size, group,
            {kKvFormats[0], kKvFormats[1], kKvFormats[2], kKvFormats[4], kKvFormats[5]});
    }
}

/// With two multiprocessors, a warp handles many tiles of a pair. So it continues from the exact
/// tiers' sums when it comes to the quantized ones, and from the sums of the tiles before.
TEST_CASE("Attention over tiers is correct if a warp handles many tiles", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const SmallerGpu small(0, 2);
  for (const Type type : {KVLAB_BF16, KVLAB_F16})
    for (const int head_size : {64, 96, 128, 256})
      for (const int group : {1, 4, 8}) {
        check_attention(type, head_size, group, {kKvFormats[0]});
        check_attention(
            type, head_size, group,
            {kKvFormats[0], kKvFormats[1], kKvFormats[2], kKvFormats[4], kKvFormats[5]});
      }
}

TEST_CASE("Attention over tiers is correct if exact tokens have much larger logits", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const int multiprocessors : {0, 2}) {
    const SmallerGpu small(0, multiprocessors);
    for (const Type type : {KVLAB_BF16, KVLAB_F16})
      for (const float exact_keys : {16.0f, 64.0f, 256.0f})
        for (const int group : {1, 4, 8})
          check_attention(
              {type,
               64,
               group,
               {kKvFormats[0], kKvFormats[1], kKvFormats[2], kKvFormats[4], kKvFormats[5]},
               exact_keys});
  }
}

/// In fp8 the scale of a block of zeros is 0. So the product of such a token's weight and scale is
/// 0, however large the weight is.
TEST_CASE("Attention over tiers is correct if tokens with large logits have values of 0", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const int multiprocessors : {0, 2}) {
    const SmallerGpu small(0, multiprocessors);
    for (const KvFormat& format : kKvFormats)
      for (const int group : {1, 4, 8}) {
        if (!is_floating(format) || format.kivi) continue;
        RandomTiers tiers(KVLAB_BF16, 64, group, {format});
        tiers.add_empty_values();
        check_attention(tiers);
      }
  }
}

/// With head size 256, these plans have a ring of one stage. One is for an A100 with eight query
/// heads per KV head, the other for GPUs with 99 KB of shared memory and four query heads per KV
/// head.
TEST_CASE("Attention over tiers equals the plain attention with a smaller GPU's plans", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const auto& [shared_bytes, group] : {std::pair{166'912, 8}, {101'376, 4}}) {
    const SmallerGpu small(shared_bytes);
    for (const Type type : {KVLAB_BF16, KVLAB_F16})
      for (const int head_size : {64, 128, 256})
        check_attention(
            type, head_size, group,
            {kKvFormats[0], kKvFormats[1], kKvFormats[2], kKvFormats[4], kKvFormats[5]});
  }
}

namespace {

/// The row after it is demoted from tier `from` to tier `to`, with the quantizations of
/// demotion_path().
std::vector<float> demoted(std::vector<float> row, const DeviceTierPlan& tier_plan, int from,
                           unsigned to, bool key) {
  bool is_quantized = !tier_plan.tier[from].format.exact();
  while (static_cast<unsigned>(from++) < to) {
    const DeviceFormat format = tier_plan.tier[from].format;
    if (format == tier_plan.tier[from - 1].format) continue;
    if (!std::exchange(is_quantized, true)) hadamard_rotate(row);
    quantize_row(row, format.bits(key), format.floating);
  }
  return row;
}

/// Compares the demotions of a step with the rule. All tiers are full, with these exceptions: in
/// pair 2 only the first tier is full; tier 1 of pair 3 has only protected tokens; in pair 5, the
/// tokens of tier 2 and of lower tiers come last in the eviction order.
void check_steps(Type type, int head_size, const std::vector<KvFormat>& formats) {
  const RandomTiers tiers(type, head_size, 1, formats);
  const auto before = tiers.state();
  std::vector<First> firsts(kPairs * kMaxDeviceTiers);
  for (std::size_t pair = 0; pair < kPairs; ++pair)
    for (unsigned r = 0; r < formats.size(); ++r) {
      const DeviceTierPlan& tier_plan = tiers.tier_plan(pair);
      const unsigned row =
          tier_plan.tier[r].first_row + std::min(tier_plan.tier[r].slots - 1, 3 * r);
      const EvictionKey key{pair == 3 && r == 1, pair == 5 && r > 1 ? 900u : 100u - r, 7};
      if (before.counts[pair * kMaxDeviceTiers + r] > 0)
        firsts[pair * kMaxDeviceTiers + r] = {
            key, static_cast<int>(before.slot_of_row[tiers.owner_at(pair, row)])};
    }
  const auto after = tiers.demote(firsts);
  auto expected = before;
  for (std::size_t pair = 0; pair < kPairs; ++pair) {
    if (pair == 4) continue;  // idle
    CAPTURE(pair, static_cast<int>(type), head_size, formats.size());
    const DeviceTierPlan& tier_plan = tiers.tier_plan(pair);
    const First* going = &firsts[pair * kMaxDeviceTiers];
    CHECK(after.next_rows[pair] == before.row_of_slot[tiers.at(pair, going->slot)]);
    bool had_free_slot = false;
    for (unsigned r = 1; r < formats.size() && !had_free_slot; ++r) {
      const First& first = firsts[pair * kMaxDeviceTiers + r];
      had_free_slot = first.slot < 0;
      if (!had_free_slot && !(first.key < going->key)) continue;
      const std::uint32_t from = before.row_of_slot[tiers.at(pair, going->slot)],
                          to = had_free_slot ? tier_plan.tier[r].first_row
                                             : before.row_of_slot[tiers.at(pair, first.slot)];
      expected.row_of_slot[tiers.at(pair, going->slot)] = to;
      expected.counts[pair * kMaxDeviceTiers + r] += had_free_slot;
      expected.slot_of_row[tiers.owner_at(pair, to)] = static_cast<unsigned>(going->slot);
      for (const bool key : {true, false})
        CHECK(tiers.read(after, pair, to, key) == demoted(tiers.read(before, pair, from, key),
                                                          tier_plan, tier_of(tier_plan, from), r,
                                                          key));
      going = &first;
    }
  }
  CHECK((after.row_of_slot == expected.row_of_slot && after.counts == expected.counts &&
         after.slot_of_row == expected.slot_of_row));
}

}  // namespace

TEST_CASE("A demoted token is quantized as on the host, and is unchanged between equal formats",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_F32, KVLAB_BF16, KVLAB_F16})
    for (const int head_size : {64, 96, 128, 256}) {
      const auto& format = kKvFormats;
      check_steps(type, head_size, {format[3], format[3], format[3]});
      check_steps(type, head_size,
                  {format[0], format[0], format[2], format[3], format[3], format[5]});
      check_steps(type, head_size, {format[1], format[4]});
    }
}

TEST_CASE("In a tile of quantized values, no channels share bits and no rows share bytes") {
  for (const bool key : {true, false})
    for (const int bits : {8, 4, 2})
      for (const int blocks : {2, 3, 4, 8}) {
        const int wide = blocks * 32;
        std::vector<int> taken(static_cast<std::size_t>(16 * wide)),
            rows(static_cast<std::size_t>(16 * wide * bits / 8), -1);
        for (int i = 0; i < 16 * wide; ++i) {
          const int bit = quantized_bit(key, bits, i / wide, i % wide, blocks);
          REQUIRE(bit % bits == 0);
          ++taken.at(static_cast<std::size_t>(bit / bits));
          int& row = rows.at(static_cast<std::size_t>(bit / 8));
          REQUIRE((row < 0 || row == i / wide));
          row = i / wide;
        }
        CHECK(taken == std::vector<int>(taken.size(), 1));
      }
}
