// Compares the loops of configuration batches with their definitions, on every available
// instruction set.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "policies/observation.hpp"
#include "sim/config_batches/group_rows.hpp"
#include "sim/config_batches/loops/row_loops.hpp"
#include "tests/catch.hpp"
#include "traces/base/numeric/hot_loops.hpp"
#include "traces/base/numeric/softmax.hpp"

namespace kvlab {
namespace {

std::vector<const RowLoops*> sets() {
  std::vector<const RowLoops*> all{&row_loops_base()};
  for (const RowLoops* set : {row_loops_avx2(), row_loops_avx512()})
    if (set) all.push_back(set);
  return all;
}

/// Exponentials of a head group, [count][4]: most of them are small, some are zero, and some are
/// equal. Zeros pad them to whole blocks.
std::vector<float> random_row(std::mt19937& rng, std::size_t count) {
  std::uniform_real_distribution<float> exponent(-70, 0.5f);
  std::vector<float> e(whole_blocks(count) * kHeadGroupSize);
  for (std::size_t i = 0; i < count * kHeadGroupSize; ++i) {
    const float power = exponent(rng);
    e[i] = power < -65 ? 0 : rng() % 8 == 0 ? 0.125f : std::exp2(power);
  }
  return e;
}

std::vector<std::uint32_t> every_third(std::mt19937& rng, std::size_t tokens) {
  std::vector<std::uint32_t> kept;
  for (std::uint32_t t = 0; t < tokens; ++t)
    if (rng() % 3 == 0 || t + 1 == tokens) kept.push_back(t);
  return kept;
}

float at(const std::vector<float>& kept, std::size_t i, std::size_t head) {
  return kept[i * kHeadGroupSize + head];
}

TEST_CASE(
    "gathered rows: sums equal lane sums, masses equal fixed_mass, on every instruction set") {
  std::mt19937 rng(1);
  for (const std::size_t tokens : {1u, 2u, 15u, 16u, 17u, 63u, 200u, 1501u}) {
    const auto e = random_row(rng, tokens);
    const auto list = every_third(rng, tokens);
    std::vector<std::uint32_t> all(tokens);
    std::iota(all.begin(), all.end(), 0u);
    for (const bool scattered : {false, true})
      for (const RowLoops* loops : sets()) {
        INFO(loops->name << ", " << tokens << " tokens");
        const std::size_t count = scattered ? list.size() : tokens;
        const std::size_t capacity = (count + 15) / 16 * 16;
        std::vector<float> kept(capacity * kHeadGroupSize, NAN), head(count);
        std::vector<std::uint64_t> mass(capacity, 0xdead), wanted(count);
        std::vector<std::uint32_t> marked(capacity, 7);
        float sum[kHeadGroupSize], max_exponential[kHeadGroupSize];
        loops->gather(e.data(), (scattered ? list : all).data(), count, kept.data(), sum,
                      max_exponential);
        loops->masses(kept.data(), count, sum, true, mass.data());
        float request_threshold[kHeadGroupSize];
        for (std::size_t h = 0; h < kHeadGroupSize; ++h) {
          for (std::size_t i = 0; i < count; ++i) {
            head[i] = e[(scattered ? list[i] : i) * kHeadGroupSize + h];
            REQUIRE(at(kept, i, h) == head[i]);
          }
          REQUIRE(sum[h] == lane_sum(head.data(), count));
          REQUIRE(max_exponential[h] == *std::max_element(head.begin(), head.end()));
          for (std::size_t i = 0; i < count; ++i)
            if (sum[h] > 0) wanted[i] += fixed_mass(1.0f, head[i] / sum[h]);
          request_threshold[h] = sum[h] > 0 ? min_requested(sum[h], max_exponential[h], 655)
                                            : std::numeric_limits<float>::infinity();
        }
        loops->mark(kept.data(), count, request_threshold, true, marked.data());
        for (std::size_t i = 0; i < count; ++i) {
          REQUIRE(mass[i] == wanted[i]);
          bool any = false;
          for (std::size_t h = 0; h < kHeadGroupSize; ++h)
            any |= sum[h] > 0 && is_requested(fixed_mass(1.0f, at(kept, i, h) / sum[h]),
                                              fixed_mass(1.0f, max_exponential[h] / sum[h]), 655);
          REQUIRE(marked[i] == (any ? 1u : 0u));
        }
      }
  }
}

TEST_CASE("masses of tokens with equal shares in all heads, on every instruction set") {
  const float shares[] = {0.03f, 0.1249f, 0.125f, 0.2499f, 0.25f, 0.4999f, 0.5f, 0.9f, 1.0f};
  for (const float share : shares) {
    std::vector<float> e(kBlockTokens * kHeadGroupSize);
    for (std::size_t h = 0; h < kHeadGroupSize; ++h) e[5 * kHeadGroupSize + h] = share;
    const float sum[kHeadGroupSize] = {1, 1, 1, 1};
    for (const RowLoops* loops : sets()) {
      INFO(loops->name << ", " << share);
      std::vector<std::uint64_t> mass(kBlockTokens, 1);
      loops->masses(e.data(), kBlockTokens, sum, false, mass.data());
      for (std::size_t i = 0; i < kBlockTokens; ++i)
        CHECK(mass[i] == 1 + (i == 5 ? 4 * fixed_mass(1.0f, share) : 0));
    }
  }
}

TEST_CASE("quotients computed without a division are rounded like a division's") {
  std::mt19937 rng(2);
  std::uniform_real_distribution<float> mantissa(1, 2);
  for (int round = 0; round < 1000; ++round) {
    const float sum = std::ldexp(mantissa(rng), static_cast<int>(rng() % 78) - 60);
    std::vector<float> kept(64 * kHeadGroupSize);
    for (float& x : kept)
      x = std::min(sum, std::ldexp(mantissa(rng), -static_cast<int>(rng() % 40)) * sum);
    const float sums[kHeadGroupSize] = {sum, sum, sum, sum};
    for (const RowLoops* loops : sets()) {
      std::vector<std::uint64_t> mass(64);
      loops->masses(kept.data(), 64, sums, true, mass.data());
      for (std::size_t i = 0; i < 64; ++i) {
        std::uint64_t wanted = 0;
        for (std::size_t h = 0; h < kHeadGroupSize; ++h)
          wanted += fixed_mass(1.0f, at(kept, i, h) / sum);
        REQUIRE(mass[i] == wanted);
      }
    }
  }
}

TEST_CASE(
    "a row of a head group has the exponentials and sums of softmax.hpp, on every "
    "instruction set") {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal(0, 30);
  for (const std::size_t count : {1u, 3u, 16u, 31u, 100u, 1025u})
    for (const int heads : {1, 3, 4}) {
      const float growth = heads == 3 ? 1.5f : 0;  // if not 0, the largest values come last
      const std::size_t stride = (count + 15) / 16 * 16;
      std::vector<float> logits(kHeadGroupSize * stride);
      for (std::size_t i = 0; i < logits.size(); ++i)
        logits[i] = normal(rng) + growth * static_cast<float>(i % stride);
      const float* rows[kHeadGroupSize] = {};
      for (int h = 0; h < heads; ++h) rows[h] = logits.data() + h * stride;
      for (const RowLoops* loops : sets()) {
        INFO(loops->name << ", " << count << " tokens, " << heads << " heads");
        std::vector<float> e(stride * kHeadGroupSize, NAN), wanted(count);
        float sum[kHeadGroupSize], max_exponential[kHeadGroupSize];
        HeadGroupRow row{.e = e.data()};
        const std::size_t piece = count < 1000 ? 16 : 48;
        for (std::size_t done = 0; done < count; done += piece) {
          const float* next[kHeadGroupSize] = {};
          for (int h = 0; h < heads; ++h) next[h] = rows[h] + done;
          loops->extend(row, next, std::min(piece, count - done), 0.25f);
        }
        loops->finish(row, sum, max_exponential);
        for (int h = 0; h < static_cast<int>(kHeadGroupSize); ++h) {
          if (h < heads) {
            std::copy_n(rows[h], count, wanted.begin());
            scale(wanted.data(), count, 0.25f);
            std::vector<float> own(count);
            const std::int32_t shift = shared_exponentials(wanted.data(), count, own.data());
            REQUIRE(row.shift[h] <= shift);
            REQUIRE(row.shift[h] >= shift - 31);
            hot_loops().exponentials(wanted.data(), count, row.shift[h], wanted.data());
          } else {
            std::fill(wanted.begin(), wanted.end(), 0.0f);
          }
          for (std::size_t i = 0; i < count; ++i) {
            const float x = e[i * kHeadGroupSize + h];
            if (std::max(x, wanted[i]) > 0x1p-125f)  // numbers scaled below this may have become 0
              REQUIRE(std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(wanted[i]));
          }
          for (std::size_t i = count; i < stride; ++i) REQUIRE(e[i * kHeadGroupSize + h] == 0);
          REQUIRE(sum[h] == lane_sum(wanted.data(), count));
          REQUIRE(max_exponential[h] == *std::max_element(wanted.begin(), wanted.end()));
        }
      }
    }
}

TEST_CASE(
    "a joined row has the exponentials and sums of both its parts, on every instruction set") {
  std::mt19937 rng(7);
  std::normal_distribution<float> normal(0, 30);
  for (const std::size_t old : {0u, 1u, 15u, 16u, 17u, 40u, 64u})
    for (const std::size_t shared : {0u, 1u, 7u, 15u, 16u, 33u, 100u}) {
      if (old + shared == 0) continue;
      const std::size_t count = old + shared, capacity = (count + 15) / 16 * 16;
      const std::int32_t shift[kHeadGroupSize] = {0, 40, -3, 0};
      std::vector<float> own(kHeadGroupSize * (old + 16)), e = random_row(rng, shared),
                                                           wanted(count);
      for (float& x : own) x = normal(rng);
      // If old > 0, this logit is too large for head 0's shift. join() reports that by a sum of 0.
      own[0] = 4 * 0.70f * (shift[0] + 80);
      const float* rows[kHeadGroupSize] = {};
      for (std::size_t h = 0; h < 3; ++h) rows[h] = own.data() + h * (old + 16);
      for (std::size_t i = 0; i < shared; ++i) e[i * kHeadGroupSize + 3] = 0;
      for (const RowLoops* loops : sets()) {
        INFO(loops->name << ", " << old << " own, " << shared << " shared");
        std::vector<float> kept(capacity * kHeadGroupSize, NAN);
        float sum[kHeadGroupSize], max_exponential[kHeadGroupSize];
        loops->join(rows, old, 0.25f, shift, e.data(), shared, kept.data(), sum, max_exponential);
        if (old > 0) REQUIRE(sum[0] == 0);
        REQUIRE(sum[3] == 0);
        for (std::size_t h = old > 0 ? 1 : 0; h < 3; ++h) {
          std::copy_n(rows[h], old, wanted.begin());
          scale(wanted.data(), old, 0.25f);
          hot_loops().exponentials(wanted.data(), old, shift[h], wanted.data());
          for (std::size_t i = 0; i < shared; ++i) wanted[old + i] = e[i * kHeadGroupSize + h];
          for (std::size_t i = 0; i < count; ++i) REQUIRE(at(kept, i, h) == wanted[i]);
          for (std::size_t i = count; i < capacity; ++i) REQUIRE(at(kept, i, h) == 0);
          REQUIRE(sum[h] == lane_sum(wanted.data(), count));
          REQUIRE(max_exponential[h] == *std::max_element(wanted.begin(), wanted.end()));
        }
      }
    }
}

TEST_CASE("removing a key from panels keeps the order of the others, on every instruction set") {
  const std::size_t dim = 3;
  for (std::size_t gap = 0; gap < kPanelTokens; ++gap)
    for (const bool more : {false, true})
      for (const RowLoops* loops : sets()) {
        std::vector<float> panel(dim * kPanelTokens + 1), next(panel.size());
        std::iota(panel.begin(), panel.end(), 1.0f);
        std::iota(next.begin(), next.end(), 1000.0f);
        loops->close_gap(panel.data(), more ? next.data() : nullptr, gap, dim);
        for (std::size_t d = 0; d < dim; ++d)
          for (std::size_t i = 0; i < kPanelTokens; ++i) {
            const std::size_t from = d * kPanelTokens + i;
            const float after_gap = i + 1 < kPanelTokens ? static_cast<float>(from + 2)
                                    : more               ? next[d * kPanelTokens]
                                                         : 0.0f;
            REQUIRE(panel[from] == (i < gap ? static_cast<float>(from + 1) : after_gap));
          }
      }
}

TEST_CASE(
    "panels of keys: rotations and products have the plain code's bits, on every "
    "instruction set") {
  std::mt19937 rng(8);
  std::normal_distribution<float> normal;
  for (const std::size_t dim : {8u, 20u, 64u, 128u})
    for (const std::size_t panels : {1u, 2u, 5u}) {
      const std::size_t half = dim / 4, size = panels * kPanelTokens;
      Rope rope;
      for (std::size_t i = 0; i < half; ++i) rope.inv_freq.push_back(1 / static_cast<float>(i + 1));
      const RopeTable table(rope, static_cast<std::uint32_t>(size));
      std::vector<float> keys(size * dim), cos(half * kPanelTokens), sin(cos.size()),
          queries(kHeadGroupSize * dim), key(dim);
      for (float& x : keys) x = normal(rng);
      for (float& x : queries) x = normal(rng);
      const auto key_at = [&](const std::vector<float>& from, std::size_t i) {
        for (std::size_t d = 0; d < dim; ++d)
          key[d] = from[(i / kPanelTokens * dim + d) * kPanelTokens + i % kPanelTokens];
      };
      for (const RowLoops* loops : sets()) {
        INFO(loops->name << ", " << panels << " panels of " << dim);
        std::vector<float> rotated(keys.size(), NAN), out(kHeadGroupSize * size, NAN), wanted(dim);
        for (std::size_t p = 0; p < panels; ++p) {
          for (std::size_t d = 0; d < half; ++d)
            for (std::size_t i = 0; i < kPanelTokens; ++i) {
              const auto position_in_cache = static_cast<std::uint32_t>(p * kPanelTokens + i);
              cos[d * kPanelTokens + i] = table.cosines(position_in_cache)[d];
              sin[d * kPanelTokens + i] = table.sines(position_in_cache)[d];
            }
          const std::size_t at_panel = p * dim * kPanelTokens;
          loops->rotate_panel(keys.data() + at_panel, cos.data(), sin.data(), half, dim,
                              rotated.data() + at_panel);
        }
        const float* some[kHeadGroupSize] = {};
        for (std::size_t h = 0; h < 3; ++h) some[h] = queries.data() + h * dim;
        loops->panel_products(rotated.data(), panels, dim, some, out.data(), size);
        for (std::size_t i = 0; i < size; ++i) {
          key_at(keys, i);
          table.rotate(key.data(), dim, static_cast<std::uint32_t>(i), wanted.data());
          key_at(rotated, i);
          REQUIRE(key == wanted);
          for (std::size_t h = 0; h < 3; ++h)
            REQUIRE(out[h * size + i] == dot_fused(some[h], key.data(), dim));
          REQUIRE(std::isnan(out[3 * size + i]));
        }
      }
    }
}

TEST_CASE("A row without probabilities is refused and does not loop for ever") {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(),
                  kInfinity = std::numeric_limits<float>::infinity();
  for (const float sum : {kNaN, kInfinity, 0.0f, -1.0f})
    CHECK_THROWS_AS(min_requested(sum, 0.5f, 655), std::runtime_error);
  for (const float max_exponential : {kNaN, kInfinity, -1.0f, 2.0f})
    CHECK_THROWS_AS(min_requested(1.0f, max_exponential, 655), std::runtime_error);
}

TEST_CASE("min_requested() is the least exponential that is a request") {
  std::mt19937 rng(4);
  std::uniform_real_distribution<float> log_sum(-40, 12), share(0, 1);
  for (int round = 0; round < 20000; ++round) {
    const float sum = std::exp2(log_sum(rng)), max_exponential = sum * share(rng);
    for (const std::uint32_t threshold : {0u, 1u, 655u, 32768u, 65536u}) {
      const std::uint64_t row_max = fixed_mass(1.0f, max_exponential / sum);
      const float request_threshold = min_requested(sum, max_exponential, threshold);
      const auto asks = [&](float e) {
        return is_requested(fixed_mass(1.0f, e / sum), row_max, threshold);
      };
      INFO(sum << " " << max_exponential << " " << threshold << ": " << request_threshold);
      REQUIRE(asks(request_threshold));
      if (request_threshold > 0) REQUIRE(!asks(std::nextafter(request_threshold, 0.0f)));
    }
  }
}

TEST_CASE("weighted sums of values and common bits, on every instruction set") {
  std::mt19937 rng(6);
  for (const std::size_t dim : {8u, 20u, 64u, 96u, 128u}) {
    const std::size_t tokens = 70;
    std::vector<float> v(tokens * dim), weights(tokens * kHeadGroupSize),
        wanted(kHeadGroupSize * dim, 0.5f);
    std::normal_distribution<float> normal;
    for (float& x : v) x = normal(rng);
    for (float& x : weights) x = normal(rng);
    const auto list = every_third(rng, tokens);
    for (std::size_t i = 0; i < list.size(); ++i)
      for (std::size_t h = 0; h < kHeadGroupSize; ++h)
        for (std::size_t d = 0; d < dim; ++d)
          wanted[h * dim + d] =
              std::fma(weights[i * kHeadGroupSize + h], v[list[i] * dim + d], wanted[h * dim + d]);
    for (const RowLoops* loops : sets()) {
      for (std::size_t heads = 1; heads <= kHeadGroupSize; ++heads) {
        std::vector<float> y(kHeadGroupSize * dim, 0.5f), some(y);
        std::copy_n(wanted.begin(), heads * dim, some.begin());
        loops->accumulate(weights.data(), list.data(), list.size(), heads, v.data(), dim, dim,
                          y.data());
        CHECK(y == some);
      }
      const std::uint64_t a[] = {~std::uint64_t{0}, 5, 1}, b[] = {std::uint64_t{1} << 63, 4, 2};
      CHECK(loops->common(a, b, 3) == 2);
    }
  }
}

TEST_CASE(
    "sums and hits of chosen tokens are correct, in runs and scattered, on every "
    "instruction set") {
  std::mt19937 rng(9);
  for (const std::size_t tokens : {1u, 15u, 16u, 17u, 40u, 200u}) {
    const auto e = random_row(rng, tokens);
    std::vector<std::uint32_t> all(tokens);
    std::iota(all.begin(), all.end(), 0u);
    const float request_threshold[kHeadGroupSize] = {0.125f, 1e-6f, 0, 2};
    for (const auto& list : {all, every_third(rng, tokens)})
      for (const bool given : {true, false}) {
        if (!given && list.size() != tokens) continue;
        double wanted[kHeadGroupSize] = {};
        std::uint32_t marked[kHeadGroupSize] = {};
        for (const std::uint32_t token : list)
          for (std::size_t h = 0; h < kHeadGroupSize; ++h) {
            wanted[h] += static_cast<double>(at(e, token, h));
            marked[h] += at(e, token, h) >= request_threshold[h];
          }
        float base[kHeadGroupSize];
        std::uint32_t unused[kHeadGroupSize] = {};
        row_loops_base().total(e.data(), list.data(), list.size(), request_threshold, base, unused);
        for (const RowLoops* loops : sets()) {
          INFO(loops->name << ", " << list.size() << " of " << tokens);
          float sum[kHeadGroupSize];
          std::uint32_t hits[kHeadGroupSize] = {1, 1, 1, 1};
          loops->total(e.data(), given ? list.data() : nullptr, list.size(), request_threshold, sum,
                       hits);
          for (std::size_t h = 0; h < kHeadGroupSize; ++h) {
            CHECK(hits[h] == marked[h] + 1);
            CHECK(sum[h] == base[h]);
            CHECK(std::abs(static_cast<double>(sum[h]) - wanted[h]) <= 1e-6 * wanted[h]);
          }
        }
      }
  }
}

TEST_CASE(
    "exponentials are binned by size: a larger one is never in a later bin, on every "
    "instruction set") {
  std::mt19937 rng(10);
  for (const std::size_t tokens : {1u, 16u, 77u}) {
    const auto e = random_row(rng, tokens);
    const std::size_t stride = e.size() / kHeadGroupSize;
    const std::uint32_t max_word = std::bit_cast<std::uint32_t>(2.0f),
                        max_words[kHeadGroupSize] = {max_word, max_word, max_word, max_word},
                        shift[kHeadGroupSize] = {0, 20, 23, 16};
    for (const RowLoops* loops : sets()) {
      std::vector<std::uint32_t> bits(kHeadGroupSize * stride, 7);
      std::vector<std::uint16_t> bins(bits.size(), 7);
      loops->bin(e.data(), tokens, max_words, shift, 255, bits.data(), bins.data(), stride);
      for (std::size_t h = 0; h < kHeadGroupSize; ++h)
        for (std::size_t i = 0; i < tokens; ++i) {
          const auto own = std::bit_cast<std::uint32_t>(at(e, i, h));
          REQUIRE(bits[h * stride + i] == own);
          const std::uint32_t bin = (max_word - own) >> shift[h];
          REQUIRE(bins[h * stride + i] == (bin < 255 ? bin : 255 + i % kRestBins));
        }
    }
  }
}

TEST_CASE("weights and changes of live sets, on every instruction set") {
  std::mt19937 rng(11);
  const auto e = random_row(rng, 70);
  const auto list = every_third(rng, 70);
  const std::uint64_t live[] = {0x5555'0f0f'ffff'0000, 0x2a};
  std::normal_distribution<float> normal;
  std::vector<float> values(70), whole(70);
  for (auto* v : {&values, &whole})
    for (float& x : *v) x = normal(rng);
  for (const RowLoops* loops : sets()) {
    INFO(loops->name);
    std::vector<float> weights(list.size() * kHeadGroupSize), size(kHeadGroupSize, 1.0f),
        total(size);
    loops->list_weights(e.data(), list.data(), list.size(), live, weights.data(), size.data());
    for (std::size_t i = 0; i < list.size(); ++i)
      for (std::size_t h = 0; h < kHeadGroupSize; ++h) {
        const float x = at(e, list[i], h);
        CHECK(weights[i * kHeadGroupSize + h] ==
              ((live[list[i] / 64] >> list[i] % 64 & 1) ? x : -x));
        total[h] += x;
      }
    CHECK(size == total);

    const float factors[] = {0.5f, 2.0f};  // of two heads with 35 values each
    constexpr std::size_t kGradientSamples = 5;
    std::vector<float> gradients;
    for (std::size_t i = 0; i < kGradientSamples * values.size(); ++i)
      gradients.push_back(values[(7 * i + 3) % values.size()]);
    std::vector<float> changes(kGradientSamples, 1.0f), base_changes = changes;
    loops->add_changes(whole.data(), values.data(), 2, factors, 35, gradients.data(),
                       kGradientSamples, changes.data());
    row_loops_base().add_changes(whole.data(), values.data(), 2, factors, 35, gradients.data(),
                                 kGradientSamples, base_changes.data());
    CHECK(changes == base_changes);
    for (std::size_t d = 0; d < kGradientSamples; ++d) {
      double change = 1;
      for (std::size_t i = 0; i < values.size(); ++i)
        change += static_cast<double>(gradients[d * values.size() + i]) *
                  static_cast<double>(factors[i / 35] * values[i] - whole[i]);
      CHECK(std::abs(changes[d] - change) <= 1e-4);
    }
  }
}

}  // namespace
}  // namespace kvlab
