#include "policies/observation.hpp"

#include <bit>
#include <cmath>
#include <random>

#include "tests/catch.hpp"
#include "tests/policies/random_floats.hpp"

using kvlab::fixed_mass;
using kvlab::is_requested;
using kvlab::request_threshold16;

namespace {

/// A float as an exact product: significand * 2^exponent.
struct Exact {
  std::uint64_t significand;
  int exponent;
};

Exact exact(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t fraction = bits & 0x7f'ffff, exponent = bits >> 23;
  if (exponent == 0) return {fraction, -149};
  return {fraction | 0x80'0000, static_cast<int>(exponent) - 150};
}

/// round(weight * p * 2^32), ties to even, with integers only.
std::uint64_t reference(float weight, float p) {
  const Exact a = exact(weight), b = exact(p);
  const std::uint64_t product = a.significand * b.significand;  // < 2^48
  const int shift = a.exponent + b.exponent + 32;
  if (shift >= 0) return product << shift;
  if (shift < -63) return 0;  // the product is below 2^48, so this is far below one half
  const std::uint64_t whole = product >> -shift;
  const std::uint64_t rest = product - (whole << -shift), half = std::uint64_t{1} << (-shift - 1);
  return whole + (rest > half || (rest == half && whole % 2 == 1) ? 1 : 0);
}

}  // namespace

TEST_CASE("mass is weight times probability in units of 2^-32") {
  CHECK(fixed_mass(1.0f, 0.0f) == 0);
  CHECK(fixed_mass(0.0f, 1.0f) == 0);
  CHECK(fixed_mass(1.0f, 1.0f) == std::uint64_t{1} << 32);
  CHECK(fixed_mass(1.0f, 0.5f) == std::uint64_t{1} << 31);
  CHECK(fixed_mass(0.5f, 0.5f) == std::uint64_t{1} << 30);
  CHECK(fixed_mass(1024.0f, 1.0f) == std::uint64_t{1} << 42);
}

TEST_CASE("mass is rounded to nearest, ties to even") {
  const auto units = [](float count) { return fixed_mass(1.0f, std::ldexp(count, -32)); };
  CHECK(units(0.5f) == 0);
  CHECK(units(1.5f) == 2);
  CHECK(units(2.5f) == 2);
  CHECK(units(3.5f) == 4);
  CHECK(units(std::nextafter(0.5f, 1.0f)) == 1);
  CHECK(units(std::nextafter(2.5f, 0.0f)) == 2);
  CHECK(units(std::nextafter(2.5f, 3.0f)) == 3);
}

TEST_CASE("mass equals an integer reference on random floats, denormals included") {
  std::mt19937_64 random(1);
  for (int i = 0; i < 200'000; ++i) {
    const float weight = i % 2 ? 1.0f : kvlab::random_weight(random);
    const float p = kvlab::random_probability(random);
    INFO("weight " << weight << ", p " << p);
    REQUIRE(fixed_mass(weight, p) == reference(weight, p));
  }
}

TEST_CASE("a token is requested at tau times the row's largest mass, and not just below") {
  CHECK(request_threshold16(0.01) == 655);
  CHECK(request_threshold16(0.0) == 0);
  CHECK(request_threshold16(1.0) == 65536);

  const std::uint32_t tau = request_threshold16(0.01);
  const std::uint64_t row_max = std::uint64_t{1} << 32;
  const std::uint64_t min_mass = tau * row_max >> 16;  // exact: row_max is a multiple of 2^16
  CHECK(is_requested(min_mass, row_max, tau));
  CHECK_FALSE(is_requested(min_mass - 1, row_max, tau));
  CHECK(is_requested(row_max, row_max, tau));
  CHECK_FALSE(is_requested(0, 1, tau));
  CHECK(is_requested(1, 1, request_threshold16(1.0)));
  CHECK(is_requested(0, row_max, 0));
}
