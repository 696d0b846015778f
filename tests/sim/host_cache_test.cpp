// Compares a head's cache with attention in float64. That attention computes cache positions in its
// own way.
#include "sim/cache/host_cache.hpp"

#include <cmath>
#include <numeric>
#include <random>

#include "policies/observation.hpp"
#include "tests/catch.hpp"

using namespace kvlab;

namespace {

constexpr std::uint32_t kDim = 16, kGroup = 2;

struct Tensors {
  std::vector<float> q, k, v;  // [token, group, dim], [token, dim], [token, dim]
};

Tensors random_tensors(std::uint32_t tokens) {
  std::mt19937 generator(7);
  std::normal_distribution<float> normal(0, 1.5f);
  Tensors all;
  all.q.resize(tokens * kGroup * kDim);
  all.k.resize(tokens * kDim);
  all.v.resize(tokens * kDim);
  for (auto* tensor : {&all.q, &all.k, &all.v})
    for (float& value : *tensor) value = normal(generator);
  return all;
}

Rope test_rope() {
  Rope rope;
  for (std::uint32_t i = 0; i < kDim / 2; ++i)
    rope.inv_freq.push_back(std::pow(100.0f, -2.0f * static_cast<float>(i) / kDim));
  return rope;
}

std::vector<double> rotated(const float* x, std::uint32_t position) {
  const Rope rope = test_rope();
  std::vector<double> y(kDim);
  for (std::size_t i = 0; i < kDim / 2; ++i) {
    const double angle = double{rope.inv_freq[i]} * position;
    const double a = double{x[i]}, b = double{x[i + kDim / 2]};
    y[i] = a * std::cos(angle) - b * std::sin(angle);
    y[i + kDim / 2] = b * std::cos(angle) + a * std::sin(angle);
  }
  return y;
}

/// One query head's attention over the first `visible` of the live tokens.
struct Row {
  std::vector<double> p, out;
  double lse;
};

Row brute_row(const Tensors& all, std::uint32_t query, std::uint32_t head,
              std::span<const std::uint32_t> live, Positions positions, double softmax_scale) {
  const auto position_in_cache = [&](std::size_t age) {
    return positions == Positions::cache ? static_cast<std::uint32_t>(age) : live[age];
  };
  const auto q =
      rotated(&all.q[(query * kGroup + head) * kDim], position_in_cache(live.size() - 1));
  Row row{.p = {}, .out = std::vector<double>(kDim), .lse = 0};
  double sum = 0;
  for (std::size_t age = 0; age < live.size(); ++age) {
    const auto k = rotated(&all.k[live[age] * kDim], position_in_cache(age));
    row.p.push_back(
        std::exp(softmax_scale * std::inner_product(q.begin(), q.end(), k.begin(), 0.0)));
    sum += row.p.back();
  }
  row.lse = std::log(sum);
  for (std::size_t age = 0; age < live.size(); ++age) {
    row.p[age] /= sum;
    for (std::size_t d = 0; d < kDim; ++d)
      row.out[d] += row.p[age] * double{all.v[live[age] * kDim + d]};
  }
  return row;
}

/// The expected observations of the live tokens after an append.
std::vector<Observation> brute_observations(const std::vector<std::vector<Row>>& rows, Needs needs,
                                            std::uint32_t first, std::size_t live) {
  std::vector<Observation> seen(needs == Needs::nothing ? 0 : live);
  for (std::uint32_t i = 0; i < rows.size() && !seen.empty(); ++i) {
    std::vector<bool> requested(rows[i][0].p.size());
    for (const Row& row : rows[i]) {
      const double largest = *std::max_element(row.p.begin(), row.p.end());
      for (std::size_t age = 0; age < row.p.size(); ++age) {
        if (needs_mass(needs)) seen[age].mass += fixed_mass(1, static_cast<float>(row.p[age]));
        if (row.p[age] >= 655.0 / 65536 * largest) requested[age] = true;
      }
    }
    for (std::size_t age = 0; age < requested.size(); ++age) {
      ++seen[age].queries;
      if (!needs_requests(needs) || !requested[age]) continue;
      ++seen[age].requests;
      seen[age].last_request = first + i;
    }
  }
  return seen;
}

struct Outputs {
  std::vector<float> out, lse;
};

/// Appends tokens to a head's cache and records the outputs. Queries attend in blocks of `block`,
/// the last block first if `backwards`.
class Runner {
 public:
  Runner(const Tensors& all, const std::string& policy, std::uint32_t budget, Positions positions)
      : all_(all),
        spec_(parse_policy(policy)),
        positions_(positions),
        cache_({.head_size = kDim,
                .group = kGroup,
                .positions = positions,
                .softmax_scale = 0.25f,
                .threshold16 = request_threshold16(0.01)},
               LiveSet(spec_, budget, {})),
        rope_(test_rope(), static_cast<std::uint32_t>(all.k.size() / kDim)),
        outputs_{std::vector<float>(all.q.size()), std::vector<float>(all.q.size() / kDim)} {}

  void append(std::uint32_t count, std::uint32_t block = 32, bool backwards = false) {
    const HeadAppend append = begin(count);
    std::vector<std::uint32_t> begins;
    for (std::uint32_t begin = 0; begin < count; begin += block) begins.push_back(begin);
    if (backwards) std::reverse(begins.begin(), begins.end());
    for (const std::uint32_t begin : begins)
      cache_.attend(append, begin, std::min(count, begin + block), rope_);
    finish(count);
  }

  /// Appends to this cache and to `follower`. Only this cache computes attention.
  void append_with(Runner& follower, std::uint32_t count, std::uint32_t block) {
    const HeadAppend append = begin(count);
    follower.begin(count);
    HostCache* const followers[] = {&follower.cache_};
    for (std::uint32_t begin = 0; begin < count; begin += block)
      cache_.attend(append, begin, std::min(count, begin + block), rope_, {.followers = followers});
    finish(count);
    follower.finish(count);
  }

  void end_prompt() { cache_.end_prompt(); }

  /// Drafts the next tokens in two calls. Compares the output of each draft token with attention
  /// over the live tokens and the draft tokens up to this one.
  void check_draft(std::uint32_t count) {
    const std::vector<DraftPath> paths = [&] {
      std::vector<DraftPath> chain(count);
      for (std::uint32_t token = 0; token < count; ++token)
        for (std::uint32_t node = 0; node <= token; ++node) chain[token].push_back(node);
      return chain;
    }();
    std::vector<float> out(count * kGroup * kDim);
    cache_.drop_drafts();
    for (const auto& [begin, end] : {std::pair(0u, 1u), std::pair(1u, count)}) {
      HeadAppend drafts = tokens_at(next_ + begin, end - begin);
      drafts.first = next_;
      drafts.out = &out[begin * kGroup * kDim], drafts.lse = nullptr;
      cache_.attend_draft(drafts, std::span(paths).subspan(begin, end - begin), rope_);
    }
    std::vector<std::uint32_t> seen(cache_.live().positions().begin(),
                                    cache_.live().positions().end());
    double worst = 0;
    for (std::uint32_t token = 0; token < count; ++token) {
      seen.push_back(next_ + token);
      for (std::uint32_t head = 0; head < kGroup; ++head) {
        const Row row = brute_row(all_, next_ + token, head, seen, positions_, 0.25);
        for (std::size_t d = 0; d < kDim; ++d)
          worst = std::max(worst,
                           std::abs(row.out[d] - double{out[(token * kGroup + head) * kDim + d]}));
      }
    }
    CHECK(worst < 1e-5);
  }

  void draft_out_of_order() {
    const std::vector<DraftPath> paths{{0}, {0, 2}};
    cache_.attend_draft(tokens_at(next_, 2), paths, rope_);
  }
  void evict_early() { cache_.evict_to_budget(next_); }

  void check_last(std::uint32_t count) const {
    const auto live = cache_.live().positions();
    std::vector<std::vector<Row>> rows(count);
    double worst = 0;
    for (std::uint32_t i = 0; i < count; ++i)
      for (std::uint32_t head = 0; head < kGroup; ++head) {
        const std::uint32_t query = next_ - count + i;
        const auto visible = live.first(live.size() - count + i + 1);
        rows[i].push_back(brute_row(all_, query, head, visible, positions_, 0.25));
        const std::size_t row = query * kGroup + head;
        worst = std::max(worst, std::abs(rows[i].back().lse - double{outputs_.lse[row]}));
        for (std::size_t d = 0; d < kDim; ++d)
          worst = std::max(worst,
                           std::abs(rows[i].back().out[d] - double{outputs_.out[row * kDim + d]}));
      }
    CHECK(worst < 1e-5);
    check_seen(brute_observations(rows, spec_.entry->info.needs, next_ - count, live.size()));
  }

  const HostCache& cache() const { return cache_; }
  const Outputs& outputs() const { return outputs_; }
  const std::vector<Observation>& seen() const { return seen_; }

 private:
  HeadAppend tokens_at(std::uint32_t first, std::uint32_t count) {
    return {.first = first,
            .tokens = count,
            .q = &all_.q[first * kGroup * kDim],
            .query_head_stride = kDim,
            .query_stride = kGroup * kDim,
            .k = &all_.k[first * kDim],
            .v = &all_.v[first * kDim],
            .key_stride = kDim,
            .out = &outputs_.out[first * kGroup * kDim],
            .lse = &outputs_.lse[first * kGroup],
            .lse_stride = kGroup};
  }
  HeadAppend begin(std::uint32_t count) {
    const HeadAppend append = tokens_at(next_, count);
    cache_.begin_step(append, rope_);
    return append;
  }
  void finish(std::uint32_t count) {
    cache_.end_step();
    const auto seen = cache_.observations();
    seen_.assign(seen.begin(), seen.end());
    next_ += count;
  }

  void check_seen(const std::vector<Observation>& expected) const {
    REQUIRE(seen_.size() == expected.size());
    for (std::size_t age = 0; age < expected.size(); ++age) {
      CHECK(std::abs(std::ldexp(double(seen_[age].mass) - double(expected[age].mass), -32)) < 1e-5);
      CHECK(seen_[age].queries == expected[age].queries);
      CHECK(seen_[age].requests == expected[age].requests);
      CHECK(seen_[age].last_request == expected[age].last_request);
    }
  }

  const Tensors& all_;
  PolicySpec spec_;
  Positions positions_;
  HostCache cache_;
  RopeTable rope_;
  std::uint32_t next_ = 0;
  Outputs outputs_;
  std::vector<Observation> seen_;
};

}  // namespace

TEST_CASE("A head's cache equals float64 attention over its live tokens, positions renumbered") {
  const Tensors all = random_tensors(160);
  const std::string policy = GENERATE("full", "window", "sink", "lru", "h2o", "random");
  const Positions positions = GENERATE(Positions::original, Positions::cache);
  CAPTURE(policy, name_of(positions));
  Runner runner(all, policy, 24, positions);
  for (const std::uint32_t count : {40u, 1u, 1u, 1u, 7u, 1u, 50u, 1u, 1u}) {
    runner.append(count);
    runner.check_last(count);
  }
  for (int i = 0; i < 40; ++i) runner.append(1);
  runner.check_last(1);
  const bool full = policy == "full";
  CHECK(runner.cache().live().size() == (full ? 143 : 24));
  CHECK((runner.cache().live().evictions() > 0) == !full);
}

TEST_CASE("Blocks of queries give the same bits for any size and order") {
  const Tensors all = random_tensors(130);
  const std::string policy = GENERATE("h2o", "lru");
  Runner whole(all, policy, 30, Positions::cache), split(all, policy, 30, Positions::cache);
  for (const std::uint32_t count : {90u, 1u, 39u}) {
    whole.append(count, count);
    split.append(count, 7, true);
    CHECK(whole.seen() == split.seen());
  }
  CHECK(whole.outputs().out == split.outputs().out);
  CHECK(whole.outputs().lse == split.outputs().lse);
}

TEST_CASE("A cache that follows another one's prompt continues as if it had attended itself") {
  const Tensors all = random_tensors(60);
  const std::string policy = GENERATE("h2o", "lru", "h2o:group=max", "snapkv");
  const Positions positions = GENERATE(Positions::original, Positions::cache);
  const std::uint32_t block = GENERATE(7u, 50u);
  CAPTURE(policy, name_of(positions), block);
  Runner base(all, "window", 24, Positions::original), follower(all, policy, 40, positions),
      alone(all, policy, 40, positions);
  base.append_with(follower, 50, block);
  alone.append(50);
  CHECK(follower.seen() == alone.seen());
  for (int i = 0; i < 8; ++i) follower.append(1), alone.append(1);
  CHECK(follower.seen() == alone.seen());
  CHECK(std::ranges::equal(follower.cache().live().positions(), alone.cache().live().positions()));
  const auto decoded = [](const Outputs& outputs) {
    return std::vector(outputs.out.begin() + 50 * kGroup * kDim, outputs.out.end());
  };
  CHECK(decoded(follower.outputs()) == decoded(alone.outputs()));
}

TEST_CASE("Draft tokens attend to the live tokens and the drafts before them, and leave no trace") {
  const Tensors all = random_tensors(170);
  const std::string policy = GENERATE("full", "window", "sink", "lru", "h2o", "random:every=4");
  const Positions positions = GENERATE(Positions::original, Positions::cache);
  CAPTURE(policy, name_of(positions));
  Runner drafting(all, policy, 24, positions), plain(all, policy, 24, positions);
  for (const std::uint32_t count : {20u, 1u, 40u, 1u, 1u, 1u, 7u, 1u, 50u, 1u, 1u, 1u}) {
    drafting.check_draft(3);
    if (count > 1) drafting.check_draft(18);  // replaces the three, and fills more than one panel
    drafting.append(count);
    plain.append(count);
    if (count > 30) drafting.end_prompt(), plain.end_prompt();
    CHECK(drafting.seen() == plain.seen());
    CHECK(
        std::ranges::equal(drafting.cache().live().positions(), plain.cache().live().positions()));
    CHECK(drafting.cache().row_count() == plain.cache().row_count());
    CHECK(drafting.cache().live_bytes() == plain.cache().live_bytes());
  }
  CHECK(drafting.outputs().out == plain.outputs().out);
  CHECK(drafting.outputs().lse == plain.outputs().lse);
}

TEST_CASE("Draft tokens attend in the order of their numbers") {
  const Tensors all = random_tensors(30);
  Runner runner(all, "h2o", 24, Positions::original);
  runner.append(10);
  CHECK_THROWS_AS(runner.draft_out_of_order(), std::logic_error);
}

TEST_CASE("A cache that evicts before the next step has the same victims and bits") {
  const Tensors all = random_tensors(120);
  const std::string policy = GENERATE("h2o", "lru:every=4", "random");
  CAPTURE(policy);
  Runner early(all, policy, 24, Positions::original), plain(all, policy, 24, Positions::original);
  std::size_t victims = 0;
  for (const std::uint32_t count : {40u, 1u, 1u, 9u, 1u, 1u, 1u, 1u, 1u, 20u, 1u}) {
    early.evict_early();
    early.evict_early();
    early.append(count);
    plain.append(count);
    CHECK(std::ranges::equal(early.cache().victims(), plain.cache().victims()));
    victims += plain.cache().victims().size();
  }
  CHECK(victims == plain.cache().live().evictions());
  CHECK(early.outputs().out == plain.outputs().out);
  CHECK(early.seen() == plain.seen());
}

TEST_CASE("After a long prompt a head's cache releases its memory") {
  const Tensors all = random_tensors(700);
  const Positions positions = GENERATE(Positions::original, Positions::cache);
  Runner runner(all, "random", 40, positions);
  runner.append(600);
  CHECK(runner.cache().row_count() == 600);
  for (int i = 0; i < 100; ++i) runner.append(1);
  runner.check_last(1);
  CHECK(runner.cache().row_count() <= 80);
}

TEST_CASE("After a prompt a head's cache holds only the budget's rows") {
  constexpr std::uint32_t kBudget = 48;  // three panels of 16 rows
  const Tensors all = random_tensors(700);
  const Positions positions = GENERATE(Positions::original, Positions::cache);
  const std::uint32_t prompt = GENERATE(5u, 48u, 600u);
  const std::string policy = GENERATE("h2o", "random:every=16");
  Runner runner(all, policy, kBudget, positions);
  runner.append(prompt);
  runner.end_prompt();
  const std::uint32_t rows = policy == "h2o" ? kBudget : kBudget + 15;
  const std::size_t panels = (rows + 15) / 16 * 16,
                    others = rows * (positions == Positions::cache ? 2 : 1);
  for (int i = 0; i < 100; ++i) {
    runner.append(1);
    CHECK(runner.cache().row_count() <= rows);
    CHECK(runner.cache().bytes() <= (panels + others) * kDim * sizeof(float));
  }
  runner.check_last(1);
  CHECK(runner.cache().row_count() == rows);
}

TEST_CASE("A head's cache refuses protected tokens that do not fit its budget") {
  const HeadShape shape{.head_size = kDim, .group = kGroup};
  CHECK_THROWS_AS(HostCache(shape, LiveSet(parse_policy("sink"), 4, {})), std::invalid_argument);
}
