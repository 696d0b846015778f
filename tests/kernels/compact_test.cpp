// Compares the compaction after an append with the eviction rule on the host, for every policy of
// the registry and the two policies of extended_registry.cmake.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>

#include "kernels/evict/append.hpp"
#include "policies/aged_set.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/policies/sample.hpp"
#include "tests/policies/unmodified.hpp"
#include "tests/skip.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

constexpr int kHeads = 2, kHeadSize = 64;
constexpr std::size_t kRowBytes = kHeadSize * bytes_of(KVLAB_BF16);
constexpr std::uint32_t kLayer = 5;
constexpr std::byte kPoison{0xA7};

struct Pair {
  std::uint32_t budget = kNoBudget, sinks = 0, recent = 0;
};

/// Returns the observation of the token at `position` from the `count` queries starting at `first`.
/// The default is sample_observation.
using ObservationOf = Observation (*)(std::uint32_t position, std::uint32_t first,
                                      std::uint32_t count);

constexpr Observation sample_equal(std::uint32_t position, std::uint32_t first,
                                   std::uint32_t count) {
  return {.mass = 77, .queries = std::min(count, first + count - position)};
}

/// The bytes of a token's key (part 0) or value (part 1).
std::vector<std::byte> row_of(int pair, std::uint32_t position, int part) {
  std::vector<std::byte> row(kRowBytes);
  for (std::size_t i = 0; i < kRowBytes; i += 8) {
    const std::uint64_t bits =
        split_mix((std::uint64_t{position} << 24) + (std::uint64_t(pair) << 16) + part * 4096 + i);
    std::memcpy(&row[i], &bits, 8);
  }
  return row;
}

/// One layer's cache on the device, with a copy on the host to inspect and to change.
class Cache {
 public:
  struct Host {
    std::vector<std::byte> keys, values, states;
    std::vector<float> features;
    std::vector<std::uint32_t> positions;
    std::vector<std::int32_t> lengths, next_slots;
    bool operator==(const Host&) const = default;
  };

  Cache(std::span<const std::uint32_t> capacities, const DevicePolicy& policy)
      : slot_bytes_(policy.slot_bytes), feature_count_(policy.features.size()) {
    for (const std::uint32_t capacity : capacities) {
      first_slots_.push_back(slots_);
      slots_ += capacity + 2;  // two more slots, which must not change
      max_slots_ = std::max(max_slots_, static_cast<int>(capacity));
    }
    const std::size_t all = static_cast<std::size_t>(slots_);
    host.keys.assign(all * kRowBytes, kPoison);
    host.values = host.keys;
    host.states.assign(all * slot_bytes_, kPoison);
    host.features.assign(all * feature_count_, -1.0f);
    host.positions.assign(all, 0xA7A7'A7A7);
    host.lengths.assign(capacities.size(), 0);
    host.next_slots = host.lengths;
    keys_ = std::make_unique<DeviceArray<std::byte>>(host.keys.size());
    values_ = std::make_unique<DeviceArray<std::byte>>(host.values.size());
    states_ = std::make_unique<DeviceArray<std::byte>>(host.states.size());
    features_ = std::make_unique<DeviceArray<float>>(host.features.size());
    positions_ = std::make_unique<DeviceArray<std::uint32_t>>(all);
    lengths_ = std::make_unique<DeviceArray<std::int32_t>>(capacities.size());
    next_slots_ = std::make_unique<DeviceArray<std::int32_t>>(capacities.size());
    starts_ =
        std::make_unique<DeviceArray<std::int64_t>>(std::span<const std::int64_t>(first_slots_));
  }

  void upload() const {
    put(*keys_, host.keys);
    put(*values_, host.values);
    put(*states_, host.states);
    put(*features_, host.features);
    put(*positions_, host.positions);
    put(*lengths_, host.lengths);
    put(*next_slots_, host.next_slots);
  }
  void download() {
    host = {keys_->to_host(),      values_->to_host(),  states_->to_host(),    features_->to_host(),
            positions_->to_host(), lengths_->to_host(), next_slots_->to_host()};
  }
  kvlab_cache_view device() const {
    return {.type = KVLAB_BF16,
            .sequences = static_cast<int>(first_slots_.size()) / kHeads,
            .query_heads = kHeads,
            .kv_heads = kHeads,
            .head_size = kHeadSize,
            .softmax_scale = 1,
            .max_slots = max_slots_,
            .first_slot = starts_->data(),
            .keys = keys_->data(),
            .values = values_->data(),
            .positions = positions_->data(),
            .lengths = lengths_->data(),
            .next_slots = next_slots_->data()};
  }
  std::byte* states() const { return states_->data(); }
  float* features() const { return features_->data(); }
  std::size_t slots() const { return static_cast<std::size_t>(slots_); }
  std::size_t begin(int pair) const { return static_cast<std::size_t>(first_slots_[pair]); }
  std::size_t end(int pair) const { return begin(pair) + host.lengths[pair]; }
  std::span<const std::byte> state(std::size_t slot) const {
    return std::span(host.states).subspan(slot * slot_bytes_, slot_bytes_);
  }

  /// Writes a token's key, value and features to the slot where the engine would write them.
  void write_rows(int pair, std::size_t slot, std::uint32_t position) {
    std::ranges::copy(row_of(pair, position, 0), host.keys.begin() + slot * kRowBytes);
    std::ranges::copy(row_of(pair, position, 1), host.values.begin() + slot * kRowBytes);
    std::ranges::copy(sample_features(position, 1, feature_count_),
                      host.features.begin() + slot * feature_count_);
  }
  bool has_rows(int pair, std::size_t slot, std::uint32_t position) const {
    return std::ranges::equal(row_of(pair, position, 0),
                              std::span(host.keys).subspan(slot * kRowBytes, kRowBytes)) &&
           std::ranges::equal(row_of(pair, position, 1),
                              std::span(host.values).subspan(slot * kRowBytes, kRowBytes)) &&
           std::ranges::equal(
               sample_features(position, 1, feature_count_),
               std::span(host.features).subspan(slot * feature_count_, feature_count_));
  }
  /// Swaps two slots, because decoding may reorder slots.
  void swap_slots(std::size_t a, std::size_t b) {
    const auto swap = [&](auto& all, std::size_t size) {
      std::swap_ranges(all.begin() + a * size, all.begin() + (a + 1) * size,
                       all.begin() + b * size);
    };
    if (a == b) return;
    swap(host.keys, kRowBytes);
    swap(host.values, kRowBytes);
    swap(host.states, slot_bytes_);
    swap(host.features, feature_count_);
    swap(host.positions, 1);
  }

  Host host;

 private:
  template <class T>
  static void put(const DeviceArray<T>& to, const std::vector<T>& from) {
    if (from.empty()) return;
    to.assign(from);
  }

  std::size_t slot_bytes_, feature_count_;
  std::vector<std::int64_t> first_slots_;
  std::int64_t slots_ = 1;
  int max_slots_ = 1;
  std::unique_ptr<DeviceArray<std::byte>> keys_, values_, states_;
  std::unique_ptr<DeviceArray<float>> features_;
  std::unique_ptr<DeviceArray<std::uint32_t>> positions_;
  std::unique_ptr<DeviceArray<std::int32_t>> lengths_, next_slots_;
  std::unique_ptr<DeviceArray<std::int64_t>> starts_;
};

/// Runs several sequences under one policy on the host and on the device.
class Run {
 public:
  /// If `in_place`, appended tokens are written after the kept tokens in the same cache. Otherwise
  /// they are written to a separate cache with `max_kept` slots per pair, and the compaction moves
  /// the kept tokens from there. At most `max_kept` tokens are appended at a time.
  Run(const DevicePolicy& policy, std::vector<Pair> pairs, std::uint32_t max_kept, bool in_place,
      ObservationOf observation_of = sample_observation, std::string modifiers = "")
      : policy_(policy),
        pairs_(std::move(pairs)),
        in_place_(in_place),
        observation_of_(observation_of),
        modifiers_text_(std::move(modifiers)) {
    std::vector<std::uint32_t> capacities;
    std::vector<double> params;
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      const PolicySpec spec = spec_of(static_cast<int>(i));
      if (!spec.entry->info.evicts) pairs_[i] = {};
      const std::uint32_t budget = pairs_[i].budget;
      live_.push_back(std::make_unique<LiveSet>(
          spec, budget,
          LiveSet::Identity{.seed = seed(sequence(i)),
                            .sequence = id(sequence(i)),
                            .layer = kLayer,
                            .kv_head = static_cast<std::uint32_t>(i % kHeads)}));
      modifiers_ = spec.modifiers;
      const std::uint32_t kept =
          budget == kNoBudget ? kMaxTokens : budget - 1 + modifiers_.every - 1;
      capacities.push_back(in_place ? kept + max_kept : std::max(kept, 1u));
      if (i % kHeads == 0) params.insert(params.end(), spec.params.begin(), spec.params.end());
      needs_ = spec.entry->info.needs;
    }
    for (std::size_t i = 0; i < live_.size(); i += kHeads) {
      std::vector<AgedSet*> heads;
      for (int h = 0; h < kHeads; ++h) heads.push_back(live_[i + h].get());
      share_ranks(heads);
    }
    resident_ = std::make_unique<Cache>(capacities, policy);
    resident_->upload();
    const std::vector<std::uint32_t> capacity(pairs_.size(), max_kept);
    if (!in_place) scratch_ = std::make_unique<Cache>(capacity, policy);
    if (!in_place) scratch_->upload();
    next_.assign(pairs_.size() / kHeads, 0);
    fill_rules(params);
    workspace_ = std::make_unique<DeviceArray<std::byte>>(compact_workspace(working().device()));
    seen_ = std::make_unique<DeviceArray<Observation>>(working().slots());
  }

  /// Appends counts[sequence] tokens (0: the sequence is idle) and checks the result.
  void append(const std::vector<std::uint32_t>& counts, CapturedGraph* graph = nullptr) {
    prepare(counts);
    if (graph != nullptr)
      graph->launch();
    else
      check_cuda(compact(policy_, args(), nullptr));
    check_cuda(cudaDeviceSynchronize());
    resident_->download();
    if (!in_place_) scratch_->download();
    step_host(counts);
    check();
  }

  kvlab_compact_args args() const {
    kvlab_compact_args compact = args_between(working(), *resident_);
    if (needs_ != Needs::nothing)
      compact.seen = reinterpret_cast<kvlab_observation*>(seen_->data());
    if (modifiers_ == Modifiers{}) return compact;
    compact.policy.evict_at = evict_at_->data();
    compact.by_layer = modifiers_.scope == Modifiers::Scope::layer;
    compact.smooth = modifiers_.smooth;
    compact.pool_max = modifiers_.pool == Modifiers::Pool::max;
    return compact;
  }

  /// Shuffles the slots of each pair.
  void shuffle(std::mt19937& random) {
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      const std::size_t begin = resident_->begin(static_cast<int>(i));
      const std::size_t count = resident_->host.lengths[i];
      for (std::size_t s = 0; s < count; ++s)
        resident_->swap_slots(begin + s, begin + s + random() % (count - s));
    }
    resident_->upload();
  }

  /// Appends from the current state, returns the result, and restores the state.
  Cache::Host once_more(const std::vector<std::uint32_t>& counts) {
    const Cache::Host start = resident_->host;
    prepare(counts);
    check_cuda(compact(policy_, args(), nullptr));
    resident_->download();
    Cache::Host left = resident_->host;
    resident_->host = start;
    resident_->upload();
    return left;
  }

 private:
  static constexpr std::uint32_t kMaxTokens = 6000;

  static int sequence(std::size_t pair) { return static_cast<int>(pair) / kHeads; }
  static std::uint64_t seed(int sequence) { return 1000 + 17 * sequence; }
  static std::uint32_t id(int sequence) { return 9 - sequence; }

  PolicySpec spec_of(int pair) const {
    std::string text(policy_.name);
    PolicySpec spec = parse_policy(text);
    if (!spec.entry->info.evicts) return spec;
    if (text == "leaky") text += sequence(pair) == 1 ? ":keep=0.5" : ":slope=0.5";
    text += ":sinks=" + std::to_string(pairs_[pair].sinks) +
            ":recent=" + std::to_string(pairs_[pair].recent);
    return parse_policy(test::unmodified(text, modifiers_text_));
  }

  void fill_rules(const std::vector<double>& params) {
    std::vector<kvlab_rule> rules, unlimited;
    std::vector<std::uint32_t> evict_at;
    std::vector<std::uint64_t> seeds;
    std::vector<std::uint32_t> ids;
    for (const Pair& pair : pairs_) {
      rules.push_back({pair.budget, pair.sinks, pair.recent});
      unlimited.push_back({kUnlimited, 0, 0});
      evict_at.push_back(pair.budget == kNoBudget ? kUnlimited
                                                  : pair.budget - 1 + modifiers_.every);
    }
    evict_at_ =
        std::make_unique<DeviceArray<std::uint32_t>>(std::span<const std::uint32_t>(evict_at));
    for (std::size_t s = 0; s < next_.size(); ++s) {
      seeds.push_back(seed(static_cast<int>(s)));
      ids.push_back(id(static_cast<int>(s)));
    }
    rules_ = std::make_unique<DeviceArray<kvlab_rule>>(std::span<const kvlab_rule>(rules));
    unlimited_ = std::make_unique<DeviceArray<kvlab_rule>>(std::span<const kvlab_rule>(unlimited));
    seeds_ = std::make_unique<DeviceArray<std::uint64_t>>(std::span<const std::uint64_t>(seeds));
    ids_ = std::make_unique<DeviceArray<std::uint32_t>>(std::span<const std::uint32_t>(ids));
    params_ = std::make_unique<DeviceArray<double>>(std::span<const double>(params));
    now_ = std::make_unique<DeviceArray<std::uint32_t>>(next_.size());
    appended_ = std::make_unique<DeviceArray<std::uint32_t>>(next_.size());
  }

  Cache& working() const { return in_place_ ? *resident_ : *scratch_; }

  kvlab_compact_args args_between(const Cache& from, const Cache& to) const {
    return {.from = from.device(),
            .to = to.device(),
            .policy = {.states = from.states(),
                       .rules = rules_->data(),
                       .params = params_->data(),
                       .seeds = seeds_->data(),
                       .sequence_ids = ids_->data(),
                       .layer = kLayer,
                       .features = from.features()},
            .to_states = to.states(),
            .now = now_->data(),
            .appended = appended_->data(),
            .workspace = workspace_->data(),
            .to_features = to.features()};
  }

  void put_counts(const std::vector<std::uint32_t>& now, const std::vector<std::uint32_t>& counts) {
    now_->assign(now);
    appended_->assign(counts);
  }

  /// Writes the tokens' keys and values, and the observation of every live token.
  void prepare(const std::vector<std::uint32_t>& counts) {
    std::vector<std::uint32_t> now = next_;
    for (std::size_t s = 0; s < counts.size(); ++s)
      if (counts[s] == 0) now[s] = kIdle;
    if (!in_place_) copy_to_scratch(now);
    std::vector<Observation> seen(working().slots());
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      const std::uint32_t count = counts[sequence(i)], first = next_[sequence(i)];
      if (count == 0) continue;
      const int pair = static_cast<int>(i);
      const std::size_t begin = working().begin(pair), older_end = working().end(pair);
      for (std::size_t slot = begin; slot < older_end + count; ++slot) {
        const bool is_new = slot >= older_end;
        const std::uint32_t position = is_new ? first + static_cast<std::uint32_t>(slot - older_end)
                                              : working().host.positions[slot];
        if (is_new) working().write_rows(pair, slot, position);
        seen[slot] = observation_of_(position, first, count);
        seen[slot].queries = 0xBAD;  // the kernel must not use this number
      }
    }
    working().upload();
    seen_->assign(seen);
    put_counts(now, counts);
  }

  /// Copies the live tokens to the scratch cache by a compaction that evicts nothing.
  void copy_to_scratch(const std::vector<std::uint32_t>& now) {
    put_counts(now, std::vector<std::uint32_t>(now.size(), 0));
    kvlab_compact_args copy = args_between(*resident_, *scratch_);
    copy.policy.rules = unlimited_->data();
    const DeviceArray<std::byte> workspace(compact_workspace(copy.from));
    copy.workspace = workspace.data();
    check_cuda(compact(policy_, copy, nullptr));
    check_cuda(cudaDeviceSynchronize());
    scratch_->download();
  }

  void step_host(const std::vector<std::uint32_t>& counts) {
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      const std::uint32_t count = counts[sequence(i)], first = next_[sequence(i)];
      if (count == 0) continue;
      LiveSet& live = *live_[i];
      live.evict_to_budget(first);
      live.append(first, count, sample_features(first, count, live.features().size()).data());
      std::vector<Observation> seen;
      for (const std::uint32_t position : live.positions())
        seen.push_back(observation_of_(position, first, count));
      live.observe(seen);
    }
    for (std::size_t i = 0; i < pairs_.size(); ++i)
      if (const std::uint32_t count = counts[sequence(i)])
        live_[i]->evict_to_budget(next_[sequence(i)] + count);
    for (std::size_t s = 0; s < counts.size(); ++s) next_[s] += counts[s];
  }

  void check() const {
    const auto& host = resident_->host;
    int bad_rows = 0, bad_states = 0, bad_positions = 0, bad_lengths = 0;
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      const LiveSet& live = *live_[i];
      const int pair = static_cast<int>(i);
      if (host.lengths[i] != static_cast<int>(live.size()) || host.next_slots[i] != host.lengths[i])
        ++bad_lengths;
      std::map<std::uint32_t, std::uint32_t> age_on_host;
      for (std::uint32_t t = 0; t < live.size(); ++t) age_on_host[live.positions()[t]] = t;
      for (std::size_t slot = resident_->begin(pair); slot < resident_->end(pair); ++slot) {
        const std::uint32_t position = host.positions[slot];
        const auto found = age_on_host.extract(position);
        if (found.empty()) {
          ++bad_positions;
          continue;
        }
        if (!resident_->has_rows(pair, slot, position)) ++bad_rows;
        if (!live.has_state(found.mapped(), resident_->state(slot))) ++bad_states;
      }
      bad_positions += static_cast<int>(age_on_host.size());
    }
    CHECK(bad_lengths == 0);
    CHECK(bad_positions == 0);
    CHECK(bad_rows == 0);
    CHECK(bad_states == 0);
  }

  const DevicePolicy& policy_;
  std::vector<Pair> pairs_;
  bool in_place_;
  ObservationOf observation_of_;
  std::string modifiers_text_;
  Modifiers modifiers_;
  Needs needs_ = Needs::nothing;
  std::vector<std::unique_ptr<LiveSet>> live_;
  std::vector<std::uint32_t> next_;  // [sequence]: next position
  std::unique_ptr<Cache> resident_, scratch_;
  std::unique_ptr<DeviceArray<kvlab_rule>> rules_, unlimited_;
  std::unique_ptr<DeviceArray<std::uint64_t>> seeds_;
  std::unique_ptr<DeviceArray<std::uint32_t>> ids_, now_, appended_, evict_at_;
  std::unique_ptr<DeviceArray<double>> params_;
  std::unique_ptr<DeviceArray<std::byte>> workspace_;
  std::unique_ptr<DeviceArray<Observation>> seen_;
};

/// Pairs of all kinds: with budgets of 1 and 2, with only sinks, with only recent tokens, with
/// protected tokens that fill the budget, without a budget, and with a budget larger than any
/// length.
std::vector<Pair> all_kinds() {
  return {{1, 0, 0},   {2, 1, 0},    {2, 0, 2},    {40, 39, 0},       {40, 0, 40},    {64, 4, 32},
          {100, 0, 0}, {130, 5, 60}, {5000, 4, 9}, {kNoBudget, 0, 0}, {1500, 4, 750}, {700, 0, 1}};
}

}  // namespace

TEST_CASE("a compaction refuses invalid arguments before any launch") {
  for (const DevicePolicy& policy : device_policies())
    CHECK(compact(policy, kvlab_compact_args{}, nullptr) == cudaErrorInvalidValue);
}

TEST_CASE(
    "a compaction keeps the tokens of the host's rule after prompts and later turns, in place and "
    "from another cache",
    "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const bool in_place : {true, false})
    for (const DevicePolicy& policy : device_policies()) {
      INFO(policy.name << (in_place ? " in place" : " from another cache"));
      Run run(policy, all_kinds(), 5800, in_place);
      std::mt19937 random(8);
      run.append({1, 2, 39, 700, 1100, 2500});
      run.append({0, 3, 1, 129, 0, 800});
      run.shuffle(random);
      run.append({1, 0, 64, 1, 300, 1025});
    }
}

TEST_CASE("a compaction after each appended token follows the rule of decoding", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const DevicePolicy& policy : device_policies()) {
    INFO(policy.name);
    Run run(policy, {{3, 0, 0}, {8, 2, 4}, {5, 0, 5}, {1, 0, 0}}, 30, true);
    CapturedGraph graph([&](cudaStream_t stream) { return compact(policy, run.args(), stream); });
    run.append({30, 7});
    for (int step = 0; step < 40; ++step) run.append({1, step % 3 == 0 ? 0u : 1u}, &graph);
  }
}

void check_under_modifiers(bool in_place) {
  if (!has_device()) return skip("no CUDA device");
  for (const std::string modifiers :
       {":every=5", ":every=16:smooth=3", ":every=9:smooth=100000:pool=max", ":every=4:scope=layer",
        ":every=30:scope=layer:smooth=2"})
    for (const DevicePolicy& policy : device_policies()) {
      if (policy.name == "full") continue;
      INFO(policy.name << modifiers);
      Run run(policy, {{40, 0, 0}, {40, 0, 0}, {64, 4, 32}, {64, 4, 32}, {1, 0, 0}, {1, 0, 0}},
              1300, in_place, sample_observation, modifiers);
      std::mt19937 random(9);
      run.append({50, 1100, 20});
      for (int step = 0; step < 20; ++step) run.append({3, 1, step % 2 == 0 ? 0u : 1u});
      run.shuffle(random);
      run.append({200, 9, 2});
      for (int step = 0; step < 9; ++step) run.append({1, 7, 1});
    }
}

TEST_CASE("a compaction under modifiers keeps the tokens that the rule keeps: in place", "[gpu]") {
  check_under_modifiers(true);
}
TEST_CASE("a compaction under modifiers keeps the tokens that the rule keeps: from another cache",
          "[gpu]") {
  check_under_modifiers(false);
}

TEST_CASE("modifiers are correct for more tokens than one thread block can sort by age", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::string modifiers : {":every=16:smooth=3", ":every=4:scope=layer:smooth=2"})
    for (const DevicePolicy& policy : device_policies()) {
      if (policy.name != "h2o" && policy.name != "random") continue;
      INFO(policy.name << modifiers);
      Run run(policy, {{4500, 0, 0}, {4500, 0, 0}}, 5600, true, sample_observation, modifiers);
      std::mt19937 random(10);
      run.append({5000});
      for (const std::uint32_t count : {1u, 40u, 500u}) {
        run.shuffle(random);
        run.append({count});
      }
    }
}

TEST_CASE("tokens with equal scores are evicted oldest first", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const DevicePolicy& policy : device_policies()) {
    INFO(policy.name);
    Run run(policy, {{100, 0, 0}, {1000, 4, 100}}, 3500, false, sample_equal);
    run.append({2049});
    run.append({500});
  }
}

TEST_CASE("a compaction is correct at every length around its block sizes", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const auto named = [](const DevicePolicy& policy) { return policy.name == "h2o"; };
  const DevicePolicy& h2o = *std::ranges::find_if(device_policies(), named);
  for (const std::uint32_t length : {1u, 2u, 31u, 32u, 33u, 1023u, 1024u, 1025u, 2048u, 5000u})
    for (const std::uint32_t budget : {length / 2 + 1, length, length + 1, length + 2}) {
      INFO("length " << length << " budget " << budget);
      Run run(h2o, {{budget, 0, budget / 2}, {budget, budget / 3, 0}}, length, budget % 2 == 0);
      run.append({length});
    }
}

TEST_CASE("200 runs of a compaction give equal bits", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const DevicePolicy& policy : device_policies()) {
    Run run(policy, {{200, 4, 100}, {90, 0, 0}}, 1200, true);
    run.append({700});
    const auto first = run.once_more({300});
    int different = 0;
    for (int again = 0; again < 200; ++again) different += run.once_more({300}) == first ? 0 : 1;
    CHECK(different == 0);
  }
}
