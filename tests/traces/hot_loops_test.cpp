// Tests that the hot loops are correct, and give equal bits, on every instruction set of this
// machine.
#include "traces/base/numeric/hot_loops.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tests/catch.hpp"
#include "traces/base/numeric/dtype.hpp"
#include "traces/base/numeric/elementwise.hpp"
#include "traces/base/numeric/panels.hpp"
#include "traces/base/numeric/softmax.hpp"

namespace kvlab {
namespace {

std::vector<const HotLoops*> all_sets() {
  std::vector<const HotLoops*> sets{&hot_loops_base()};
  for (const HotLoops* set : {hot_loops_avx2(), hot_loops_avx512()})
    if (set) sets.push_back(set);
  return sets;
}

std::vector<float> noise(std::size_t count, unsigned seed, float size = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, size);
  std::vector<float> values(count);
  for (float& v : values) v = normal(generator);
  return values;
}

bool equal_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), 4 * a.size()) == 0;
}

/// The product of x [m, depth] and w [16 * panels, depth]. Each element is one sum of products, in
/// the order of the depth.
std::vector<float> plain_product(const std::vector<float>& x, const Panels& w, std::size_t m) {
  const std::size_t depth = w.depth(), outputs = 16 * w.panel_count();
  std::vector<float> y(m * outputs), row(depth);
  for (std::size_t o = 0; o < w.rows(); ++o) {
    w.get_row(o, row.data());
    for (std::size_t i = 0; i < m; ++i) {
      float sum = 0;
      for (std::size_t k = 0; k < depth; ++k) sum += x[i * depth + k] * row[k];
      y[i * outputs + o] = sum;
    }
  }
  return y;
}

TEST_CASE("every instruction set sums products in the order of the depth, to the bit") {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (const std::size_t depth : {1u, 12u, 64u, 257u, 700u})
      for (const std::size_t m : {1u, 2u, 3u, 5u, 6u, 7u, 13u}) {
        Panels w(71, depth, dtype);
        const std::vector<float> rows = noise(71 * depth, 1), x = noise(m * depth, 2);
        for (std::size_t o = 0; o < 71; ++o) w.set_row(o, rows.data() + o * depth);
        const std::vector<float> wanted = plain_product(x, w, m);
        for (const HotLoops* set : all_sets()) {
          CAPTURE(set->name, depth, m, dtype == Dtype::bf16);
          std::vector<float> y(wanted.size(), NAN);
          const std::size_t stride = 16 * w.panel_count();
          if (dtype == Dtype::f32)
            set->multiply_float(x.data(), m, depth, reinterpret_cast<const float*>(w.panel(0)),
                                depth, w.panel_count(), y.data(), stride);
          else
            set->multiply_bf16(x.data(), m, depth,
                               reinterpret_cast<const std::uint16_t*>(w.panel(0)), depth,
                               w.panel_count(), y.data(), stride);
          CHECK(equal_bits(y, wanted));
        }
      }
}

/// The product of rows and panels by chains of fused multiply-adds.
std::vector<float> fused_product(const std::vector<float>& x, const Panels& w, std::size_t m) {
  const std::size_t depth = w.depth(), outputs = 16 * w.panel_count();
  std::vector<float> y(m * outputs), row(depth);
  for (std::size_t o = 0; o < w.rows(); ++o) {
    w.get_row(o, row.data());
    for (std::size_t i = 0; i < m; ++i)
      y[i * outputs + o] = dot_fused(x.data() + i * depth, row.data(), depth);
  }
  return y;
}

TEST_CASE(
    "fused products have the bits of chains of fused multiply-adds, and for narrow values those "
    "of plain products") {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
    for (const std::size_t depth : {1u, 64u, 129u})
      for (const std::size_t m : {1u, 2u, 6u, 8u, 17u, 24u}) {
        Panels w(103, depth);
        std::vector<float> rows = noise(103 * depth, 3), x = noise(m * depth, 4, 20);
        for (std::vector<float>* values : {&rows, &x})
          for (float& value : *values) value = round_to(dtype, value);
        for (std::size_t o = 0; o < 103; ++o) w.set_row(o, rows.data() + o * depth);
        const std::vector<float> wanted = fused_product(x, w, m);
        if (dtype != Dtype::f32) CHECK(equal_bits(plain_product(x, w, m), wanted));
        for (const HotLoops* set : all_sets()) {
          CAPTURE(set->name, depth, m);
          std::vector<float> y(wanted.size(), NAN);
          set->multiply_fused(x.data(), m, depth, reinterpret_cast<const float*>(w.panel(0)), depth,
                              w.panel_count(), y.data(), 16 * w.panel_count());
          CHECK(equal_bits(y, wanted));
        }
      }
}

TEST_CASE("a fused sum is rounded once on every instruction set") {
  // Products and sums of these values include ties in rounding, sums that are exact in float64,
  // sums that are not, and extreme values.
  const std::vector<float> values{1.0f,      -1.0f,     1 + 0x1p-23f, 1 - 0x1p-24f, 0x1p-24f,
                                  -0x1p-24f, 0x1p-49f,  -0x1p-49f,    0x1p-75f,     3e38f,
                                  -3e38f,    0x1p-126f, 0x1p-149f,    -0x1p-140f,   0.1f,
                                  0.0f,      -0.0f,     0x1.8p12f,    INFINITY,     NAN};
  for (const float c : values)
    for (const float a : values)
      for (const float b : values) {
        Panels w(1, 2);
        const float row[] = {1, b}, x[] = {c, a};
        w.set_row(0, row);
        const float wanted = std::fma(a, b, std::fma(c, 1.0f, 0.0f));
        for (const HotLoops* set : all_sets()) {
          CAPTURE(set->name, a, b, c);
          std::vector<float> y(16);
          set->multiply_fused(x, 1, 2, reinterpret_cast<const float*>(w.panel(0)), 2, 1, y.data(),
                              16);
          const bool same = y[0] == wanted || (std::isnan(y[0]) && std::isnan(wanted));
          CHECK(same);
        }
      }
}

TEST_CASE("a tile of a product equals that part of the product") {
  Panels w(71, 20, Dtype::bf16);
  const std::vector<float> rows = noise(71 * 20, 3), x = noise(7 * 20, 4);
  for (std::size_t o = 0; o < 71; ++o) w.set_row(o, rows.data() + 20 * o);
  std::vector<float> whole(7 * 80), tile(7 * 32);
  multiply(x.data(), 7, 20, w, 0, 5, whole.data(), 80);
  multiply(x.data(), 7, 20, w, 2, 4, tile.data(), 32);
  for (std::size_t i = 0; i < 7; ++i)
    for (std::size_t c = 0; c < 32; ++c) CHECK(tile[32 * i + c] == whole[80 * i + 32 + c]);
}

TEST_CASE("rows are accumulated in their order, to the bit") {
  const std::vector<float> v = noise(9 * 150, 5), p = noise(4, 6);
  const std::vector<std::uint32_t> rows{7, 0, 3, 8};
  std::vector<float> wanted(150, 0.25f);
  for (std::size_t d = 0; d < 150; ++d)
    for (std::size_t i = 0; i < 4; ++i) wanted[d] += p[i] * v[rows[i] * 150 + d];
  for (const HotLoops* set : all_sets()) {
    CAPTURE(set->name);
    std::vector<float> y(150, 0.25f);
    set->accumulate(p.data(), rows.data(), 4, v.data(), 150, 150, y.data());
    CHECK(equal_bits(y, wanted));
  }
}

TEST_CASE("exponentials are correct to about 1 ulp and equal on every instruction set") {
  std::vector<float> s;
  for (float x = -90; x < 80; x += 0.37f) s.push_back(x);
  std::vector<float> wanted(s.size());
  hot_loops_base().exponentials(s.data(), s.size(), 0, wanted.data());
  for (std::size_t i = 0; i < s.size(); ++i) {
    const double truth = std::exp(double{s[i]});
    CAPTURE(s[i], truth);
    if (truth < 0x1p-125)
      CHECK(wanted[i] <= 0x1p-125f);
    else
      CHECK(std::fabs(double{wanted[i]} / truth - 1) < 2.5e-7);
  }
  for (const HotLoops* set : all_sets()) {
    CAPTURE(set->name);
    std::vector<float> e(s.size()), scaled(s.size());
    set->exponentials(s.data(), s.size(), 0, e.data());
    CHECK(equal_bits(e, wanted));
    set->exponentials(s.data(), s.size(), 9, scaled.data());
    for (std::size_t i = 0; i < s.size(); ++i)
      if (scaled[i] > 0) CHECK(scaled[i] == e[i] * 0x1p-9f);
  }
}

TEST_CASE("SiLU is correct at every magnitude, and equal on every instruction set") {
  std::vector<float> gate{0.0f, -0.0f, 1e-30f, -1e-30f, 88.0f, -88.0f, 1e30f, -1e30f, 3e38f};
  for (float x = -30; x < 30; x += 0.13f) gate.push_back(x);
  const std::vector<float> up = noise(gate.size(), 7);
  std::vector<float> wanted = gate;
  hot_loops_base().silu_times(wanted.data(), up.data(), gate.size());
  for (std::size_t i = 0; i < gate.size(); ++i) {
    const double g = gate[i], truth = g / (1 + std::exp(-g)) * double{up[i]};
    CAPTURE(gate[i], truth);
    CHECK(std::fabs(double{wanted[i]} - truth) <= 4e-7 * std::fabs(truth) + 1e-36);
  }
  for (const HotLoops* set : all_sets()) {
    std::vector<float> y = gate;
    set->silu_times(y.data(), up.data(), y.size());
    CHECK(equal_bits(y, wanted));
  }
}

TEST_CASE("sums, norms and scalings are equal on every instruction set") {
  for (const std::size_t count : {1u, 15u, 16u, 17u, 100u, 1000u}) {
    const std::vector<float> x = noise(count, 8), w = noise(count, 9);
    double squares = 0;
    for (const float v : x) squares += double{v} * double{v};
    std::vector<float> normed(count);
    rms_norm(x.data(), w.data(), count, 1e-5f, normed.data());
    const double scale = 1 / std::sqrt(squares / static_cast<double>(count) + 1e-5f);
    for (std::size_t i = 0; i < count; ++i)
      CHECK(normed[i] == Approx(double{x[i]} * scale * double{w[i]}).epsilon(3e-7).margin(0));

    const HotLoops& base = hot_loops_base();
    for (const HotLoops* set : all_sets()) {
      CAPTURE(set->name, count);
      CHECK(set->lane_sum(x.data(), count) == base.lane_sum(x.data(), count));
      CHECK(set->lane_sum_of_squares(x.data(), count) == base.lane_sum_of_squares(x.data(), count));
      CHECK(set->largest(x.data(), count) == *std::max_element(x.begin(), x.end()));
      std::vector<float> divided(count), scaled = x, added = x, weighted(count);
      set->divide(x.data(), count, 3, divided.data());
      set->scale(scaled.data(), count, 0.7f);
      set->add(w.data(), count, added.data());
      set->scale_by(x.data(), w.data(), count, 0.7f, weighted.data());
      for (std::size_t i = 0; i < count; ++i) {
        REQUIRE(divided[i] == x[i] / 3);
        REQUIRE(scaled[i] == x[i] * 0.7f);
        REQUIRE(added[i] == x[i] + w[i]);
        REQUIRE(weighted[i] == x[i] * 0.7f * w[i]);
      }
    }
  }
}

TEST_CASE("Invalid logits have a shift in the range of an integer") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity, 1e30f}) {
    std::vector<float> s(20, bad), e(20);
    CHECK(std::abs(shared_exponentials(s.data(), s.size(), e.data())) <= 1 << 23);
  }
}

}  // namespace
}  // namespace kvlab
