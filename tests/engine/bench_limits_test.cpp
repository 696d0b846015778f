// Tests that a benchmark's result is refused if it is above the limit that was measured together
// with it.
#include "engine/bench_limits.hpp"

#include <limits>

#include "tests/catch.hpp"

using namespace kvlab;
using Catch::Matchers::ContainsSubstring;

TEST_CASE("an impossible share of a limit is refused") {
  CHECK(share_of_limit("decode", 3.3e12, 4.4e12, "bytes/s") == Approx(0.75));
  CHECK(share_of_limit("decode", 4.4e12 * 1.049, 4.4e12, "bytes/s") == Approx(1.049));
  CHECK_THROWS_WITH(share_of_limit("attention: window, batch 1", 5.4e12, 4.5e12, "bytes/s"),
                    ContainsSubstring("attention: window, batch 1: 5.4e+12 bytes/s is 120% of the "
                                      "limit of 4.5e+12 bytes/s that this run measured"));
  // The rate of a launch that does nothing is infinite, and the share of a rate of NaN is NaN. Both
  // are refused.
  for (const double rate :
       {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
    CHECK_THROWS_AS(share_of_limit("prefill", rate, 9e14, "FLOP/s"), LimitExceeded);
  CHECK_THROWS_AS(share_of_limit("prefill", 1, 0, "FLOP/s"), LimitExceeded);
}

TEST_CASE("attended_pairs() counts the keys that a prompt's queries see") {
  CHECK(attended_pairs(4, 0, 0, 0) == 1 + 2 + 3 + 4);
  CHECK(attended_pairs(4, 2, 0, 0) == 1 + 2 + 2 + 2);
  CHECK(attended_pairs(4, 0, 2, 0) == 1 + 2 + 3 + 4);
  CHECK(attended_pairs(6, 0, 2, 1) == 1 + 2 + (1 + 1) + (1 + 2) + (1 + 1) + (1 + 2));
  CHECK(attended_pairs(4096, 0, 0, 0) == 4096.0 * 4097 / 2);
}
