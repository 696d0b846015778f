// Tests of kvlab_kv_cache with drafts, with the caller's blocks, and with KV heads that are split
// over devices.
#include <atomic>
#include <barrier>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>

#include "tests/kernels/library/kv_cache_fixture.hpp"
#include "tests/skip.hpp"

using namespace kvlab;

namespace {

using Counts = std::vector<std::uint32_t>;  // [sequence]

constexpr std::uint32_t kDrafts = 6;  ///< tokens of a sequence in a verification

/// One round of drafts for two sequences: the tokens to verify, and how many of them are right.
struct Round {
  Counts tokens, accepted;
};

class SampledRounds {
 public:
  Round next() {
    Round round{{below(kDrafts + 1), below(kDrafts + 1)}, {0, 0}};
    if (round.tokens[0] + round.tokens[1] == 0) round.tokens[1] = 1;
    for (std::size_t s = 0; s < 2; ++s) round.accepted[s] = below(round.tokens[s] + 1);
    return round;
  }

 private:
  std::uint32_t below(std::uint32_t end) { return static_cast<std::uint32_t>(random_() % end); }

  std::mt19937 random_{11};
};

/// Runs prompts, rounds of drafts, steps and a second turn on two sequences of a device's cache. It
/// ends with steps, because the caches of the CPU and of the device both evict before a step.
/// Calls each(sequence, layer, position of the first token, rows of accepted tokens, outputs).
/// Returns the number of tokens of each sequence.
template <class Each>
Counts converse(Slots& slots, Each each) {
  SampledRows sampled;
  SampledRounds rounds;
  Counts fed{0, 0};
  const std::size_t width = slots.queries();
  const auto append = [&](std::uint32_t sequence, std::uint32_t tokens) {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      const auto rows = sampled.rows(tokens);
      each(sequence, layer, fed[sequence], std::span(rows),
           slots.append(static_cast<int>(sequence), layer, fed[sequence], true, rows));
    }
    fed[sequence] += tokens;
  };
  append(0, 40);
  append(1, 31);
  for (int step = 0; step < 15; ++step) {
    const Round round = rounds.next();
    slots.begin_drafts(round.tokens);
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      const auto rows = sampled.rows(round.tokens[0] + round.tokens[1]);
      const auto out = slots.verify(layer, rows);
      std::size_t first = 0;
      for (std::uint32_t s = 0; s < 2; first += round.tokens[s++]) {
        const std::size_t right = round.accepted[s];
        if (right > 0)
          each(s, layer, fed[s], std::span(rows).subspan(first * kRow, right * kRow),
               std::vector(out.begin() + static_cast<std::ptrdiff_t>(first * width),
                           out.begin() + static_cast<std::ptrdiff_t>((first + right) * width)));
      }
    }
    slots.accept(round.accepted);
    for (std::size_t s = 0; s < 2; ++s) fed[s] += round.accepted[s];
    if (step == 9) append(1, 12);
    if (step % 3 != 2) continue;
    for (int i = 0; i < 2; ++i) {
      slots.begin_step();
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        const auto rows = sampled.rows(2);
        const auto out = slots.step(layer, rows);
        for (std::uint32_t s = 0; s < 2; ++s)
          each(s, layer, fed[s], std::span(rows).subspan(s * kRow, kRow),
               std::vector(out.begin() + static_cast<std::ptrdiff_t>(s * width),
                           out.begin() + static_cast<std::ptrdiff_t>((s + 1) * width)));
      }
      ++fed[0], ++fed[1];
    }
  }
  return fed;
}

/// The caller's blocks for a cache of two sequences. The block table is in random order.
class Blocks {
 public:
  Blocks(Layout& layout, int page, bool by_pair) {
    int slots = 0;
    done(kvlab_kv_cache_slots(&layout.config, &slots));
    const int rows = layout.config.sequences * (by_pair ? static_cast<int>(kHeads) : 1),
              max_blocks = (slots + page - 1) / page, blocks = rows * max_blocks,
              heads = by_pair ? 1 : static_cast<int>(kHeads);
    std::vector<std::int32_t> table(static_cast<std::size_t>(blocks));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(5));
    table_.emplace(std::span<const std::int32_t>(table));
    const std::int64_t slot = std::int64_t{heads} * kSize;
    for (kvlab_layer& layer : layout.layers) {
      for (void** pool : {&layer.keys, &layer.values}) {
        pools_.push_back(
            std::make_unique<DeviceArray<float>>(static_cast<std::size_t>(blocks) * page * slot));
        *pool = pools_.back()->data();
      }
    }
    layout.config.pages = {.blocks = table_->data(),
                           .page = page,
                           .max_blocks = max_blocks,
                           .by_pair = by_pair,
                           .block_stride = page * slot,
                           .slot_stride = slot,
                           .head_stride = by_pair ? 0 : kSize};
  }

 private:
  std::optional<DeviceArray<std::int32_t>> table_;
  std::vector<std::unique_ptr<DeviceArray<float>>> pools_;
};

/// The results of converse(): outputs, kept tokens and counters.
struct Outcome {
  std::vector<float> outputs;
  std::vector<Counts> kept;
  std::vector<std::uint64_t> counts;
  bool operator==(const Outcome&) const = default;
};

Outcome outcome_of(const Layout& layout) {
  Slots slots(layout);
  Outcome outcome;
  const Counts fed = converse(slots, [&](auto, auto, auto, auto, const std::vector<float>& out) {
    outcome.outputs.insert(outcome.outputs.end(), out.begin(), out.end());
  });
  for (int s = 0; s < 2; ++s) {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer)
      for (std::uint32_t head = 0; head < kHeads; ++head)
        outcome.kept.push_back(slots.kept(s, layer, head));
    CHECK(slots.held(s).tokens == fed[static_cast<std::size_t>(s)]);
    outcome.counts.push_back(slots.held(s).evictions);
    outcome.counts.push_back(slots.held(s).kv_bytes);
  }
  return outcome;
}

/// Lets two threads, each with a cache of one "device", exchange ranks.
class Exchange {
 public:
  struct Member {
    Exchange* exchange;
    std::size_t device;
  };
  Member member(std::size_t device) { return {this, device}; }
  static cudaError_t gather(void* context, const std::uint64_t* own, std::uint64_t* all,
                            std::size_t count, cudaStream_t stream) {
    const Member& me = *static_cast<Member*>(context);
    Exchange& exchange = *me.exchange;
    if (const cudaError_t error = cudaStreamSynchronize(stream); error != cudaSuccess) return error;
    exchange.own_[me.device] = own;
    exchange.barrier_.arrive_and_wait();
    for (std::size_t device = 0; device < 2; ++device)
      if (const cudaError_t error =
              cudaMemcpyAsync(all + device * count, exchange.own_[device], count * sizeof *all,
                              cudaMemcpyDeviceToDevice, stream);
          error != cudaSuccess)
        return error;
    const cudaError_t error = cudaStreamSynchronize(stream);
    exchange.barrier_.arrive_and_wait();
    ++exchange.gathered;
    return error;
  }
  /// Called by a device that has failed, so that the other one does not wait for it.
  void leave() { barrier_.arrive_and_drop(); }
  std::atomic<int> gathered = 0;

 private:
  std::barrier<> barrier_{2};
  const std::uint64_t* own_[2] = {};
};

}  // namespace

TEST_CASE("Accepted drafts are appended as if no draft had been rejected", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const char* policy : {"full", "window", "sink", "lru", "h2o", "tova",
                             "snapkv:recent=8:once=no", "a2sf", "keydiff", "random", "h2o:every=4",
                             "h2o:scope=layer:every=4", "h2o:once", "knorm:smooth=2:every=3"}) {
    CAPTURE(policy);
    const ResolvedConfig config = resolved(policy, 24);
    Layout two(config, 2);
    two.config.draft_tokens = kDrafts;
    Slots slots(two);
    std::deque<Host> hosts;
    for (std::uint32_t s = 0; s < 2; ++s) {
      ResolvedConfig own = config;
      own.sequence = s;
      hosts.emplace_back(own);
    }
    double off = 0;
    const Counts fed =
        converse(slots, [&](std::uint32_t sequence, std::uint32_t layer, std::uint32_t at,
                            auto rows, const std::vector<float>& out) {
          // Prompts and the second turn have more tokens than a verification.
          const bool ends = rows.size() / kRow > kDrafts;
          off = std::max(off, worst(out, hosts[sequence].attend(layer, at, ends, rows)));
        });
    CHECK(off < 1e-4);
    for (std::uint32_t s = 0; s < 2; ++s) {
      std::uint64_t left = 0;
      for (std::uint32_t layer = 0; layer < kLayers; ++layer)
        for (std::uint32_t head = 0; head < kHeads; ++head) {
          const Counts kept = slots.kept(static_cast<int>(s), layer, head);
          CHECK(kept == hosts[s].kept(layer, head));
          left += fed[s] - kept.size();
        }
      CHECK(slots.held(static_cast<int>(s)).tokens == fed[s]);
      CHECK(slots.held(static_cast<int>(s)).evictions == left);
    }
  }
}

TEST_CASE("A sequence that starts during a verification leaves it", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const ResolvedConfig config = resolved("h2o", 24);
  Layout two(config, 2), one(config);
  two.config.draft_tokens = kDrafts;
  Slots slots(two), alone(one);
  SampledRows sampled;
  const auto prompt = sampled.rows(40);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    slots.append(0, layer, 0, true, prompt);
    slots.append(1, layer, 0, true, prompt);
    alone.append(0, layer, 0, true, prompt);
  }
  slots.begin_drafts({3, 4});
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    if (layer == 1) slots.start(0);
    const auto rows = sampled.rows(7);
    slots.verify(layer, rows);
    alone.append(0, layer, 40, false, std::span(rows).subspan(3 * kRow, 2 * kRow));
  }
  slots.accept({3, 2});
  CHECK(slots.held(0).tokens == 0);
  CHECK(slots.held(1).tokens == 42);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer)
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      CHECK(slots.kept(0, layer, head).empty());
      CHECK(slots.kept(1, layer, head) == alone.kept(0, layer, head));
    }
}

TEST_CASE("Drafts use all slots of a cache whose keys are split in parts", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  // 248 - 2 + 4 + 6 = 256 slots, which is a multiple of the slots of a part.
  const ResolvedConfig config = resolve(
      {.policy = parse_policy("h2o:every=4"), .budget = {.extent = tokens(248)}}, 400, 0, kModel);
  Layout drafting(config), plain(config);
  for (Layout* layout : {&drafting, &plain}) layout->config.tokens = 400;
  drafting.config.draft_tokens = kDrafts;
  int max_slots = 0;
  done(kvlab_kv_cache_slots(&drafting.config, &max_slots));
  CHECK(max_slots == 256);
  Slots slots(drafting), alone(plain);
  SampledRows sampled;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    const auto rows = sampled.rows(280);
    for (Slots* one : {&slots, &alone}) one->append(0, layer, 0, true, rows);
  }
  std::uint32_t fed = 280;
  for (int round = 0; round < 6; ++round) {
    for (int step = 0; step < round; ++step, ++fed) {
      for (Slots* one : {&slots, &alone}) one->begin_step();
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        const auto row = sampled.rows(1);
        CHECK(worst(slots.step(layer, row), alone.step(layer, row)) < 1e-5);
      }
    }
    slots.begin_drafts({kDrafts});
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      const auto rows = sampled.rows(kDrafts);
      CHECK(worst(slots.verify(layer, rows), alone.append(0, layer, fed, false, rows)) < 1e-5);
    }
    slots.accept({kDrafts});
    fed += kDrafts;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer)
      for (std::uint32_t head = 0; head < kHeads; ++head)
        CHECK(slots.kept(0, layer, head) == alone.kept(0, layer, head));
  }
}

TEST_CASE("Calls for different sequences may take turns in every layer", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const ResolvedConfig config = resolved("h2o", 24);
  Layout three(config, 3);
  const Layout one(config);
  three.config.interleaves_appends = 1;
  three.config.draft_tokens = kDrafts;
  Slots slots(three), first(one), second(one), third(one);
  SampledRows sampled;
  const auto append = [&](int sequence, Slots& alone) {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      const auto rows = sampled.rows(40);
      slots.append(sequence, layer, 0, true, rows), alone.append(0, layer, 0, true, rows);
    }
  };
  append(0, first);
  append(2, third);
  const auto step = [&](std::uint32_t layer) {
    auto rows = sampled.rows(3);
    auto out = slots.step(layer, rows);
    rows.resize(kRow), out.resize(kQueries);
    CHECK(worst(out, first.step(layer, rows)) < 1e-5);
  };
  slots.begin_step({1, 0, 0}), first.begin_step();
  std::vector<std::vector<float>> prompt;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    step(layer);  // the RoPE of the chunk must not reach the step's next layer
    prompt.push_back(sampled.rows(25));
    slots.append_chunk(1, layer, 0, 25, std::span(prompt[layer]).first(10 * kRow));
  }
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    slots.append_chunk(1, layer, 10, 25, std::span(prompt[layer]).subspan(10 * kRow));
    second.append(0, layer, 0, true, prompt[layer]);
  }
  slots.begin_step({1, 0, 0}), first.begin_step();
  slots.begin_drafts({0, 0, 5});
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    step(layer);
    const auto rows = sampled.rows(5);
    auto out = slots.verify(layer, rows);
    out.resize(3 * kQueries);
    CHECK(worst(out, third.append(0, layer, 40, false, std::span(rows).first(3 * kRow))) < 1e-5);
  }
  slots.accept({0, 0, 3});
  for (std::uint32_t layer = 0; layer < kLayers; ++layer)
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      CHECK(slots.kept(0, layer, head) == first.kept(0, layer, head));
      CHECK(slots.kept(1, layer, head) == second.kept(0, layer, head));
      CHECK(slots.kept(2, layer, head) == third.kept(0, layer, head));
    }
}

TEST_CASE("A cache over the caller's blocks gives the same bits as one with its own memory",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const char* policy : {"full", "window", "h2o", "tova", "keydiff", "h2o:every=4"}) {
    for (const bool by_pair : {false, true}) {
      CAPTURE(policy, by_pair);
      const ResolvedConfig config = resolved(policy, 24);
      Layout own(config, 2), paged(config, 2);
      own.config.draft_tokens = paged.config.draft_tokens = kDrafts;
      const Blocks blocks(paged, by_pair ? 32 : 16, by_pair);
      const Outcome expected = outcome_of(own), found = outcome_of(paged);
      CHECK(expected.outputs.size() > 0);
      CHECK(found == expected);
    }
  }
}

TEST_CASE("Caches with parts of a layer's heads evict the same tokens as one with all heads",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  static_assert(kHeads == 2);
  for (const char* policy : {"h2o:scope=layer:every=4", "knorm:scope=layer:smooth=2:every=3"}) {
    CAPTURE(policy);
    const ResolvedConfig config = resolved(policy, 24);
    Layout whole(config, 2);
    whole.config.draft_tokens = kDrafts;
    Slots slots(whole);
    converse(slots, [](auto...) {});
    Exchange exchange;
    Exchange::Member members[2] = {exchange.member(0), exchange.member(1)};
    std::vector<Counts> kept[2];
    std::exception_ptr failed[2];
    const auto run = [&](std::size_t device) {
      try {
        Layout part(config, 2, KVLAB_F32, {static_cast<std::uint32_t>(device), 1});
        part.config.draft_tokens = kDrafts;
        part.config.devices = 2;
        part.config.gather = Exchange::gather;
        part.config.gather_context = &members[device];
        Slots own(part);
        converse(own, [](auto...) {});
        for (int s = 0; s < 2; ++s)
          for (std::uint32_t layer = 0; layer < kLayers; ++layer)
            kept[device].push_back(own.kept(s, layer, 0));
      } catch (...) {
        failed[device] = std::current_exception();
        exchange.leave();
      }
    };
    std::thread other(run, 1);
    run(0);
    other.join();
    for (const std::exception_ptr& failure : failed)
      if (failure) std::rethrow_exception(failure);
    CHECK(exchange.gathered > 0);
    std::size_t at = 0;
    for (int s = 0; s < 2; ++s)
      for (std::uint32_t layer = 0; layer < kLayers; ++layer, ++at)
        for (std::uint32_t head = 0; head < kHeads; ++head)
          CHECK(kept[head][at] == slots.kept(s, layer, head));
  }
}
