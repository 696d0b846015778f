// Tier plans: their texts, their slots, and which tokens are demoted.
#include "policies/tiers/tier_plan.hpp"

#include <algorithm>
#include <random>
#include <set>
#include <string>

#include "policies/aged_set.hpp"
#include "tests/catch.hpp"

using namespace kvlab;

namespace {

/// A second implementation of the rule for tiers, for a policy that ranks by accumulated mass. It
/// moves one token at a time.
class NaiveTierPlan {
 public:
  NaiveTierPlan(std::vector<std::uint32_t> slots, std::uint32_t sinks, std::uint32_t recent)
      : slots_(std::move(slots)), tiers_(slots_.size()), sinks_(sinks), recent_(recent) {}

  void evict_to_budget(std::uint32_t now) {
    now_ = now;
    if (tiers_[0].size() + 1 <= slots_[0]) return;
    if (tiers_[0].size() == slots_[0])
      demote();
    else
      assign_tiers();
  }
  void append(std::uint32_t first, std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) tiers_[0].push_back({first + i, 0});
  }
  void observe(std::uint32_t position, std::uint64_t mass) {
    for (auto& tier : tiers_)
      for (Token& token : tier)
        if (token.position == position) token.mass += mass;
  }
  /// (position, tier), by position.
  std::vector<std::pair<std::uint32_t, std::size_t>> live() const {
    std::vector<std::pair<std::uint32_t, std::size_t>> all;
    for (std::size_t r = 0; r < tiers_.size(); ++r)
      for (const Token& token : tiers_[r]) all.emplace_back(token.position, r);
    std::ranges::sort(all);
    return all;
  }

 private:
  struct Token {
    std::uint32_t position;
    std::uint64_t mass;
  };
  bool before(const Token& a, const Token& b) const {
    const auto protection = [&](const Token& t) {
      return t.position < sinks_ ? 2 : t.position + recent_ > now_ ? 1 : 0;
    };
    return std::tuple(protection(a), a.mass, a.position) <
           std::tuple(protection(b), b.mass, b.position);
  }
  Token take_first(std::vector<Token>& tier) const {
    const auto first = std::ranges::min_element(
        tier, [&](const Token& a, const Token& b) { return before(a, b); });
    const Token token = *first;
    tier.erase(first);
    return token;
  }
  void demote() {
    Token going = take_first(tiers_[0]);
    for (std::size_t r = 1; r < tiers_.size(); ++r) {
      tiers_[r].push_back(going);
      if (tiers_[r].size() <= slots_[r]) return;
      going = take_first(tiers_[r]);
    }
  }
  void assign_tiers() {
    std::vector<std::pair<Token, std::size_t>> all;
    for (std::size_t r = 0; r < tiers_.size(); ++r) {
      for (const Token& token : tiers_[r]) all.emplace_back(token, r);
      tiers_[r].clear();
    }
    std::ranges::sort(all, [&](const auto& a, const auto& b) { return before(b.first, a.first); });
    for (const auto& [token, own] : all)
      for (std::size_t r = own; r < tiers_.size(); ++r)
        if (tiers_[r].size() < slots_[r] - (r == 0)) {
          tiers_[r].push_back(token);
          break;
        }
  }

  std::vector<std::uint32_t> slots_;
  std::vector<std::vector<Token>> tiers_;
  std::uint32_t sinks_, recent_, now_ = 0;
};

LiveSet live_set(const std::vector<std::uint32_t>& slots, const std::string& protected_tokens) {
  std::uint32_t budget = 0;
  std::vector<TierSlots> tiers;
  for (const std::uint32_t own : slots) {
    tiers.push_back({kKvFormats[tiers.size()], own});
    budget += own;
  }
  LiveSet live(parse_policy("h2o:" + protected_tokens), budget, {});
  live.keep_at(tiers);
  return live;
}

std::string refusal_of(std::string_view text) {
  try {
    parse_tier_plan(text);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a token's bytes by format, for head size 128") {
  std::vector<std::uint32_t> bytes;
  for (const KvFormat& format : kKvFormats) bytes.push_back(4 * format.block_bytes());
  CHECK(bytes == std::vector<std::uint32_t>{512, 264, 288, 160, 128, 96, 160, 96});
}

TEST_CASE("formats of keys and values have names, bytes and an order") {
  std::set<std::string> names;
  for (const RowFormat& key : kRowFormats)
    for (const RowFormat& value : kRowFormats) {
      const KvFormat format{&key, &value};
      CHECK(find_kv_format(format.name()) == format);
      names.insert(format.name());
      CHECK(format.is_at_most({}));
    }
  CHECK(names.size() == std::size(kRowFormats) * std::size(kRowFormats));
  CHECK(find_kv_format("4/2") == find_kv_format("k4v2"));
  CHECK(find_kv_format("kivi4") != find_kv_format("4"));
  for (const char* wrong : {"", "/", "4/", "/4", "4/4/4", "kivi4/4", "k4v2/4", "Q4_0"})
    CHECK_FALSE(find_kv_format(wrong));
  // Bytes of a key or value of size 64 in llama.cpp: 64 elements of 4.5, 5, 5.5, 6 and 8.5 bits.
  const auto bytes = [](const char* name) { return find_kv_format(name)->block_bytes(); };
  CHECK(bytes("q4_0") == 36);
  CHECK(bytes("q4_1") == 40);
  CHECK(bytes("q5_0") == 44);
  CHECK(bytes("q5_1") == 48);
  CHECK(bytes("q8_0/q4_0") == 34 + 18);
  CHECK(bytes("fp8_e4m3") == 64);
  CHECK(bytes("nvfp4") == 36);
  CHECK(bytes("int4_g64") == 40);
  CHECK(bytes("int2_g64") == 24);
  CHECK(bytes("3") == 32);
  CHECK(find_kv_format("4")->bits() == 5);
  CHECK(kernel_format(*find_kv_format("2")) == 5u);
  CHECK_FALSE(kernel_format(*find_kv_format("kivi4")));
  CHECK_FALSE(kernel_format(*find_kv_format("8/4")));
}

TEST_CASE("tier plans read back as they are written") {
  for (const char* text :
       {"16", "4", "q8_0/q4_0", "16/4", "8/4:50%,4:50%", "k4v2", "16:16t,4:100%", "16:50%,16:50%",
        "8:25%,4:50%,k4v2:25%", "8x2-4x28", "4x3", "16x1-q8_0/q4_0x2-k4v2x1"}) {
    CHECK(parse_tier_plan(text).text() == text);
    CHECK(parse_tier_plan(parse_tier_plan(text).text('+', '@')) == parse_tier_plan(text));
    const PolicySpec spec = parse_policy("lru:tiers=" + parse_tier_plan(text).text('+', '@'));
    CHECK(parse_policy(spec.text()).tier_plan == spec.tier_plan);
    CHECK(parse_policy(spec.brief()).tier_plan == spec.tier_plan);
  }
  CHECK(parse_policy("full:tiers=4").tier_plan == parse_tier_plan("4"));
  CHECK_THROWS_WITH(parse_policy("full:recent=4"),
                    Catch::Matchers::ContainsSubstring("never evicts"));
}

TEST_CASE("formats by layer are written as runs of equal layers") {
  const TierPlan plan = parse_tier_plan("8x1-4/2x2-k4v2x1-16x1");
  REQUIRE(plan.layers.size() == 5);
  CHECK(plan.layers[0].name() == "8");
  CHECK(plan.mean_bits() == Approx((9 + 3 * 4 + 16) / 5.0));
  CHECK(plan.layers[3].name() == "k4v2");
  CHECK(plan.text() == "8x1-k4v2x3-16x1");
  CHECK((plan.is_quantized() && plan.is_by_layer() && !plan.is_plain()));
  CHECK(!parse_tier_plan("16x2").is_quantized());
  for (const char* wrong : {"4x", "x", "x3", "4x0", "4x1-", "-4x1", "4x1-8", "4x1025", "4x1024-4x1",
                            "4x99999999999999999999", "4x-1", "4x 1", "4x1,8x1", "4x1:50%"})
    CHECK_THAT(refusal_of(wrong), Catch::Matchers::ContainsSubstring("tiers '"));
  CHECK_THAT(refusal_of("4x1-8"),
             Catch::Matchers::ContainsSubstring("'8' should be FORMATxLAYERS such as 4x28"));
  CHECK_THAT(refusal_of("kivi4x2"), Catch::Matchers::ContainsSubstring("cannot differ by layer"));
  std::string longest;
  for (int i = 0; i < 200'000; ++i) longest += "4x1-";
  CHECK(refusal_of(longest).size() < 300);
}

TEST_CASE("invalid tier plans are refused") {
  CHECK_THAT(refusal_of("5"), Catch::Matchers::ContainsSubstring(
                                  "'5' is not a format; known: 16, fp8, fp8_e4m3, 8, q8_0"));
  CHECK_THAT(refusal_of(""), Catch::Matchers::ContainsSubstring("is not a format"));
  CHECK_THAT(refusal_of("4:50%,8:50%"),
             Catch::Matchers::ContainsSubstring(
                 "8 follows 4, but tiers must be in order of decreasing precision"));
  CHECK_THAT(refusal_of("8/4:50%,4/8:50%"),
             Catch::Matchers::ContainsSubstring(
                 "4/8 follows 8/4, but tiers must be in order of decreasing precision"));
  CHECK_THAT(refusal_of("16:50%,4:49%"),
             Catch::Matchers::ContainsSubstring("shares add up to 99%"));
  CHECK_THAT(refusal_of("16,4"), Catch::Matchers::ContainsSubstring("shares add up to 200%"));
  CHECK_THAT(refusal_of("16:8t"), Catch::Matchers::ContainsSubstring("shares add up to 0%"));
  CHECK_THAT(refusal_of("16:16,4:100%"),
             Catch::Matchers::ContainsSubstring("should be tokens such as 16t"));
  CHECK_THAT(refusal_of("16:0t,4:100%"), Catch::Matchers::ContainsSubstring("at least 1"));
  CHECK_THAT(refusal_of("16:-1%,4:101%"), Catch::Matchers::ContainsSubstring("at least 0%"));
}

TEST_CASE("A plan with too many tiers is refused, for a text of any length") {
  const auto plan = [](std::size_t tiers) {
    std::string text;
    for (std::size_t i = 1; i < tiers; ++i) text += "16:1t,";
    return text + "4:100%";
  };
  CHECK(parse_tier_plan(plan(kMaxTiers)).tiers.size() == kMaxTiers);
  for (const std::size_t tiers : {kMaxTiers + 1, std::size_t{256}, std::size_t{1'000'000}}) {
    const std::string refusal = refusal_of(plan(tiers));
    CHECK(refusal.find("at most 16 are allowed") != std::string::npos);
    CHECK(refusal.size() < 200);
  }
  CHECK(refusal_of(std::string(1'000'000, ',')).size() < 200);
  LiveSet live(parse_policy("h2o"), 300, {});
  CHECK_THROWS_AS(live.keep_at(std::vector<TierSlots>(256, TierSlots{.slots = 1})),
                  std::logic_error);
}

TEST_CASE("the slots of a tier plan fit its bytes") {
  const auto slots = [](const char* tier_plan, std::uint64_t bytes) {
    std::vector<std::uint32_t> counts;
    for (const TierSlots& tier : parse_tier_plan(tier_plan).slots(bytes, 4))
      counts.push_back(tier.slots);
    return counts;
  };
  CHECK(slots("16", 64 * 512) == std::vector<std::uint32_t>{64});
  CHECK(slots("4", 64 * 512) == std::vector<std::uint32_t>{204});
  CHECK(slots("16:50%,16:50%", 65 * 512) == std::vector<std::uint32_t>{32, 33});
  CHECK(slots("16:16t,4:100%", 64 * 512) == std::vector<std::uint32_t>{16, 153});
  CHECK(slots("8:25%,4:50%,k4v2:25%", 64 * 512) == std::vector<std::uint32_t>{28, 102, 65});
  CHECK(slots("16:16t,4:100%", 15 * 512) == std::vector<std::uint32_t>{15, 0});
  CHECK_THROWS_WITH(slots("16:10%,4:90%", 4 * 512),
                    Catch::Matchers::ContainsSubstring("2048 bytes are too few for one token"));
}

TEST_CASE("tokens are demoted and evicted as the rule says") {
  const std::vector<std::vector<std::uint32_t>> tier_plans{
      {4, 3}, {1, 5}, {3, 0, 4}, {2, 2, 2, 2}, {5, 1, 9}};
  for (const auto& slots : tier_plans)
    for (const std::uint32_t max_append : {1u, 9u})
      for (std::uint32_t seed = 0; seed < 6; ++seed) {
        LiveSet live = live_set(slots, "sinks=2:recent=2");
        NaiveTierPlan naive(slots, 2, 2);
        std::mt19937 random(seed);
        for (std::uint32_t now = 0; now < 150;) {
          live.evict_to_budget(now);
          naive.evict_to_budget(now);
          const std::uint32_t count = random() % 3 == 0 ? 1 + random() % max_append : 1;
          live.append(now, count);
          naive.append(now, count);
          now += count;
          std::vector<Observation> seen(live.size());
          for (std::size_t i = 0; i < seen.size(); ++i) {
            seen[i] = {.mass = random() % 4, .queries = 1};
            naive.observe(live.positions()[i], seen[i].mass);
          }
          live.observe(seen);
          std::vector<std::pair<std::uint32_t, std::size_t>> own;
          for (std::uint32_t i = 0; i < live.size(); ++i)
            own.emplace_back(live.positions()[i], live.tier(i));
          REQUIRE(own == naive.live());
        }
      }
}
