#include "policies/rule/eviction_order.hpp"

#include <limits>

#include "policies/policy.hpp"
#include "tests/catch.hpp"

using kvlab::EvictionKey;
using kvlab::Extent;
using kvlab::ProtectedTokens;

namespace {
constexpr std::uint32_t kLast = std::numeric_limits<std::uint32_t>::max();
constexpr ProtectedTokens kProtection{.sinks = 4, .recent = 2};
}  // namespace

TEST_CASE("sinks protect the positions below their number") {
  constexpr ProtectedTokens protected_tokens{.sinks = 4};
  CHECK(protected_tokens.protection(0, 100) == 2);
  CHECK(protected_tokens.protection(3, 100) == 2);
  CHECK(protected_tokens.protection(4, 100) == 0);
  CHECK(ProtectedTokens{}.protection(0, 100) == 0);
}

TEST_CASE("recent includes the first token to be appended") {
  // now = 100 is the next token: with recent = 3, tokens 98, 99 and 100 are protected.
  constexpr ProtectedTokens protected_tokens{.recent = 3};
  CHECK(protected_tokens.protection(97, 100) == 0);
  CHECK(protected_tokens.protection(98, 100) == 1);
  CHECK(protected_tokens.protection(99, 100) == 1);
  CHECK(ProtectedTokens{.recent = 1}.protection(99, 100) == 0);
  CHECK(ProtectedTokens{}.protection(99, 100) == 0);
}

TEST_CASE("a token that is both recent and a sink is a sink") {
  CHECK(ProtectedTokens{.sinks = 10, .recent = 10}.protection(5, 6) == 2);
}

TEST_CASE("protection does not overflow at the largest positions") {
  CHECK(ProtectedTokens{.recent = kLast}.protection(kLast - 1, kLast) == 1);
  CHECK(ProtectedTokens{.recent = 2}.protection(kLast - 1, kLast) == 1);
  CHECK(ProtectedTokens{.recent = 1}.protection(kLast - 1, kLast) == 0);
}

TEST_CASE("the unprotected positions are those of protection 0") {
  for (std::uint32_t sinks = 0; sinks < 6; ++sinks)
    for (std::uint32_t recent = 0; recent < 6; ++recent)
      for (std::uint32_t now = 0; now < 16; ++now)
        for (std::uint32_t position = 0; position < now; ++position) {
          const ProtectedTokens own{.sinks = sinks, .recent = recent};
          CAPTURE(sinks, recent, now, position);
          CHECK((position - sinks < own.num_unprotected(now)) ==
                (own.protection(position, now) == 0));
        }
}

TEST_CASE("first_victim() prefers a token to a missing candidate, and the earlier of two tokens") {
  const kvlab::EvictionCandidate none = kvlab::EvictionCandidate::none(),
                                 unprotected = kvlab::EvictionCandidate::none_unprotected(),
                                 sink{{2, 7, 3}, 0}, token{{0, ~std::uint64_t{0}, 9}, 1};
  CHECK(kvlab::first_victim(none, sink).slot == 0);
  CHECK(kvlab::first_victim(sink, none).slot == 0);
  CHECK(kvlab::first_victim(unprotected, token).slot == 1);
  CHECK(kvlab::first_victim(sink, token).slot == 1);
  CHECK(kvlab::first_victim(none, none).slot == -1);
  CHECK(kProtection.key(7, 3, 100) == EvictionKey{2, 7, 3});
  CHECK(kProtection.key(7, 99, 100) == EvictionKey{1, 7, 99});
}

TEST_CASE("tokens are evicted by protection, then by rank, then by position") {
  constexpr std::uint64_t high = std::numeric_limits<std::uint64_t>::max();
  CHECK(EvictionKey{0, high, kLast} < EvictionKey{1, 0, 0});
  CHECK(EvictionKey{1, high, kLast} < EvictionKey{2, 0, 0});
  CHECK(EvictionKey{1, 5, kLast} < EvictionKey{1, 6, 0});
  CHECK(EvictionKey{1, 5, 7} < EvictionKey{1, 5, 8});
  CHECK_FALSE(EvictionKey{1, 5, 8} < EvictionKey{1, 5, 7});
  CHECK_FALSE(EvictionKey{1, 5, 7} < EvictionKey{1, 5, 7});
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
