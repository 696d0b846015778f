// Ladders: their texts, their slots, and who steps down.
#include "policies/rungs/ladder.hpp"

#include <algorithm>
#include <random>

#include "policies/aged_set.hpp"
#include "tests/catch.hpp"

using namespace kvlab;

namespace {

/// The rule once more, one token after another, for a policy that leaves by accumulated mass.
class NaiveLadder {
 public:
  NaiveLadder(std::vector<std::uint32_t> slots, std::uint32_t sinks, std::uint32_t recent)
      : slots_(std::move(slots)), rungs_(slots_.size()), sinks_(sinks), recent_(recent) {}

  void make_room(std::uint32_t now) {
    now_ = now;
    if (rungs_[0].size() + 1 <= slots_[0]) return;
    if (rungs_[0].size() == slots_[0])
      step_down();
    else
      deal();
  }
  void admit(std::uint32_t first, std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) rungs_[0].push_back({first + i, 0});
  }
  void observe(std::uint32_t position, std::uint64_t mass) {
    for (auto& rung : rungs_)
      for (Token& token : rung)
        if (token.position == position) token.mass += mass;
  }
  /// (position, rung), by position.
  std::vector<std::pair<std::uint32_t, std::size_t>> live() const {
    std::vector<std::pair<std::uint32_t, std::size_t>> all;
    for (std::size_t r = 0; r < rungs_.size(); ++r)
      for (const Token& token : rungs_[r]) all.emplace_back(token.position, r);
    std::ranges::sort(all);
    return all;
  }

 private:
  struct Token {
    std::uint32_t position;
    std::uint64_t mass;
  };
  bool before(const Token& a, const Token& b) const {
    const auto guard = [&](const Token& t) {
      return t.position < sinks_ ? 2 : t.position + recent_ > now_ ? 1 : 0;
    };
    return std::tuple(guard(a), a.mass, a.position) < std::tuple(guard(b), b.mass, b.position);
  }
  Token take_first(std::vector<Token>& rung) const {
    const auto first = std::ranges::min_element(
        rung, [&](const Token& a, const Token& b) { return before(a, b); });
    const Token token = *first;
    rung.erase(first);
    return token;
  }
  void step_down() {
    Token going = take_first(rungs_[0]);
    for (std::size_t r = 1; r < rungs_.size(); ++r) {
      rungs_[r].push_back(going);
      if (rungs_[r].size() <= slots_[r]) return;
      going = take_first(rungs_[r]);
    }
  }
  void deal() {
    std::vector<std::pair<Token, std::size_t>> all;
    for (std::size_t r = 0; r < rungs_.size(); ++r) {
      for (const Token& token : rungs_[r]) all.emplace_back(token, r);
      rungs_[r].clear();
    }
    std::ranges::sort(all, [&](const auto& a, const auto& b) { return before(b.first, a.first); });
    for (const auto& [token, own] : all)
      for (std::size_t r = own; r < rungs_.size(); ++r)
        if (rungs_[r].size() < slots_[r] - (r == 0)) {
          rungs_[r].push_back(token);
          break;
        }
  }

  std::vector<std::uint32_t> slots_;
  std::vector<std::vector<Token>> rungs_;
  std::uint32_t sinks_, recent_, now_ = 0;
};

LiveSet live_set(const std::vector<std::uint32_t>& slots, const std::string& guards) {
  std::uint32_t budget = 0;
  std::vector<RungSlots> rungs;
  for (const std::uint32_t own : slots) {
    rungs.push_back({&kKvForms[rungs.size()], own});
    budget += own;
  }
  LiveSet live(parse_policy("h2o:" + guards), budget, {});
  live.keep_at(rungs);
  return live;
}

std::string refusal_of(std::string_view text) {
  try {
    parse_ladder(text);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a token's bytes by form, for heads of 128") {
  std::vector<std::uint32_t> bytes;
  for (const KvForm& form : kKvForms) bytes.push_back(4 * form.block_bytes());
  CHECK(bytes == std::vector<std::uint32_t>{512, 264, 288, 160, 128, 96, 160, 96});
}

TEST_CASE("ladders are read as they are written") {
  for (const char* text :
       {"16", "4", "k4v2", "16:16t,4:100%", "16:50%,16:50%", "8:25%,4:50%,k4v2:25%"}) {
    CHECK(parse_ladder(text).text() == text);
    CHECK(parse_ladder(parse_ladder(text).text('+', '@')) == parse_ladder(text));
    const PolicySpec spec = parse_policy("lru:ladder=" + parse_ladder(text).text('+', '@'));
    CHECK(parse_policy(spec.text()).ladder == spec.ladder);
    CHECK(parse_policy(spec.brief()).ladder == spec.ladder);
  }
  CHECK(parse_policy("full:ladder=4").ladder == parse_ladder("4"));
  CHECK_THROWS_WITH(parse_policy("full:recent=4"),
                    Catch::Matchers::ContainsSubstring("never evicts"));
}

TEST_CASE("what is no ladder is refused") {
  CHECK_THAT(refusal_of("5"),
             Catch::Matchers::ContainsSubstring("'5' is no rung; known: 16, fp8, 8, 4"));
  CHECK_THAT(refusal_of(""), Catch::Matchers::ContainsSubstring("is no rung"));
  CHECK_THAT(refusal_of("4:50%,8:50%"),
             Catch::Matchers::ContainsSubstring("8 under 4: rungs go down"));
  CHECK_THAT(refusal_of("16:50%,4:49%"), Catch::Matchers::ContainsSubstring("shares come to 99%"));
  CHECK_THAT(refusal_of("16,4"), Catch::Matchers::ContainsSubstring("shares come to 200%"));
  CHECK_THAT(refusal_of("16:8t"), Catch::Matchers::ContainsSubstring("shares come to 0%"));
  CHECK_THAT(refusal_of("16:16,4:100%"),
             Catch::Matchers::ContainsSubstring("should be tokens such as 16t"));
  CHECK_THAT(refusal_of("16:0t,4:100%"), Catch::Matchers::ContainsSubstring("at least 1"));
  CHECK_THAT(refusal_of("16:-1%,4:101%"), Catch::Matchers::ContainsSubstring("at least 0%"));
}

TEST_CASE("A plan of more tiers than a cache can count is refused, however long its text is") {
  const auto plan = [](std::size_t tiers) {
    std::string text;
    for (std::size_t i = 1; i < tiers; ++i) text += "16:1t,";
    return text + "4:100%";
  };
  CHECK(parse_ladder(plan(kMaxTiers)).rungs.size() == kMaxTiers);
  for (const std::size_t tiers : {kMaxTiers + 1, std::size_t{256}, std::size_t{1'000'000}}) {
    const std::string refusal = refusal_of(plan(tiers));
    CHECK(refusal.find("at most 16 are allowed") != std::string::npos);
    CHECK(refusal.size() < 200);
  }
  CHECK(refusal_of(std::string(1'000'000, ',')).size() < 200);
  LiveSet live(parse_policy("h2o"), 300, {});
  CHECK_THROWS_AS(live.keep_at(std::vector<RungSlots>(256, RungSlots{.slots = 1})),
                  std::logic_error);
}

TEST_CASE("slots are what bytes hold") {
  const auto slots = [](const char* ladder, std::uint64_t bytes) {
    std::vector<std::uint32_t> counts;
    for (const RungSlots& rung : parse_ladder(ladder).slots(bytes, 4)) counts.push_back(rung.slots);
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

TEST_CASE("who steps down, and who leaves, is as the rule says") {
  const std::vector<std::vector<std::uint32_t>> ladders{
      {4, 3}, {1, 5}, {3, 0, 4}, {2, 2, 2, 2}, {5, 1, 9}};
  for (const auto& slots : ladders)
    for (const std::uint32_t most : {1u, 9u})
      for (std::uint32_t seed = 0; seed < 6; ++seed) {
        LiveSet live = live_set(slots, "sinks=2:recent=2");
        NaiveLadder naive(slots, 2, 2);
        std::mt19937 random(seed);
        for (std::uint32_t now = 0; now < 150;) {
          live.make_room(now);
          naive.make_room(now);
          const std::uint32_t count = random() % 3 == 0 ? 1 + random() % most : 1;
          live.admit(now, count);
          naive.admit(now, count);
          now += count;
          std::vector<Observation> seen(live.size());
          for (std::size_t i = 0; i < seen.size(); ++i) {
            seen[i] = {.mass = random() % 4, .queries = 1};
            naive.observe(live.positions()[i], seen[i].mass);
          }
          live.observe(seen);
          std::vector<std::pair<std::uint32_t, std::size_t>> own;
          for (std::uint32_t i = 0; i < live.size(); ++i)
            own.emplace_back(live.positions()[i], live.rung(i));
          REQUIRE(own == naive.live());
        }
      }
}
