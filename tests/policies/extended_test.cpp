// The registry with two more policies: `peak` from docs/guides/write-a-policy.md, and `leaky`.
#include <algorithm>

#include "policies/aged_set.hpp"
#include "policies/ops/make_ops.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"

using namespace kvlab;
using kvlab::test::error_of;

namespace {

std::vector<Observation> masses(std::initializer_list<std::uint64_t> values) {
  std::vector<Observation> seen;
  for (const std::uint64_t mass : values) seen.push_back({.mass = mass, .queries = 1});
  return seen;
}

std::string refusal(std::string_view text) {
  return error_of<std::invalid_argument>([&] { parse_policy(text); });
}

}  // namespace

TEST_CASE("the documentation's peak is in the catalogue after adding one header and one line") {
  const PolicySpec spec = parse_policy("peak");
  CHECK(spec.text() == "peak:sinks=0:recent=0");
  CHECK(spec.entry->slot_bytes == 8);
  CHECK(spec.entry->info.needs == Needs::mass);
  CHECK(spec.entry->info.positions == Positions::original);
  CHECK(refusal("pea").ends_with("did you mean 'peak'?"));
}

TEST_CASE("the documentation's peak weighs only the last query") {
  const PolicyEntry& peak = *parse_policy("peak").entry;
  CHECK(peak.weight(0, nullptr) == 1.0f);
  CHECK(peak.weight(1, nullptr) == 0.0f);
  CHECK(peak.tail(nullptr) == 1);
}

TEST_CASE("the documentation's peak evicts tokens that never had high attention") {
  LiveSet live(parse_policy("peak"), 4, {});
  live.append(0, 5);
  live.observe(masses({50, 10, 40, 30, 20}));
  live.evict_to_budget(5);  // 10 and 20 are evicted
  CHECK(std::ranges::equal(live.positions(), std::vector{0, 2, 3}));
  live.append(5, 1);
  live.observe(
      masses({5, 20, 60, 39}));  // the peaks are 50, 40, 60 and 39, which includes earlier appends
  live.evict_to_budget(6);
  CHECK(std::ranges::equal(live.positions(), std::vector{0, 2, 3}));
  live.append(6, 1);
  live.observe(masses({7, 7, 9, 40}));  // if two tokens have equal peaks, the older one is evicted
  live.evict_to_budget(7);
  CHECK(std::ranges::equal(live.positions(), std::vector{0, 3, 6}));
}

TEST_CASE("parameters have defaults, a range, and a text that parses back") {
  const PolicySpec spec = parse_policy("leaky:slope=0.25:recent=3");
  CHECK(spec.text() == "leaky:keep=0.9:slope=0.25:span=64:sinks=1:recent=3");
  CHECK(parse_policy(spec.text()).params == spec.params);
  CHECK(parse_policy("leaky:keep=0.30000000000000004").params[0] == 0.30000000000000004);
  const PolicySpec again = parse_policy(parse_policy("leaky:keep=0.30000000000000004").text());
  CHECK(again.params[0] == 0.30000000000000004);

  CHECK(refusal("leaky:keep=1.5") == "policy leaky: keep=1.5 is outside 0 to 1");
  CHECK(refusal("leaky:keep=-0.1") == "policy leaky: keep=-0.1 is outside 0 to 1");
  CHECK(refusal("leaky:keep=inf") == "policy leaky: keep: 'inf' should be a number from 0 to 1");
  CHECK(refusal("leaky:kep=1") == "policy leaky: unknown parameter 'kep'; did you mean 'keep'?");
  CHECK(refusal("leaky:half=1") ==
        "policy leaky: unknown parameter 'half'; known: keep, slope, span, sinks, recent, prompt, "
        "every, once, smooth, pool, scope, group, tiers, centre");
}

TEST_CASE("parameters reach the hooks") {
  const PolicyEntry& entry = *parse_policy("leaky").entry;
  const auto params = parse_policy("leaky:slope=1:span=3").packed_params();
  CHECK(entry.tail(params.data()) == 3);
  CHECK(entry.weight(0, params.data()) == 1.0f);
  CHECK(entry.weight(1, params.data()) == 0.5f);
  CHECK(entry.weight(3, params.data()) == 0.0f);
}

namespace {

/// A policy whose state has four bytes of padding.
struct Padded {
  static constexpr PolicyInfo kInfo{.name = "padded",
                                    .summary = "accumulated mass, and how often",
                                    .citation = "made up for the tests",
                                    .needs = Needs::mass};
  struct Params {};
  struct Slot {
    std::uint64_t mass;
    std::uint32_t seen;
  };
  static constexpr void append(Slot& slot, Token, const Params&, const Step&) {
    slot.mass = 0;
    slot.seen = 0;
  }
  static constexpr void observe(Slot& slot, const Observation& seen, const Params&, const Step&) {
    slot.mass += seen.mass;
    ++slot.seen;
  }
  static constexpr std::uint64_t rank(const Slot& slot, Token, const Params&, const Step&) {
    return slot.mass;
  }
};

}  // namespace

TEST_CASE("states are compared by their members, not by their padding") {
  LiveSet live(make_ops<Padded>(), {}, 4, {}, {});
  live.append(0, 1);
  const auto bytes = live.state(0);
  std::vector<std::byte> other(bytes.begin(), bytes.end());
  REQUIRE(other.size() == 16);
  other[13] = std::byte{0xA5};
  CHECK(live.has_state(0, other));
  other[8] = std::byte{1};
  CHECK_FALSE(live.has_state(0, other));
  other.pop_back();
  CHECK_FALSE(live.has_state(0, other));
}
