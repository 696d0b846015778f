#include "kernels/device/mass_sum.hpp"

#include <cmath>
#include <random>

#include "tests/catch.hpp"
#include "tests/policies/random_floats.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

TEST_CASE("MassSum equals the sum of the single masses, to the bit") {
  std::mt19937_64 random(3);
  for (int again = 0; again < 200; ++again) {
    MassSum sum;
    std::uint64_t exact = 0;
    const std::uint32_t count = 1 + random() % 16384;
    for (std::uint32_t i = 0; i < count; ++i) {
      const float p = random_probability(random) * (again % 2 ? 1.0f : 1.0000153f);
      sum.add(p);
      exact += fixed_mass(1.0f, p);
    }
    REQUIRE(sum.total(count) == exact);
  }
  MassSum sum;
  for (int i = 0; i < 16384; ++i) sum.add(1.5f);
  CHECK(sum.total(16384) == 16384 * fixed_mass(1.0f, 1.5f));
}

TEST_CASE("request_floor() is the least probability that is a request by definition") {
  std::mt19937_64 random(4);
  int checked = 0;
  for (int again = 0; again < 20000; ++again) {
    const std::uint64_t row_max = fixed_mass(1.0f, random_probability(random));
    const std::uint32_t threshold16 =
        again % 8 == 0 ? 65536 : static_cast<std::uint32_t>(random() % 65537);
    const float floor = request_floor(row_max, threshold16);
    const auto is_request = [&](float p) {
      return is_requested(fixed_mass(1.0f, p), row_max, threshold16);
    };
    if (floor < 0) {
      REQUIRE(is_request(0.0f));
      continue;
    }
    ++checked;
    REQUIRE(is_request(floor));
    REQUIRE(!is_request(std::nextafter(floor, 0.0f)));
  }
  CHECK(checked > 1000);
}
