// What the device writes on a rung is what the host codes, bit for bit.
#include <cmath>
#include <random>
#include <utility>

#include "kernels/codes/codes.hpp"
#include "kernels/evict/eviction_kernels.hpp"
#include "kernels/loaded_code.hpp"
#include "policies/rule.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/kernels/attention_reference.hpp"
#include "tests/skip.hpp"
#include "traces/base/numeric/code.hpp"
#include "traces/base/numeric/dtype.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

constexpr int kPairs = 7;

/// Rows of all magnitudes: of one number, of zeros, of one outlier, too small for a fp16 scale.
std::vector<float> rows_of(Type type, int head_size) {
  std::mt19937 random(static_cast<unsigned>(head_size));
  std::vector<float> rows =
      random_values(type, static_cast<std::size_t>(kPairs * head_size), random);
  const auto row = [&](int pair) { return rows.begin() + pair * head_size; };
  std::fill_n(row(1), head_size, 0.75f);
  std::fill_n(row(2), head_size, 0.0f);
  row(3)[5] = 100;
  for (int d = 0; d < head_size; ++d) {
    row(4)[d] = rounded(type, row(4)[d] * 1e-7f);
    row(5)[d] = rounded(type, row(5)[d] * 300);
  }
  return rows;
}

/// What a row's codes and metadata are read as.
std::vector<float> read_back(const RowPart& part, const KvForm& form, bool key, int head_size) {
  const int bits = key ? form.key_bits : form.value_bits;
  const std::byte* const metadata = part.metadata;
  std::vector<float> row;
  for (int d = 0; d < head_size; ++d) {
    const int bit = code_bit(key, bits, part.row, d, head_size / 32);
    const auto code = static_cast<std::uint8_t>(part.codes[bit / 8]) >> bit % 8 & ((1 << bits) - 1);
    if (form.floating) {
      const int exponent = code >> 3 & 15, fraction = code & 7;
      const float value = exponent > 0 ? std::ldexp(static_cast<float>(8 + fraction), exponent - 10)
                                       : std::ldexp(static_cast<float>(fraction), -9);
      row.push_back(
          std::ldexp(code >> 7 ? -value : value, static_cast<int>(metadata[d / 32]) - 127));
      continue;
    }
    std::uint16_t two[2];
    std::copy_n(metadata + d / 32 * 4, 4, reinterpret_cast<std::byte*>(two));
    const float product = static_cast<float>(code) * f16_to_float(two[0]);
    row.push_back(product + f16_to_float(two[1]));
  }
  return row;
}

void check_form(const KvForm& form, Type type, int head_size) {
  const auto keys = rows_of(type, head_size);
  std::vector<float> values(keys.rbegin(), keys.rend());
  const int element = static_cast<int>(bytes_of(type));
  const DeviceForm own{static_cast<std::uint8_t>(form.key_bits),
                       static_cast<std::uint8_t>(form.value_bits), form.floating};
  const std::int64_t row = row_bytes(own, head_size, element);
  std::vector<DeviceLadder> ladders(kPairs);
  std::vector<std::int64_t> first_slot;
  for (int pair = 0; pair < kPairs; ++pair) {
    auto& ladder = ladders[static_cast<std::size_t>(pair)];
    ladder.rungs = 1;
    ladder.first_row = pair * 16;
    ladder.rung[0] = {own, 3, 16, 0, pair * 16 * row};
    first_slot.push_back(pair * 3);
  }
  const DeviceArray<DeviceLadder> device_ladders{std::span<const DeviceLadder>(ladders)};
  const DeviceArray<std::int64_t> first_slots{std::span<const std::int64_t>(first_slot)};
  const DeviceArray<std::byte> bytes(static_cast<std::size_t>(kPairs * 16 * row));
  const DeviceArray<std::byte> newest_keys{std::span<const std::byte>(encode(type, keys))},
      newest_values{std::span<const std::byte>(encode(type, values))};
  const DeviceArray<std::uint32_t> places(kPairs * 3), owners(kPairs * 16), positions(kPairs * 3),
      now{std::span<const std::uint32_t>(std::vector{41u})};
  const DeviceArray<std::uint32_t> next_rows{
      std::span<const std::uint32_t>(std::vector(kPairs, 2u))};
  const DeviceArray<std::int32_t> extents(kPairs), counts(kPairs * kMostRungs), lengths(kPairs),
      next_slots{std::span<const std::int32_t>(std::vector(kPairs, 1))};
  const CodedCache coded{device_ladders.data(), bytes.data(),
                         places.data(),         owners.data(),
                         counts.data(),         next_rows.data(),
                         newest_keys.data(),    newest_values.data(),
                         extents.data(),        16,
                         static_cast<int>(row), 8};
  const kvlab_cache cache{.type = type,
                          .sequences = 1,
                          .query_heads = kPairs,
                          .kv_heads = kPairs,
                          .head_size = head_size,
                          .softmax_scale = 1,
                          .most_slots = 3,
                          .first_slot = first_slots.data(),
                          .keys = newest_keys.data(),
                          .values = newest_values.data(),
                          .positions = positions.data(),
                          .lengths = lengths.data(),
                          .next_slots = next_slots.data()};
  check_cuda(place_newest(cache, coded, now.data(), nullptr));
  const auto written = bytes.to_host();
  for (int pair = 0; pair < kPairs; ++pair)
    for (const bool key : {true, false}) {
      const auto& from = key ? keys : values;
      std::vector<float> expected(from.begin() + pair * head_size,
                                  from.begin() + (pair + 1) * head_size);
      if (!form.exact()) {
        butterflies(expected);
        code_row(expected, key ? form.key_bits : form.value_bits, form.floating);
      }
      std::byte* const all = const_cast<std::byte*>(written.data());
      const RowPart part =
          part_of(all, ladders[static_cast<std::size_t>(pair)].rung[0], 2, key, head_size, element);
      const std::size_t wide = static_cast<std::size_t>(head_size * element);
      const std::vector<float> found = form.exact() ? decode(type, std::span(part.codes, wide))
                                                    : read_back(part, form, key, head_size);
      CAPTURE(form.name, static_cast<int>(type), head_size, pair, key);
      CHECK(found == expected);
    }
  CHECK(places.to_host()[4] == 2);
  CHECK(owners.to_host()[16 + 2] == 1);
  CHECK(positions.to_host()[4] == 41);
  CHECK(counts.to_host()[kMostRungs] == 3);
  CHECK(extents.to_host()[1] == 3);
}

}  // namespace

TEST_CASE("A token on a rung has the host's code, bit for bit", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const KvForm& form : kKvForms)
    for (const Type type : {KVLAB_F32, KVLAB_BF16, KVLAB_F16})
      for (const int head_size : {64, 96, 128, 256})
        if (!form.kivi) check_form(form, type, head_size);
}

namespace {

DeviceForm device_form(const KvForm& form) {
  return {static_cast<std::uint8_t>(form.key_bits), static_cast<std::uint8_t>(form.value_bits),
          form.floating};
}

/// As Leaving there.
struct First {
  LeavingKey key{~0u, ~std::uint64_t{0}, ~0u};
  int slot = -1;
};

/// A layer's rows of drawn codes, under an attention by two kernels.
class DrawnRungs {
 public:
  DrawnRungs(Type type, int head_size, int group, const std::vector<const KvForm*>& ladder)
      : type_(type), head_size_(head_size), group_(group) {
    for (int pair = 0; pair < kPairs; ++pair) add_pair(pair, ladder);
    for (const std::uint32_t live : lives_) total_ += live;
    q_ = random_values(type, static_cast<std::size_t>(kPairs * group * head_size), random_);
  }

  struct Result {
    std::vector<float> out, lse;
  };
  Result attend(bool plain) const {
    const DeviceArray<DeviceLadder> ladders{std::span<const DeviceLadder>(ladders_)};
    const DeviceArray<std::byte> bytes{std::span<const std::byte>(bytes_)},
        q{std::span<const std::byte>(encode(type_, q_))}, out(q_.size() * bytes_of(type_));
    const DeviceArray<std::uint32_t> places{std::span<const std::uint32_t>(places_)},
        owners{std::span<const std::uint32_t>(owners_)}, positions(total_), now(1), ids(1),
        next_rows{std::span<const std::uint32_t>(std::vector(kPairs, 0u))};
    const DeviceArray<std::int32_t> counts{std::span<const std::int32_t>(counts_)},
        extents{std::span<const std::int32_t>(extents_)}, lengths(live()),
        next_slots{std::span<const std::int32_t>(newest())};
    const DeviceArray<std::int64_t> first_slots{std::span<const std::int64_t>(first_slots_)};
    const DeviceArray<kvlab_rule> rules(kPairs);
    const DeviceArray<std::uint64_t> seeds(1);
    const DeviceArray<float> lse(static_cast<std::size_t>(kPairs * group_));
    CodedCache coded{.ladders = ladders.data(),
                     .bytes = bytes.data(),
                     .places = places.data(),
                     .owners = owners.data(),
                     .counts = counts.data(),
                     .next_rows = next_rows.data(),
                     .extents = extents.data(),
                     .most_rows = most_rows_,
                     .most_row_bytes = most_row_bytes_,
                     .most_rungs = kMostRungs};
    const kvlab_cache cache{.type = type_,
                            .sequences = 1,
                            .query_heads = kPairs * group_,
                            .kv_heads = kPairs,
                            .head_size = head_size_,
                            .softmax_scale = 0.1f,
                            .most_slots = static_cast<int>(*std::ranges::max_element(lives_)),
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
        &coded};
    check_cuda(kernels.attend(kernels, args, nullptr));
    return {decode(type_, out.to_host()), lse.to_host()};
  }
  std::size_t tokens() const { return total_; }

  /// Where all tokens are.
  struct State {
    std::vector<std::byte> bytes;
    std::vector<std::uint32_t> places, owners, next_rows;
    std::vector<std::int32_t> counts;
  };
  State state() const { return {bytes_, places_, owners_, std::vector(kPairs, 0u), counts_}; }
  /// Behind a step in which `firsts` [pair, kMostRungs] leave their rungs first. A pair is a
  /// sequence, of which the fifth sits out.
  State step_down(const std::vector<First>& firsts) const {
    const DeviceArray<DeviceLadder> ladders{std::span<const DeviceLadder>(ladders_)};
    const DeviceArray<std::byte> bytes{std::span<const std::byte>(bytes_)};
    const std::vector nows{41u, 41u, 41u, 41u, kIdle, 41u, 41u};
    const DeviceArray places{std::span(places_)}, owners{std::span(owners_)}, now{std::span(nows)};
    const DeviceArray<std::uint32_t> next_rows(kPairs);
    const DeviceArray<std::int32_t> counts{std::span<const std::int32_t>(counts_)}, extents(kPairs);
    const DeviceArray<std::int64_t> first_slots{std::span<const std::int64_t>(first_slots_)};
    const DeviceArray<kvlab_rule> rules(kPairs);
    const DeviceArray leaving{std::span(firsts)};
    CodedCache coded{};
    coded.ladders = ladders.data(), coded.bytes = bytes.data(), coded.places = places.data();
    coded.owners = owners.data(), coded.counts = counts.data(), coded.extents = extents.data();
    coded.next_rows = next_rows.data(), coded.most_rungs = kMostRungs;
    EvictingAttentionArgs args{};
    args.cache.type = type_, args.cache.sequences = kPairs, args.cache.kv_heads = 1;
    args.cache.head_size = head_size_, args.cache.first_slot = first_slots.data();
    args.coded = &coded, args.policy.rules = rules.data(), args.now = now.data();
    check_cuda(step_down_pairs(args, reinterpret_cast<const Leaving*>(leaving.data()), nullptr));
    return {bytes.to_host(), places.to_host(), owners.to_host(), next_rows.to_host(),
            counts.to_host()};
  }
  const DeviceLadder& ladder(std::size_t pair) const { return ladders_[pair]; }
  std::size_t at(std::size_t pair, int slot) const {
    return static_cast<std::size_t>(first_slots_[pair] + slot);
  }
  std::size_t owner_at(std::size_t pair, std::uint32_t row) const {
    return static_cast<std::size_t>(ladders_[pair].first_row + row);
  }
  /// A row's key or value as it is read: of codes, behind the butterflies.
  std::vector<float> read(const State& from, std::size_t pair, std::uint32_t row, bool key) const {
    const DeviceRung& rung = ladder(pair).rung[rung_of(ladder(pair), row)];
    const int element = static_cast<int>(bytes_of(type_));
    const RowPart part = part_of(const_cast<std::byte*>(from.bytes.data()), rung,
                                 row - rung.first_row, key, head_size_, element);
    if (rung.form.exact())
      return decode(type_, std::span(part.codes, static_cast<std::size_t>(head_size_ * element)));
    return read_back(part, *std::ranges::find(kKvForms, rung.form, device_form), key, head_size_);
  }

 private:
  /// Unequal numbers of tokens, on rungs that are full or not.
  void add_pair(int pair, const std::vector<const KvForm*>& ladder) {
    DeviceLadder own{.rungs = static_cast<int>(ladder.size()),
                     .first_row = static_cast<std::int64_t>(owners_.size())};
    std::uint32_t first_row = 0, live = 0;
    const int element = static_cast<int>(bytes_of(type_));
    first_slots_.push_back(static_cast<std::int64_t>(places_.size()));
    std::vector<std::uint32_t> rows;
    for (std::size_t r = 0; r < ladder.size(); ++r) {
      const DeviceForm form = device_form(*ladder[r]);
      const auto slots = static_cast<std::uint32_t>(pair == 0 ? 1 : 5 + 37 * pair + 11 * r),
                 whole = (slots + 15) / 16 * 16;
      const std::int64_t row = row_bytes(form, head_size_, element);
      own.rung[r] = {form, slots, whole, first_row, static_cast<std::int64_t>(bytes_.size())};
      const std::uint32_t count = pair == 2 && r > 0 ? 0 : slots;
      counts_.resize(static_cast<std::size_t>(pair * kMostRungs) + r + 1);
      counts_.back() = static_cast<std::int32_t>(count);
      bytes_.resize(bytes_.size() + static_cast<std::size_t>(row * whole));
      for (std::uint32_t i = 0; i < whole; ++i) draw_row(own.rung[r], i);
      for (std::uint32_t i = 0; i < count; ++i) rows.push_back(first_row + i);
      first_row += whole, live += count;
      most_row_bytes_ = std::max(most_row_bytes_, static_cast<int>(row));
    }
    counts_.resize(static_cast<std::size_t>(pair + 1) * kMostRungs);
    extents_.push_back(static_cast<std::int32_t>(rows.back() + 1));
    std::ranges::shuffle(rows, random_);
    owners_.resize(owners_.size() + first_row);
    for (std::uint32_t slot = 0; slot < live; ++slot)
      owners_[static_cast<std::size_t>(own.first_row) + rows[slot]] = slot;
    places_.insert(places_.end(), rows.begin(), rows.end());
    lives_.push_back(live);
    ladders_.push_back(own);
    most_rows_ = std::max(most_rows_, static_cast<int>(first_row));
  }
  void draw_row(const DeviceRung& rung, std::uint32_t row) {
    const int element = static_cast<int>(bytes_of(type_));
    for (const bool key : {true, false}) {
      const RowPart part = part_of(bytes_.data(), rung, row, key, head_size_, element);
      const auto wide = static_cast<std::size_t>(code_bytes(rung.form, key, head_size_, element));
      if (rung.form.exact()) {
        std::ranges::copy(
            encode(type_, random_values(type_, static_cast<std::size_t>(head_size_), random_)),
            part.codes);
        continue;
      }
      for (std::size_t i = 0; part.row == 0 && i < wide * kRowsOfTile; ++i) {
        auto byte = static_cast<std::uint8_t>(random_());
        if (rung.form.floating && (byte & 0x7f) == 0x7f) byte ^= 1;  // no number
        part.codes[i] = std::byte{byte};
      }
      for (int b = 0; b < head_size_ / 32; ++b) draw_metadata(rung.form, key, part, b);
    }
  }
  void draw_metadata(const DeviceForm& form, bool key, const RowPart& part, int b) {
    if (form.floating) {
      part.metadata[b] = std::byte{static_cast<std::uint8_t>(118 + random_() % 3)};
      return;
    }
    const auto codes = static_cast<float>((1 << form.bits(key)) - 1);
    const float range = 8 + static_cast<float>(random_() % 8);
    const std::uint16_t two[] = {float_to_f16(range / codes), float_to_f16(-range * 0.6f)};
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
  std::mt19937 random_{5};
  std::vector<DeviceLadder> ladders_;
  std::vector<std::byte> bytes_;
  std::vector<std::uint32_t> places_, owners_, lives_;
  std::vector<std::int32_t> counts_, extents_;
  std::vector<std::int64_t> first_slots_;
  std::vector<float> q_;
  std::size_t total_ = 0;
  int most_rows_ = 0, most_row_bytes_ = 0;
};

void check_attention(Type type, int head_size, int group,
                     const std::vector<const KvForm*>& ladder) {
  const DrawnRungs rungs(type, head_size, group, ladder);
  const auto plain = rungs.attend(true), fast = rungs.attend(false);
  std::string forms;
  for (const KvForm* form : ladder) forms += std::string(form->name) + " ";
  CAPTURE(forms, static_cast<int>(type), head_size, group, rungs.tokens());
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

}  // namespace

TEST_CASE("Attention over rungs by tensor cores is the plain one's", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16})
    for (const int head_size : {64, 96, 128, 256}) {
      for (const KvForm& form : kKvForms)
        if (!form.kivi) check_attention(type, head_size, 3, {&form});
      for (const int group : {1, 4, 8})
        check_attention(type, head_size, group,
                        {&kKvForms[0], &kKvForms[1], &kKvForms[2], &kKvForms[4], &kKvForms[5]});
    }
}

/// Rings of one stage: head size 256 with eight query heads on an A100, with four on GPUs of 99 KB.
TEST_CASE("Attention over tiers is the plain one's as a GPU of less shared memory runs it",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const auto& [shared_bytes, group] : {std::pair{166'912, 8}, {101'376, 4}}) {
    const SmallerGpu small(shared_bytes);
    for (const Type type : {KVLAB_BF16, KVLAB_F16})
      for (const int head_size : {64, 128, 256})
        check_attention(type, head_size, group,
                        {&kKvForms[0], &kKvForms[1], &kKvForms[2], &kKvForms[4], &kKvForms[5]});
  }
}

namespace {

/// What a row becomes on its way down, as way_down() has it.
std::vector<float> gone_down(std::vector<float> row, const DeviceLadder& ladder, int from,
                             unsigned to, bool key) {
  bool coded = !ladder.rung[from].form.exact();
  while (static_cast<unsigned>(from++) < to) {
    const DeviceForm form = ladder.rung[from].form;
    if (form == ladder.rung[from - 1].form) continue;
    if (!std::exchange(coded, true)) butterflies(row);
    code_row(row, form.bits(key), form.floating);
  }
  return row;
}

/// All rungs are full, but for those below pair 2's first. Rung 1 of pair 3 is full of guarded
/// tokens; from pair 5's rung 2 on all leave last.
void check_steps(Type type, int head_size, const std::vector<const KvForm*>& forms) {
  const DrawnRungs rungs(type, head_size, 1, forms);
  const auto before = rungs.state();
  std::vector<First> firsts(kPairs * kMostRungs);
  for (std::size_t pair = 0; pair < kPairs; ++pair)
    for (unsigned r = 0; r < forms.size(); ++r) {
      const DeviceLadder& ladder = rungs.ladder(pair);
      const unsigned row = ladder.rung[r].first_row + std::min(ladder.rung[r].slots - 1, 3 * r);
      const LeavingKey key{pair == 3 && r == 1, pair == 5 && r > 1 ? 900u : 100u - r, 7};
      if (before.counts[pair * kMostRungs + r] > 0)
        firsts[pair * kMostRungs + r] = {
            key, static_cast<int>(before.owners[rungs.owner_at(pair, row)])};
    }
  const auto after = rungs.step_down(firsts);
  auto expected = before;
  for (std::size_t pair = 0; pair < kPairs; ++pair) {
    if (pair == 4) continue;  // it sits out
    CAPTURE(pair, static_cast<int>(type), head_size, forms.size());
    const DeviceLadder& ladder = rungs.ladder(pair);
    const First* going = &firsts[pair * kMostRungs];
    CHECK(after.next_rows[pair] == before.places[rungs.at(pair, going->slot)]);
    bool had_room = false;
    for (unsigned r = 1; r < forms.size() && !had_room; ++r) {
      const First& first = firsts[pair * kMostRungs + r];
      had_room = first.slot < 0;
      if (!had_room && !(first.key < going->key)) continue;
      const std::uint32_t from = before.places[rungs.at(pair, going->slot)],
                          to = had_room ? ladder.rung[r].first_row
                                        : before.places[rungs.at(pair, first.slot)];
      expected.places[rungs.at(pair, going->slot)] = to;
      expected.counts[pair * kMostRungs + r] += had_room;
      expected.owners[rungs.owner_at(pair, to)] = static_cast<unsigned>(going->slot);
      for (const bool key : {true, false})
        CHECK(rungs.read(after, pair, to, key) == gone_down(rungs.read(before, pair, from, key),
                                                            ladder, rung_of(ladder, from), r, key));
      going = &first;
    }
  }
  CHECK((after.places == expected.places && after.counts == expected.counts &&
         after.owners == expected.owners));
}

}  // namespace

TEST_CASE("Who goes down a ladder is coded as on the host, and among equal forms stays as it was",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_F32, KVLAB_BF16, KVLAB_F16})
    for (const int head_size : {64, 96, 128, 256}) {
      const auto& form = kKvForms;
      check_steps(type, head_size, {&form[3], &form[3], &form[3]});
      check_steps(type, head_size, {&form[0], &form[0], &form[2], &form[3], &form[3], &form[5]});
      check_steps(type, head_size, {&form[1], &form[4]});
    }
}

TEST_CASE("Of a tile's codes each channel of a row has its own place, and no two rows a byte") {
  for (const bool key : {true, false})
    for (const int bits : {8, 4, 2})
      for (const int blocks : {2, 3, 4, 8}) {
        const int wide = blocks * 32;
        std::vector<int> taken(static_cast<std::size_t>(16 * wide)),
            rows(static_cast<std::size_t>(16 * wide * bits / 8), -1);
        for (int i = 0; i < 16 * wide; ++i) {
          const int bit = code_bit(key, bits, i / wide, i % wide, blocks);
          REQUIRE(bit % bits == 0);
          ++taken.at(static_cast<std::size_t>(bit / bits));
          int& row = rows.at(static_cast<std::size_t>(bit / 8));
          REQUIRE((row < 0 || row == i / wide));
          row = i / wide;
        }
        CHECK(taken == std::vector<int>(taken.size(), 1));
      }
}
