// Compares quantized rows with a second implementation.
#include "traces/base/numeric/quantize.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "tests/catch.hpp"
#include "traces/base/numeric/dtype.hpp"

using namespace kvlab;

namespace {

std::vector<float> draw(std::size_t size, float spread, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> row(size);
  for (float& x : row) x = normal(random);
  return row;
}

/// Multiplies a row by Hadamard's matrix, with one pass of sums and differences for each bit of an
/// index in a block of 32. Not in place.
std::vector<float> hadamard_matrix_times(std::vector<float> x) {
  for (std::size_t bit = 0; bit < 5; ++bit) {
    std::vector<float> y(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t other = i ^ (std::size_t{1} << bit);
      y[i] = (i >> bit & 1) ? x[other] - x[i] : x[i] + x[other];
    }
    x = y;
  }
  return x;
}

std::vector<float> naive_quantized(const std::vector<float>& row, int bits) {
  std::vector<float> result;
  for (std::size_t b = 0; b < row.size(); b += 32) {
    const auto [lowest, highest] = std::minmax_element(row.begin() + b, row.begin() + b + 32);
    const float mn = f16_to_float(float_to_f16(*lowest));
    const int levels = (1 << bits) - 1;
    std::uint16_t s16 = float_to_f16((*highest - *lowest) / static_cast<float>(levels));
    if (s16 == 0) s16 = 1;
    const float s = f16_to_float(s16);
    for (std::size_t i = b; i < b + 32; ++i) {
      const int quantized = static_cast<int>(std::nearbyint((row[i] - mn) / s));
      const float product = static_cast<float>(std::min(std::max(quantized, 0), levels)) * s;
      result.push_back(product + mn);
    }
  }
  return result;
}

}  // namespace

TEST_CASE("the Hadamard rotation equals Hadamard's matrix, and twice it multiplies by 32") {
  std::vector<float> row = draw(96, 1, 1), twice = row;
  hadamard_rotate(row);
  CHECK(row == hadamard_matrix_times(twice));
  std::vector<float> unit(32);
  unit[0] = 1;
  hadamard_rotate(unit);
  CHECK(unit == std::vector<float>(32, 1.0f));
  hadamard_rotate(row);
  for (std::size_t i = 0; i < row.size(); ++i) CHECK(row[i] / 32 == Approx(twice[i]).margin(1e-6));
}

TEST_CASE("integer formats equal the second implementation, bit for bit") {
  for (int bits = 2; bits <= 8; ++bits)
    for (const float spread : {1e-7f, 1e-3f, 1.0f, 300.0f})
      for (std::uint32_t seed = 0; seed < 20; ++seed) {
        std::vector<float> row = draw(64, spread, seed);
        const std::vector<float> expected = naive_quantized(row, bits);
        quantize_row(row, bits, false);
        REQUIRE(row == expected);
      }
}

TEST_CASE("a block of equal numbers is kept exactly") {
  std::vector<float> row(32, 0.5f);
  quantize_row(row, 2, false);
  CHECK(row == std::vector<float>(32, 0.5f));
  std::vector<float> nothing(32);
  quantize_row(nothing, 8, true);
  CHECK(nothing == std::vector<float>(32));
}

TEST_CASE(
    "e4m3 keeps three bits after the leading one, also of numbers that are small in a block") {
  // 448 = 1.75 * 2^8 is e4m3's largest number, so the scale is 1.
  std::vector<float> row(32);
  const std::vector<std::pair<float, float>> pairs{
      {448, 448},         {1, 1},     {1.0625f, 1},           {1.1875f, 1.25f},
      {-17, -16},         {-19, -20}, {0.001f, 0.001953125f}, {0.0009f, 0},
      {0.016f, 0.015625f}};
  for (std::size_t i = 0; i < pairs.size(); ++i) row[i] = pairs[i].first;
  quantize_row(row, 8, true);
  for (std::size_t i = 0; i < pairs.size(); ++i) CHECK(row[i] == pairs[i].second);
  std::vector<float> larger(32, 449.0f);  // the scale is 2, and 224.5 is rounded to 224
  quantize_row(larger, 8, true);
  CHECK(larger.front() == 448);
}

TEST_CASE("GGML's formats round as llama.cpp does, in an example") {
  // The number with the largest magnitude is -8, so the scale of q4_0 is 1, and 7.4 gets the
  // highest level.
  std::vector<float> row(32);
  row[0] = -8, row[1] = 7.4f, row[2] = 2.5f, row[3] = -2.5f, row[4] = 0.49f;
  std::vector<float> with_minimum = row;
  quantize_ggml(row, 4);
  CHECK(std::vector(row.begin(), row.begin() + 5) == std::vector<float>{-8, 7, 3, -2, 0});
  quantize_ggml_min(with_minimum, 4);
  const float scale = f16_to_float(float_to_f16((7.4f + 8) / 15));
  CHECK(with_minimum[0] == -8);
  CHECK(with_minimum[1] == 15 * scale - 8);
  std::vector<float> bytes(32, 0.5f);
  bytes[7] = -127;
  quantize_ggml(bytes, 8);  // halves are rounded away from zero
  CHECK(bytes[0] == 1);
  CHECK(bytes[7] == -127);
}

TEST_CASE("the orthonormal rotation is that of the Hadamard matrix, and undoes itself") {
  std::vector<float> row(192);
  for (std::size_t i = 0; i < row.size(); ++i) row[i] = static_cast<float>(i * i % 23) - 11;
  std::vector<float> rotated = row;
  hadamard_rotate_orthonormal(rotated, 64);
  for (std::size_t i = 0; i < row.size(); ++i) {
    double sum = 0;
    for (std::size_t j = 0; j < 64; ++j)
      sum += (std::popcount(i % 64 & j) % 2 == 0 ? 1 : -1) * row[i / 64 * 64 + j];
    CHECK(rotated[i] == sum / 8);
  }
  hadamard_rotate_orthonormal(rotated, 64);
  CHECK(rotated == row);
}

TEST_CASE("nvfp4 keeps one bit after the leading one, in blocks of 16 with an e4m3 scale") {
  std::vector<float> row(32);
  const std::vector<std::pair<float, float>> pairs{
      {6, 6}, {5.1f, 6}, {5, 4}, {2.5f, 2}, {-1.75f, -2}, {0.25f, 0}, {0.26f, 0.5f}};
  for (std::size_t i = 0; i < pairs.size(); ++i) row[i] = pairs[i].first;
  row[16] = 3000;  // the scale of this block is at most 448
  row[17] = 1e-6f;
  quantize_nvfp4(row);
  for (std::size_t i = 0; i < pairs.size(); ++i) CHECK(row[i] == pairs[i].second);
  CHECK(row[16] == 448 * 6);
  CHECK(row[17] == 0);
}

TEST_CASE("e4m3 with scale 1 is clamped to 448") {
  std::vector<float> row(32);
  row[0] = 1000, row[1] = -449, row[2] = 1.0625f, row[3] = 0.0009f, row[4] = -17;
  quantize_e4m3(row);
  CHECK(std::vector(row.begin(), row.begin() + 5) == std::vector<float>{448, -448, 1, 0, -16});
}

TEST_CASE("every format refuses NaN") {
  std::vector<float> row(32);
  row[5] = std::nanf("");
  const auto refuses = [&](auto quantize) {
    CHECK_THROWS_WITH(quantize(std::span(row)), Catch::Matchers::ContainsSubstring("is NaN"));
  };
  refuses([](std::span<float> r) { quantize_row(r, 4, false); });
  refuses([](std::span<float> r) { quantize_row(r, 8, true); });
  refuses([](std::span<float> r) { quantize_e4m3(r); });
  refuses([](std::span<float> r) { quantize_ggml(r, 4); });
  refuses([](std::span<float> r) { quantize_ggml_min(r, 5); });
  refuses([](std::span<float> r) { quantize_nvfp4(r); });
}

TEST_CASE("numbers out of fp16's range are refused") {
  std::vector<float> row(32);
  row[3] = 1e6f, row[4] = -70000.0f;
  CHECK_THROWS_WITH(quantize_row(row, 4, false),
                    Catch::Matchers::ContainsSubstring("at most 65504"));
}
