#include "policies/rule.hpp"

#include <limits>

#include "policies/policy.hpp"
#include "tests/catch.hpp"

using kvlab::Extent;
using kvlab::Guards;
using kvlab::LeavingKey;

namespace {
constexpr std::uint32_t kLast = std::numeric_limits<std::uint32_t>::max();
}

TEST_CASE("sinks guard the positions below their number") {
  constexpr Guards guards{.sinks = 4};
  CHECK(guards.guard(0, 100) == 2);
  CHECK(guards.guard(3, 100) == 2);
  CHECK(guards.guard(4, 100) == 0);
  CHECK(Guards{}.guard(0, 100) == 0);
}

TEST_CASE("recent counts the first admitted token as one of its own") {
  // now = 100 is to be admitted: with recent = 3 it is guarded together with 99 and 98.
  constexpr Guards guards{.recent = 3};
  CHECK(guards.guard(97, 100) == 0);
  CHECK(guards.guard(98, 100) == 1);
  CHECK(guards.guard(99, 100) == 1);
  CHECK(Guards{.recent = 1}.guard(99, 100) == 0);
  CHECK(Guards{}.guard(99, 100) == 0);
}

TEST_CASE("a token that is both recent and a sink is a sink") {
  CHECK(Guards{.sinks = 10, .recent = 10}.guard(5, 6) == 2);
}

TEST_CASE("guards do not overflow at the largest positions") {
  CHECK(Guards{.recent = kLast}.guard(kLast - 1, kLast) == 1);
  CHECK(Guards{.recent = 2}.guard(kLast - 1, kLast) == 1);
  CHECK(Guards{.recent = 1}.guard(kLast - 1, kLast) == 0);
}

TEST_CASE("tokens leave by guard, then by rank, then by position") {
  constexpr std::uint64_t high = std::numeric_limits<std::uint64_t>::max();
  CHECK(LeavingKey{0, high, kLast} < LeavingKey{1, 0, 0});
  CHECK(LeavingKey{1, high, kLast} < LeavingKey{2, 0, 0});
  CHECK(LeavingKey{1, 5, kLast} < LeavingKey{1, 6, 0});
  CHECK(LeavingKey{1, 5, 7} < LeavingKey{1, 5, 8});
  CHECK_FALSE(LeavingKey{1, 5, 8} < LeavingKey{1, 5, 7});
  CHECK_FALSE(LeavingKey{1, 5, 7} < LeavingKey{1, 5, 7});
}

TEST_CASE("a share is rounded down, and does not overflow") {
  CHECK(kvlab::percent(50).resolve(128) == 64);
  CHECK(kvlab::percent(50).resolve(129) == 64);
  CHECK(kvlab::percent(50).resolve(1) == 0);
  CHECK(kvlab::percent(100).resolve(kLast) == kLast);
  CHECK(kvlab::percent(20).resolve(4) == 0);
  CHECK(kvlab::percent(20).resolve(5) == 1);
  CHECK(Extent{.share_ppm = 125'000, .is_share = true}.resolve(1000) == 125);  // 12.5%
  CHECK(Extent{.share_ppm = 1, .is_share = true}.resolve(1'000'000) == 1);
  CHECK(Extent{.share_ppm = 1, .is_share = true}.resolve(999'999) == 0);
  CHECK(kvlab::tokens(7).resolve(3) == 7);
}
