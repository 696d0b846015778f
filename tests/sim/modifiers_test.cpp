// The modifiers of the rule against a second writing of it: float64, one token after another, and
// nothing shared with the replay.
#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>

#include "tests/catch.hpp"
#include "tests/sim/differential.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/traces/temporary_folder.hpp"

namespace kvlab {
namespace {

constexpr auto kPrompt = SegmentKind::prompt, kDecode = SegmentKind::decode;

/// What a case asks for, in numbers.
struct Asked {
  std::string policy;
  std::uint32_t budget = 12, sinks = 0, recent = 0, chunk = 0;
  std::uint32_t every = 1, smooth = 0;
  bool once = false, max_pool = false, by_layer = false, max_group = false, prompt = false;

  std::string text() const {
    return policy + ":sinks=" + std::to_string(sinks) + ":recent=" + std::to_string(recent) +
           ":every=" + std::to_string(every) + (once ? ":once" : "") +
           ":smooth=" + std::to_string(smooth) + (max_pool ? ":pool=max" : "") +
           (by_layer ? ":scope=layer" : "") + (max_group ? ":group=max" : "") +
           (prompt ? ":prompt" : "");
  }
};

using Sets = std::vector<std::vector<std::uint32_t>>;  // [query]

/// One layer: its KV heads step by step, so that they may evict together.
class NaiveLayer {
 public:
  NaiveLayer(const brute::Simulator& exact, std::uint32_t layer, const Asked& asked)
      : exact_(exact), s_(exact.sequence()), layer_(layer), asked_(asked), heads_(s_.kv_heads) {
    for (Head& head : heads_) {
      head.mass.resize(s_.tokens);
      head.asked_at.resize(s_.tokens);
    }
    if (asked_.prompt) {
      asked_.budget += s_.segments.front().tokens;
      asked_.sinks = s_.segments.front().tokens;
    }
    for (const Segment& segment : s_.segments) run(segment);
  }

  const Sets& kept(std::uint32_t head) const { return heads_[head].kept; }
  std::size_t live_max() const { return live_max_; }

 private:
  struct Head {
    std::vector<std::uint32_t> live;  // by age
    std::vector<std::uint64_t> mass;  // [token]
    std::vector<std::uint32_t> asked_at;
    Sets kept;
  };

  void run(const Segment& segment) {
    const bool prompt = segment.kind == kPrompt;
    const std::uint32_t step = !prompt ? 1 : asked_.chunk ? asked_.chunk : segment.tokens;
    for (std::uint32_t done = 0; done < segment.tokens; done += step) {
      make_room(segment.start + done);
      admit(segment.start + done, std::min(step, segment.tokens - done));
      after_prompt_ = prompt && done + step >= segment.tokens;
    }
  }

  void make_room(std::uint32_t now) {
    const std::size_t live = heads_.front().live.size();
    if (asked_.once && !after_prompt_) return;
    if (live < asked_.budget - 1 + asked_.every) return;
    std::vector<std::vector<std::uint64_t>> ranks;
    for (const Head& head : heads_) ranks.push_back(own_ranks(head));
    if (asked_.by_layer) ranks.assign(heads_.size(), summed(ranks));
    for (std::size_t h = 0; h < heads_.size(); ++h) {
      if (asked_.smooth > 0 && (asked_.every > 1 || asked_.once || after_prompt_))
        ranks[h] = smoothed(ranks[h]);
      leave(heads_[h], ranks[h], now);
    }
  }

  std::vector<std::uint64_t> own_ranks(const Head& head) const {
    std::vector<std::uint64_t> ranks;
    for (const std::uint32_t token : head.live)
      ranks.push_back(asked_.policy == "h2o"   ? head.mass[token]
                      : asked_.policy == "lru" ? head.asked_at[token]
                                               : token);
    return ranks;
  }

  static std::vector<std::uint64_t> summed(const std::vector<std::vector<std::uint64_t>>& ranks) {
    std::vector<std::uint64_t> sums(ranks.front().size());
    for (const auto& head : ranks)
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += head[i];  // far from 2^64 here
    return sums;
  }

  std::vector<std::uint64_t> smoothed(const std::vector<std::uint64_t>& ranks) const {
    std::vector<std::uint64_t> result;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      std::uint64_t sum = 0, most = 0, count = 0;
      for (std::size_t j = 0; j < ranks.size(); ++j) {
        if ((i > j ? i - j : j - i) > asked_.smooth) continue;
        sum += ranks[j], most = std::max(most, ranks[j]), ++count;
      }
      result.push_back(asked_.max_pool ? most : sum / count);
    }
    return result;
  }

  void leave(Head& head, const std::vector<std::uint64_t>& ranks, std::uint32_t now) {
    std::vector<std::tuple<int, std::uint64_t, std::uint32_t>> order;
    for (std::size_t i = 0; i < head.live.size(); ++i) {
      const std::uint32_t token = head.live[i];
      const int guard = token < asked_.sinks ? 2 : token + asked_.recent > now ? 1 : 0;
      order.emplace_back(guard, ranks[i], token);
    }
    std::sort(order.begin(), order.end());
    head.live.clear();
    for (std::size_t i = order.size() - (asked_.budget - 1); i < order.size(); ++i)
      head.live.push_back(std::get<2>(order[i]));
    std::sort(head.live.begin(), head.live.end());
  }

  void admit(std::uint32_t first, std::uint32_t count) {
    for (std::uint32_t h = 0; h < heads_.size(); ++h) {
      Head& head = heads_[h];
      std::map<std::uint32_t, std::uint64_t> mass;
      std::map<std::uint32_t, std::uint32_t> asked_at;
      for (std::uint32_t query = first; query < first + count; ++query) {
        head.live.push_back(query);
        head.asked_at[query] = query;
        head.kept.push_back(head.live);
        attend(h, query, mass, asked_at);
      }
      for (const auto& [token, more] : mass) head.mass[token] += more;
      for (const auto& [token, at] : asked_at) head.asked_at[token] = at;
      live_max_ = std::max(live_max_, head.live.size());
    }
  }

  void attend(std::uint32_t h, std::uint32_t query, std::map<std::uint32_t, std::uint64_t>& mass,
              std::map<std::uint32_t, std::uint32_t>& asked_at) const {
    std::map<std::uint32_t, std::uint64_t> given;
    for (std::uint32_t g = h * s_.group(); g < (h + 1) * s_.group(); ++g) {
      const brute::Vector& full = exact_.probabilities(layer_, g)[query];
      double sum = 0;
      for (const std::uint32_t token : heads_[h].live) sum += full[token];
      std::map<std::uint32_t, std::uint64_t> own;
      std::uint64_t most = 0;
      for (const std::uint32_t token : heads_[h].live) {
        const auto p = static_cast<double>(static_cast<float>(full[token] / sum));
        own[token] = static_cast<std::uint64_t>(std::nearbyint(p * 0x1p32));
        most = std::max(most, own[token]);
      }
      for (const auto& [token, p] : own) {
        given[token] = asked_.max_group ? std::max(given[token], p) : given[token] + p;
        if (p * 65536 >= 655 * most) asked_at[token] = query;  // tau = 0.01
      }
    }
    for (const auto& [token, p] : given) mass[token] += p;
  }

  const brute::Simulator& exact_;
  const brute::Sequence& s_;
  std::uint32_t layer_;
  Asked asked_;
  std::vector<Head> heads_;
  bool after_prompt_ = false;
  std::size_t live_max_ = 0;
};

std::vector<Asked> cases() {
  std::vector<Asked> all;
  const std::vector<Asked> modifiers{
      {.every = 2},
      {.every = 16},
      {.every = 1000},
      {.smooth = 2},
      {.every = 8, .smooth = 3},
      {.every = 8, .smooth = 500, .max_pool = true},
      {.once = true},
      {.smooth = 3, .once = true, .max_pool = true},
      {.by_layer = true},
      {.every = 5, .smooth = 1, .by_layer = true},
      {.prompt = true},
      {.every = 5, .by_layer = true, .prompt = true},
  };
  for (const Asked& own : modifiers)
    for (const std::string policy : {"h2o", "lru", "window"})
      for (const std::uint32_t chunk : {0u, 7u, 1u}) {
        Asked asked = own;
        asked.policy = policy;
        asked.chunk = chunk;
        all.push_back(asked);
        asked.sinks = 3, asked.recent = 4;
        if (policy != "window") all.push_back(asked);
      }
  for (const std::uint32_t every : {1u, 9u})
    for (const bool by_layer : {false, true})
      for (const std::uint32_t chunk : {0u, 7u})
        all.push_back({.policy = "h2o",
                       .recent = 6,
                       .chunk = chunk,
                       .every = every,
                       .smooth = by_layer ? 2u : 0u,
                       .by_layer = by_layer,
                       .max_group = true});
  return all;
}

CacheConfig config_of(const Asked& asked) {
  return {.policy = parse_policy(asked.text()),
          .budget = {.extent = tokens(asked.budget)},
          .prefill = {asked.chunk}};
}

struct Traced {
  explicit Traced(const RandomTrace& wanted)
      : trace(write_random_trace(folder / "trace", wanted)) {}
  test::TemporaryFolder folder;
  TraceReader trace;
};

RandomTrace two_turns() {
  return {.query_heads = 6,
          .kv_heads = 2,
          .segments = {{0, 30, kPrompt}, {30, 45, kDecode}, {75, 13, kPrompt}, {88, 20, kDecode}},
          .seed = 21};
}

TEST_CASE("kept sets under every modifier are those of a second writing of the rule") {
  const Traced traced(two_turns());
  const brute::Simulator exact(brute::load(traced.trace));
  std::vector<std::uint32_t> every(traced.trace.tokens());
  std::iota(every.begin(), every.end(), 0u);
  for (const Asked& asked : cases())
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
      const NaiveLayer naive(exact, layer, asked);
      for (std::uint32_t head = 0; head < 2; ++head)
        for (const bool plain : {true, false}) {
          const auto kept =
              kept_sets(traced.trace, 0, config_of(asked), {.plain = plain}, layer, head, every);
          INFO(asked.text() << " chunk " << asked.chunk << " layer " << layer << " head " << head
                            << (plain ? ", plain" : ", lanes"));
          REQUIRE(kept.size() == every.size());
          for (const std::uint32_t query : every) {
            INFO("query " << query);
            REQUIRE(kept[query].positions == naive.kept(head)[query]);
          }
        }
    }
}

/// The largest number of live tokens of any cache.
double live_max(const TraceReader& trace, const CacheConfig& config, const ReplayOptions& options) {
  double most = 0;
  for (const Measurement& m : replay(trace, 0, {&config, 1}, options).measurements)
    if (m.metric == "live_max") most = std::max(most, m.value);
  return most;
}

TEST_CASE("live tokens never exceed the rule's capacity, and reach it") {
  const Traced traced(two_turns());
  for (const Asked& asked : cases()) {
    if (asked.once) continue;
    const double capacity = asked.budget - 2.0 + asked.every + (asked.chunk ? asked.chunk : 30) +
                            (asked.prompt ? 30 : 0);
    INFO(asked.text() << " chunk " << asked.chunk);
    const double most = live_max(traced.trace, config_of(asked), {});
    CHECK(most <= capacity);
    if (asked.chunk == 1) CHECK(most == std::min<double>(capacity, traced.trace.tokens()));
  }
}

TEST_CASE("one set for a layer's KV heads, with lanes and plainly the same figures") {
  const Traced traced(two_turns());
  std::vector<std::uint32_t> every(traced.trace.tokens());
  std::iota(every.begin(), every.end(), 0u);
  for (const Asked& asked : cases()) {
    if (!asked.by_layer) continue;
    INFO(asked.text());
    const CacheConfig config = config_of(asked);
    const auto one = kept_sets(traced.trace, 0, config, {}, 1, 0, every);
    const auto two = kept_sets(traced.trace, 0, config, {}, 1, 1, every);
    for (const std::uint32_t query : every) REQUIRE(one[query].positions == two[query].positions);
  }
}

TEST_CASE("modifiers that are written out and modify nothing give what none give") {
  const Traced traced(two_turns());
  for (const std::string policy : {"h2o", "lru", "window", "sink", "random"}) {
    const CacheConfig none{.policy = parse_policy(policy), .budget = {.extent = tokens(12)}};
    CacheConfig written = none;
    written.policy =
        parse_policy(policy + ":every=1:once=no:smooth=0:pool=mean:scope=head:group=sum");
    CHECK(written.policy.text() == none.policy.text());
    const auto one = replay(traced.trace, 0, {&none, 1}, {}).measurements;
    const auto two = replay(traced.trace, 0, {&written, 1}, {}).measurements;
    REQUIRE(one.size() == two.size());
    for (std::size_t i = 0; i < one.size(); ++i)
      CHECK((one[i].metric == two[i].metric &&
             (one[i].value == two[i].value || std::isnan(one[i].value))));
  }
}

}  // namespace
}  // namespace kvlab
