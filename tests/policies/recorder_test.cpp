// Tests the order and the arguments of the calls to a policy's hooks.
#include <fmt/format.h>

#include <algorithm>

#include "policies/aged_set.hpp"
#include "policies/ops/make_ops.hpp"
#include "tests/catch.hpp"

using namespace kvlab;

namespace {

std::vector<std::string>* log_of_this_test = nullptr;

/// Records each call. Evicts the oldest token first.
struct Recorder {
  static constexpr PolicyInfo kInfo{.name = "recorder",
                                    .summary = "writes every call down",
                                    .citation = "these tests",
                                    .needs = Needs::mass};
  struct Params {};
  struct Slot {
    std::uint32_t position;
  };

  static void append(Slot& slot, Token token, const Params&, const Step& step) {
    slot.position = token.position;
    write("append", token.position, step);
  }
  static void observe(Slot& slot, const Observation& seen, const Params&, const Step& step) {
    write(fmt::format("observe {}", seen.mass), slot.position, step);
  }
  static std::uint64_t rank(const Slot& slot, Token token, const Params&, const Step& step) {
    CHECK(slot.position == token.position);
    write("rank", token.position, step);
    return token.position;
  }
  static void write(std::string_view what, std::uint32_t position, const Step& step) {
    CHECK(step.seed == 9);
    CHECK(step.sequence == 1);
    CHECK(step.layer == 2);
    CHECK(step.kv_head == 3);
    log_of_this_test->push_back(fmt::format("{} @{}: now {} live {} queries {} budget {}", what,
                                            position, step.now, step.live, step.queries,
                                            step.budget));
  }
};
static_assert(Policy<Recorder>);

/// A cache of four tokens with the recorder, and its record.
class Recorded {
 public:
  Recorded() : live_(spec(), 4, {.seed = 9, .sequence = 1, .layer = 2, .kv_head = 3}) {
    log_of_this_test = &log_;
  }
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;
  ~Recorded() { log_of_this_test = nullptr; }

  /// One append: evict to the budget, append, attend, observe. Each token receives 100 plus its
  /// index by age.
  void append(std::uint32_t count) {
    live_.evict_to_budget(next_);
    live_.append(next_, count);
    next_ += count;
    std::vector<Observation> seen(live_.size());
    for (std::size_t i = 0; i < seen.size(); ++i) seen[i].mass = 100 + i;
    live_.observe(seen);
  }
  /// The calls recorded since written() was called last.
  std::vector<std::string> written() { return std::exchange(log_, {}); }

 private:
  static PolicySpec spec() {
    return {.entry = std::make_shared<PolicyEntry>(PolicyEntry{make_ops<Recorder>()}),
            .name = "recorder",
            .params = {},
            .sinks = {},
            .recent = {}};
  }

  std::vector<std::string> log_;
  LiveSet live_;
  std::uint32_t next_ = 0;
};

using Lines = std::vector<std::string>;

}  // namespace

TEST_CASE(
    "a dense prompt is appended and observed once, then compacted before the first decoded "
    "token") {
  Recorded cache;
  cache.append(6);
  CHECK(cache.written() == Lines{"append @0: now 0 live 6 queries 6 budget 4",
                                 "append @1: now 0 live 6 queries 6 budget 4",
                                 "append @2: now 0 live 6 queries 6 budget 4",
                                 "append @3: now 0 live 6 queries 6 budget 4",
                                 "append @4: now 0 live 6 queries 6 budget 4",
                                 "append @5: now 0 live 6 queries 6 budget 4",
                                 "observe 100 @0: now 0 live 6 queries 6 budget 4",
                                 "observe 101 @1: now 0 live 6 queries 6 budget 4",
                                 "observe 102 @2: now 0 live 6 queries 6 budget 4",
                                 "observe 103 @3: now 0 live 6 queries 6 budget 4",
                                 "observe 104 @4: now 0 live 6 queries 6 budget 4",
                                 "observe 105 @5: now 0 live 6 queries 6 budget 4"});
  cache.append(1);
  CHECK(
      cache.written() ==
      Lines{"rank @0: now 6 live 6 queries 0 budget 4", "rank @1: now 6 live 6 queries 0 budget 4",
            "rank @2: now 6 live 6 queries 0 budget 4", "rank @3: now 6 live 6 queries 0 budget 4",
            "rank @4: now 6 live 6 queries 0 budget 4", "rank @5: now 6 live 6 queries 0 budget 4",
            "append @6: now 6 live 4 queries 1 budget 4",
            "observe 100 @3: now 6 live 4 queries 1 budget 4",
            "observe 101 @4: now 6 live 4 queries 1 budget 4",
            "observe 102 @5: now 6 live 4 queries 1 budget 4",
            "observe 103 @6: now 6 live 4 queries 1 budget 4"});
}

TEST_CASE("a prompt in chunks evicts to the budget before each chunk") {
  Recorded cache;
  cache.append(2);
  cache.append(2);
  CHECK(cache.written() == Lines{"append @0: now 0 live 2 queries 2 budget 4",
                                 "append @1: now 0 live 2 queries 2 budget 4",
                                 "observe 100 @0: now 0 live 2 queries 2 budget 4",
                                 "observe 101 @1: now 0 live 2 queries 2 budget 4",
                                 "append @2: now 2 live 4 queries 2 budget 4",
                                 "append @3: now 2 live 4 queries 2 budget 4",
                                 "observe 100 @0: now 2 live 4 queries 2 budget 4",
                                 "observe 101 @1: now 2 live 4 queries 2 budget 4",
                                 "observe 102 @2: now 2 live 4 queries 2 budget 4",
                                 "observe 103 @3: now 2 live 4 queries 2 budget 4"});
  cache.append(2);  // one token must be evicted: budget - 1 + 2 = 5 tokens are live afterwards
  CHECK(cache.written() == Lines{"rank @0: now 4 live 4 queries 0 budget 4",
                                 "rank @1: now 4 live 4 queries 0 budget 4",
                                 "rank @2: now 4 live 4 queries 0 budget 4",
                                 "rank @3: now 4 live 4 queries 0 budget 4",
                                 "append @4: now 4 live 5 queries 2 budget 4",
                                 "append @5: now 4 live 5 queries 2 budget 4",
                                 "observe 100 @1: now 4 live 5 queries 2 budget 4",
                                 "observe 101 @2: now 4 live 5 queries 2 budget 4",
                                 "observe 102 @3: now 4 live 5 queries 2 budget 4",
                                 "observe 103 @4: now 4 live 5 queries 2 budget 4",
                                 "observe 104 @5: now 4 live 5 queries 2 budget 4"});
}

TEST_CASE("a streamed prompt equals decoding: one token at a time, ranked when full") {
  Recorded cache;
  cache.append(1);
  CHECK(cache.written() == Lines{"append @0: now 0 live 1 queries 1 budget 4",
                                 "observe 100 @0: now 0 live 1 queries 1 budget 4"});
  cache.append(1);
  cache.append(1);
  cache.append(1);
  // No token was ranked, because four tokens fit.
  const Lines filled = cache.written();
  CHECK(filled.size() == 3 + 2 + 3 + 4);
  CHECK(std::ranges::none_of(filled, [](const auto& line) { return line.starts_with("rank"); }));
  cache.append(1);
  CHECK(cache.written() == Lines{"rank @0: now 4 live 4 queries 0 budget 4",
                                 "rank @1: now 4 live 4 queries 0 budget 4",
                                 "rank @2: now 4 live 4 queries 0 budget 4",
                                 "rank @3: now 4 live 4 queries 0 budget 4",
                                 "append @4: now 4 live 4 queries 1 budget 4",
                                 "observe 100 @1: now 4 live 4 queries 1 budget 4",
                                 "observe 101 @2: now 4 live 4 queries 1 budget 4",
                                 "observe 102 @3: now 4 live 4 queries 1 budget 4",
                                 "observe 103 @4: now 4 live 4 queries 1 budget 4"});
}

TEST_CASE("a second turn is an append like any other") {
  Recorded cache;
  cache.append(4);
  cache.append(1);
  cache.written();
  cache.append(3);
  CHECK(cache.written() == Lines{"rank @1: now 5 live 4 queries 0 budget 4",
                                 "rank @2: now 5 live 4 queries 0 budget 4",
                                 "rank @3: now 5 live 4 queries 0 budget 4",
                                 "rank @4: now 5 live 4 queries 0 budget 4",
                                 "append @5: now 5 live 6 queries 3 budget 4",
                                 "append @6: now 5 live 6 queries 3 budget 4",
                                 "append @7: now 5 live 6 queries 3 budget 4",
                                 "observe 100 @2: now 5 live 6 queries 3 budget 4",
                                 "observe 101 @3: now 5 live 6 queries 3 budget 4",
                                 "observe 102 @4: now 5 live 6 queries 3 budget 4",
                                 "observe 103 @5: now 5 live 6 queries 3 budget 4",
                                 "observe 104 @6: now 5 live 6 queries 3 budget 4",
                                 "observe 105 @7: now 5 live 6 queries 3 budget 4"});
  cache.append(1);  // three tokens are evicted at once
  const Lines after = cache.written();
  CHECK(after.size() == 6 + 1 + 4);
  CHECK(after[6] == "append @8: now 8 live 4 queries 1 budget 4");
}
