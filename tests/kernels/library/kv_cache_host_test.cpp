// Tests of the code of kvlab_kv_cache that runs on the host: counts, the order of calls, and
// sequences that start or are copied. They need no device, because they link a fake CUDA runtime
// (fake_cuda.hpp), whose kernels do nothing.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cache/kv_cache.hpp"
#include "kernels/kvlab.h"
#include "kernels/library_policy.hpp"
#include "tests/catch.hpp"
#include "tests/kernels/library/fake_cuda.hpp"

using namespace kvlab;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int kLayers = 2, kHeads = 2, kQueryHeads = 4, kSize = 64, kSequences = 3;
constexpr std::size_t kPairs = kLayers * kSequences * kHeads;

struct Setup {
  const char* policy = "h2o";
  std::uint32_t budget = 24, sinks = 2, recent = 8;
  std::vector<kvlab_tier> tiers = {};  ///< of each pair
  std::uint32_t every = 1;
  bool interleaves = false;
  std::uint32_t draft_tokens = 0;
  std::uint32_t longest = 0;
};

/// A cache with three sequences.
class Cache {
 public:
  explicit Cache(const Setup& setup = {}) {
    const std::vector<float> inv_freq(kSize / 2, 1.0f);
    const kvlab_rope rope{inv_freq.data(), kSize, 1};
    const std::vector<kvlab_layer> layers(kLayers, {.number = 0, .softmax_scale = 0.125f});
    const std::vector<kvlab_rule> rules(kPairs, {setup.budget, setup.sinks, setup.recent, 0});
    std::vector<kvlab_tier> tiers;
    for (std::size_t pair = 0; pair < kPairs; ++pair)
      tiers.insert(tiers.end(), setup.tiers.begin(), setup.tiers.end());
    const kvlab_kv_cache_config config{.struct_size = sizeof config,
                                       .type = KVLAB_BF16,
                                       .query_heads = kQueryHeads,
                                       .kv_heads = kHeads,
                                       .head_size = kSize,
                                       .sequences = kSequences,
                                       .layer_count = kLayers,
                                       .rope_count = 1,
                                       .tier_count = static_cast<int>(setup.tiers.size()),
                                       .layers = layers.data(),
                                       .ropes = &rope,
                                       .policy = kvlab_find_policy(setup.policy),
                                       .rules = rules.data(),
                                       .tiers = tiers.data(),
                                       .threshold16 = 655,
                                       .tokens = 1000,
                                       .longest = setup.longest,
                                       .every = setup.every,
                                       .interleaves_appends = setup.interleaves,
                                       .draft_tokens = setup.draft_tokens};
    refusal_ = why(kvlab_kv_cache_create(&config, nullptr, &cache_));
  }
  ~Cache() { kvlab_kv_cache_destroy(cache_); }
  Cache(const Cache&) = delete;

  /// The reason if the cache could not be created, and otherwise "".
  const std::string& refusal() const { return refusal_; }
  kvlab_append_chunk chunk(int sequence, int layer, std::uint32_t fed, std::uint32_t tokens) {
    return {.struct_size = sizeof(kvlab_append_chunk),
            .sequence = sequence,
            .layer = layer,
            .fed = fed,
            .tokens = tokens,
            .ends_prompt = 1,
            .count = tokens,
            .qkv = rows_.data(),
            .out = rows_.data()};
  }
  /// Appends a chunk. Returns the reason if the call is refused, and otherwise "".
  std::string append(const kvlab_append_chunk& chunk) {
    return why(kvlab_kv_cache_append(cache_, &chunk, nullptr));
  }
  /// Appends tokens in all layers, one layer after another.
  std::string append(int sequence, std::uint32_t fed, std::uint32_t tokens) {
    for (int layer = 0; layer < kLayers; ++layer)
      if (std::string said = append(chunk(sequence, layer, fed, tokens)); !said.empty())
        return said;
    return "";
  }
  std::string begin_step(const std::vector<unsigned char>& decodes = {}) {
    return why(
        kvlab_kv_cache_begin_step(cache_, decodes.empty() ? nullptr : decodes.data(), nullptr));
  }
  std::string layer_of_step(int layer) {
    return why(kvlab_kv_cache_step(cache_, layer, rows_.data(), rows_.data(), nullptr, nullptr));
  }
  std::string step(const std::vector<unsigned char>& decodes = {}) {
    if (std::string said = begin_step(decodes); !said.empty()) return said;
    for (int layer = 0; layer < kLayers; ++layer)
      if (std::string said = layer_of_step(layer); !said.empty()) return said;
    return "";
  }
  std::string begin_drafts(const std::vector<std::uint32_t>& tokens) {
    return why(kvlab_kv_cache_begin_drafts(cache_, tokens.data(), nullptr));
  }
  std::string verify(int layer) {
    return why(
        kvlab_kv_cache_verify_drafts(cache_, layer, rows_.data(), rows_.data(), nullptr, nullptr));
  }
  std::string accept(const std::vector<std::uint32_t>& tokens) {
    return why(kvlab_kv_cache_accept_drafts(cache_, tokens.data(), nullptr));
  }
  /// A whole verification.
  std::string drafts(const std::vector<std::uint32_t>& tokens,
                     const std::vector<std::uint32_t>& accepted) {
    if (std::string said = begin_drafts(tokens); !said.empty()) return said;
    for (int layer = 0; layer < kLayers; ++layer)
      if (std::string said = verify(layer); !said.empty()) return said;
    return accept(accepted);
  }
  std::string start(int sequence, const kvlab_sequence_settings* settings = nullptr) {
    return why(kvlab_kv_cache_start(cache_, sequence, settings, nullptr));
  }
  std::string copy(int from, int to) { return why(kvlab_kv_cache_copy(cache_, from, to, nullptr)); }
  std::string clear() { return why(kvlab_kv_cache_clear(cache_, nullptr)); }
  kvlab_sequence_info info(int sequence) const {
    kvlab_sequence_info info{.struct_size = sizeof info};
    REQUIRE(kvlab_kv_cache_sequence_info(cache_, sequence, &info) == cudaSuccess);
    return info;
  }
  std::vector<std::uint32_t> tokens() const {
    return {info(0).tokens, info(1).tokens, info(2).tokens};
  }

 private:
  static std::string why(cudaError_t error) {
    const std::string said = kvlab_last_error();
    CHECK(said.empty() == (error == cudaSuccess));
    return said;
  }

  std::vector<float> rows_ = std::vector<float>(std::size_t{4096} * 1024);
  kvlab_kv_cache* cache_ = nullptr;
  std::string refusal_;
};

using Counts = std::vector<std::uint32_t>;
constexpr std::uint64_t kTokenBytes = 2 * kSize * 2;

}  // namespace

TEST_CASE("A new request replaces another one in a batch") {
  Cache cache;
  for (int sequence = 0; sequence < kSequences; ++sequence)
    CHECK(cache.append(sequence, 0, 10 + static_cast<std::uint32_t>(sequence)) == "");
  CHECK(cache.step() == "");
  CHECK(cache.tokens() == Counts{11, 12, 13});

  CHECK(cache.start(1) == "");
  CHECK(cache.tokens() == Counts{11, 0, 13});
  CHECK(cache.info(1).kv_bytes == 0);
  CHECK(cache.append(1, 0, 40) == "");
  CHECK(cache.step() == "");
  CHECK(cache.tokens() == Counts{12, 41, 14});
  CHECK(cache.info(0).kv_bytes == kLayers * kHeads * 12 * kTokenBytes);
  // After the prompt, 23 of 40 tokens are kept. The step adds one.
  CHECK(cache.info(1).kv_bytes == kLayers * kHeads * 24 * kTokenBytes);
  CHECK(cache.info(1).evictions == kLayers * kHeads * 17);
  CHECK(cache.clear() == "");
  CHECK(cache.tokens() == Counts{0, 0, 0});
}

TEST_CASE("Counts of modifiers and tiers start again with a sequence") {
  for (const Setup& setup :
       {Setup{.every = 4},
        Setup{.budget = 84, .tiers = {{KVLAB_FORMAT_16, 8}, {KVLAB_FORMAT_4, 76}}}}) {
    Cache cache(setup), fresh(setup);
    CHECK(cache.append(0, 0, 100) == "");
    for (int step = 0; step < 6; ++step) CHECK(cache.step({1, 0, 0}) == "");
    CHECK(cache.start(0) == "");
    for (Cache* one : {&cache, &fresh}) {
      CHECK(one->append(0, 0, 90) == "");
      for (int step = 0; step < 3; ++step) CHECK(one->step({1, 0, 0}) == "");
    }
    CHECK(cache.info(0).kv_bytes == fresh.info(0).kv_bytes);
    CHECK(cache.info(0).evictions == fresh.info(0).evictions);
  }
}

TEST_CASE("An append or a step can be aborted") {
  Cache cache;
  CHECK(cache.append(0, 0, 10) == "");
  // Aborts an append after the first of two layers.
  CHECK(cache.append(cache.chunk(1, 0, 0, 12)) == "");
  CHECK_THAT(cache.step(), ContainsSubstring("sequence 1 is in the middle of an append"));
  CHECK(cache.step({1, 0, 0}) == "");  // other sequences may decode in the meantime
  CHECK_THAT(cache.copy(1, 2), ContainsSubstring("in the middle of an append"));
  CHECK(cache.start(1) == "");
  CHECK(cache.append(1, 0, 12) == "");

  // Aborts an append in the middle of a layer.
  kvlab_append_chunk chunk = cache.chunk(2, 0, 0, 12);
  chunk.count = 5;
  CHECK(cache.append(chunk) == "");
  CHECK_THAT(cache.step({1, 0, 0}),
             ContainsSubstring("sequence 2 is in the middle of an append, and"));
  CHECK_THAT(cache.append(0, 11, 3),
             ContainsSubstring("All chunks of an append go through a layer"));
  CHECK(cache.start(2) == "");
  CHECK(cache.append(0, 11, 3) == "");

  // Aborts a step after its first layer has run.
  CHECK(cache.begin_step() == "");
  CHECK(cache.layer_of_step(0) == "");
  for (int sequence = 0; sequence < kSequences; ++sequence) CHECK(cache.start(sequence) == "");
  CHECK(cache.tokens() == Counts{0, 0, 0});
  CHECK(cache.step() == "");
  CHECK(cache.tokens() == Counts{1, 1, 1});
}

TEST_CASE("Chunks go through all layers in a scheduler's order, with steps between them") {
  for (const Setup& setup : {Setup{.interleaves = true}, Setup{.every = 4, .interleaves = true},
                             Setup{.budget = 84,
                             .tiers = {{KVLAB_FORMAT_16, 8}, {KVLAB_FORMAT_4, 76}},
                             .interleaves = true}}) {
    Cache cache(setup), plain({.budget = setup.budget, .tiers = setup.tiers, .every = setup.every});
    for (Cache* one : {&cache, &plain}) {
      CHECK(one->append(0, 0, 50) == "");
      CHECK(one->append(1, 0, 30) == "");
    }
    kvlab_append_chunk chunk = cache.chunk(2, 0, 0, 100);
    for (; chunk.first < chunk.tokens; chunk.first += chunk.count) {
      chunk.count = std::min(32u, chunk.tokens - chunk.first);
      for (chunk.layer = 0; chunk.layer < kLayers; ++chunk.layer) CHECK(cache.append(chunk) == "");
      const bool is_last = chunk.first + chunk.count == chunk.tokens;
      if (!is_last) CHECK_THAT(cache.step(), ContainsSubstring("in the middle of an append"));
      CHECK(cache.step({1, 1, 0}) == "");
      CHECK(plain.step({1, 1, 0}) == "");
      if (!is_last)
        CHECK_THAT(cache.append(1, cache.info(1).tokens, 5),
                   ContainsSubstring("layer 0 of sequence 2 has had"));
    }
    CHECK(plain.append(2, 0, 100) == "");
    CHECK(cache.tokens() == plain.tokens());
    for (int sequence = 0; sequence < kSequences; ++sequence) {
      CHECK(cache.info(sequence).kv_bytes == plain.info(sequence).kv_bytes);
      CHECK(cache.info(sequence).evictions == plain.info(sequence).evictions);
    }
    // While an append is between two layers, an append to another sequence is refused.
    CHECK(cache.append(cache.chunk(0, 1, cache.info(0).tokens, 8)) == "");
    CHECK_THAT(cache.append(1, cache.info(1).tokens, 5), ContainsSubstring("in the middle"));
    CHECK(cache.start(0) == "");
    CHECK(cache.append(1, cache.info(1).tokens, 5) == "");
  }
}

TEST_CASE("Calls in a wrong order are refused, and change nothing") {
  Cache cache;
  CHECK(cache.append(0, 0, 10) == "");
  const int launches = fake_cuda::launches();
  CHECK_THAT(cache.append(0, 0, 4), ContainsSubstring("fed is 0; layer 0 has had 10 tokens"));
  CHECK_THAT(cache.append(3, 0, 4),
             ContainsSubstring("sequence is 3; it should be at least 0 and below 3"));
  kvlab_append_chunk chunk = cache.chunk(0, 0, 10, 8);
  chunk.first = 4, chunk.count = 4;
  CHECK_THAT(cache.append(chunk),
             ContainsSubstring("first is 4; layer 0 has had 0 tokens of this append"));
  chunk.first = 0, chunk.count = 9;
  CHECK_THAT(cache.append(chunk), ContainsSubstring("first + count at most tokens, 8"));
  CHECK_THAT(cache.layer_of_step(1),
             ContainsSubstring("layer is 1; a step goes through the layers"));
  CHECK_THAT(cache.layer_of_step(2),
             ContainsSubstring("layer is 2; it should be at least 0 and below 2"));
  CHECK_THAT(cache.copy(0, 3), ContainsSubstring("to is 3; it should be at least 0 and below 3"));
  CHECK(fake_cuda::launches() == launches);
  CHECK(cache.tokens() == Counts{10, 0, 0});
}

TEST_CASE("Accepted drafts are counted as an append") {
  for (const std::uint32_t every : {1u, 4u}) {
    Cache cache({.every = every, .draft_tokens = 6}), plain({.every = every});
    for (Cache* one : {&cache, &plain}) {
      CHECK(one->append(0, 0, 40) == "");
      CHECK(one->append(1, 0, 10) == "");
      CHECK(one->step({1, 1, 0}) == "");
    }
    CHECK(cache.drafts({5, 6, 0}, {3, 0, 0}) == "");
    CHECK(cache.drafts({1, 6, 0}, {1, 5, 0}) == "");
    CHECK(plain.append(0, 41, 3) == "");
    CHECK(plain.append(0, 44, 1) == "");
    CHECK(plain.append(1, 11, 5) == "");
    CHECK(cache.tokens() == Counts{45, 16, 0});
    for (int sequence = 0; sequence < kSequences; ++sequence) {
      CHECK(cache.info(sequence).kv_bytes == plain.info(sequence).kv_bytes);
      CHECK(cache.info(sequence).evictions == plain.info(sequence).evictions);
    }
    for (Cache* one : {&cache, &plain}) CHECK(one->step({1, 1, 0}) == "");
    CHECK(cache.info(0).kv_bytes == plain.info(0).kv_bytes);
  }
}

TEST_CASE("Drafts fit into the slots after any number of steps") {
  for (const std::uint32_t every : {1u, 4u}) {
    Cache cache({.every = every, .draft_tokens = 6});
    CHECK(cache.append(0, 0, 40) == "");
    for (int step = 0; step < 9; ++step) {
      CHECK(cache.step({1, 0, 0}) == "");
      CHECK(cache.drafts({6, 0, 0}, {0, 0, 0}) == "");
    }
    CHECK(cache.tokens() == Counts{49, 0, 0});
  }
}

TEST_CASE("Drafts that are all rejected do not count as evictions") {
  for (const std::uint32_t every : {1u, 4u}) {
    Cache cache({.every = every, .draft_tokens = 6});
    CHECK(cache.append(0, 0, 10) == "");
    CHECK(cache.drafts({3, 0, 0}, {0, 0, 0}) == "");
    CHECK(cache.info(0).evictions == 0);
    CHECK(cache.append(0, 10, 30) == "");
    CHECK(cache.step({1, 0, 0}) == "");
    const std::uint64_t before = cache.info(0).evictions;
    CHECK(before == kLayers * kHeads * 17);
    CHECK(cache.drafts({3, 0, 0}, {0, 0, 0}) == "");
    CHECK(cache.info(0).evictions == before);
  }
}

TEST_CASE("A sequence says how many tokens it can append before it evicts") {
  Cache cache({.every = 4, .draft_tokens = 6});
  CHECK(cache.info(0).until_eviction == 24 + 3);
  CHECK(cache.append(0, 0, 40) == "");
  CHECK(cache.info(0).until_eviction == 4);  // 23 tokens are live, and 27 evict
  CHECK(cache.step({1, 0, 0}) == "");
  CHECK(cache.info(0).until_eviction == 3);
  CHECK(cache.drafts({3, 0, 0}, {3, 0, 0}) == "");
  CHECK(cache.info(0).until_eviction == 4);
  for (int step = 0; step < 4; ++step) CHECK(cache.step({1, 0, 0}) == "");
  CHECK(cache.info(0).until_eviction == 4);  // the next append evicts first
  CHECK(cache.info(1).until_eviction == 24 + 3);

  Cache each({.draft_tokens = 6});
  CHECK(each.append(0, 0, 20) == "");
  CHECK(each.info(0).until_eviction == 4);
  CHECK(each.append(0, 20, 20) == "");
  CHECK(each.info(0).until_eviction == 1);
  CHECK(each.step({1, 0, 0}) == "");
  CHECK(each.info(0).until_eviction == 1);
  CHECK(Cache({.budget = UINT32_MAX}).info(0).until_eviction == UINT32_MAX);
}

TEST_CASE("Calls for drafts in a wrong order are refused, and change nothing") {
  Cache none;
  CHECK_THAT(none.begin_drafts({1, 0, 0}),
             ContainsSubstring("the cache was created with draft_tokens 0"));
  Cache cache({.draft_tokens = 4});
  CHECK(cache.append(0, 0, 10) == "");
  CHECK_THAT(cache.verify(0), ContainsSubstring("call kvlab_kv_cache_begin_drafts first"));
  CHECK_THAT(cache.accept({0, 0, 0}), ContainsSubstring("call kvlab_kv_cache_begin_drafts first"));
  CHECK_THAT(cache.begin_drafts({5, 0, 0}),
             ContainsSubstring("tokens[0] is 5; it should be at most draft_tokens, 4"));
  CHECK_THAT(cache.begin_drafts({0, 0, 0}), ContainsSubstring("tokens is 0 for every sequence"));
  CHECK(cache.append(cache.chunk(1, 0, 0, 12)) == "");
  CHECK_THAT(cache.begin_drafts({0, 2, 0}), ContainsSubstring("in the middle of an append"));
  CHECK(cache.start(1) == "");

  CHECK(cache.begin_drafts({3, 0, 2}) == "");
  CHECK_THAT(cache.begin_drafts({3, 0, 2}), ContainsSubstring("drafts are being verified"));
  CHECK_THAT(cache.append(1, 0, 4), ContainsSubstring("drafts are being verified"));
  CHECK_THAT(cache.step({1, 0, 0}), ContainsSubstring("drafts are being verified"));
  CHECK_THAT(cache.copy(0, 1), ContainsSubstring("drafts are being verified"));
  CHECK_THAT(cache.verify(1), ContainsSubstring("drafts go through the layers in order"));
  CHECK(cache.verify(0) == "");
  CHECK_THAT(cache.accept({3, 0, 2}), ContainsSubstring("layer 1 has not verified the drafts"));
  CHECK(cache.start(2) == "");
  CHECK(cache.verify(1) == "");
  CHECK_THAT(cache.accept({4, 0, 0}),
             ContainsSubstring("accepted[0] is 4; it should be at most 3, which is verified"));
  CHECK(cache.accept({3, 0, 2}) == "");  // sequence 2 has left the verification
  CHECK(cache.tokens() == Counts{13, 0, 0});

  // A verification that all sequences have left can still be completed.
  CHECK(cache.begin_drafts({2, 0, 0}) == "");
  CHECK(cache.verify(0) == "");
  CHECK(cache.start(0) == "");
  CHECK(cache.verify(1) == "");
  CHECK(cache.accept({2, 0, 0}) == "");
  CHECK(cache.tokens() == Counts{0, 0, 0});

  CHECK(cache.begin_drafts({1, 1, 1}) == "");
  CHECK(cache.clear() == "");
  CHECK(cache.append(0, 0, 4) == "");

  fake_cuda::set_capturing(true);
  for (const std::string& said : {cache.begin_drafts({1, 0, 0}), cache.accept({1, 0, 0})})
    CHECK_THAT(said, ContainsSubstring("the stream is being captured"));
  fake_cuda::set_capturing(false);
  CHECK(cache.drafts({1, 0, 0}, {1, 0, 0}) == "");
  // The last tokens of a sequence must have slots too.
  CHECK(cache.append(0, 5, 990) == "");
  CHECK(cache.drafts({4, 0, 0}, {4, 0, 0}) == "");
}

TEST_CASE("Only layers of a step are captured") {
  Cache cache;
  fake_cuda::set_capturing(true);
  for (const std::string& said : {cache.append(0, 0, 10), cache.begin_step(), cache.start(0),
                                  cache.copy(0, 1), cache.clear()})
    CHECK_THAT(said, ContainsSubstring("the stream is being captured"));
  for (int layer = 0; layer < kLayers; ++layer) CHECK(cache.layer_of_step(layer) == "");
  fake_cuda::set_capturing(false);
  CHECK(cache.tokens() == Counts{0, 0, 0});
  CHECK(cache.append(0, 0, 10) == "");
}

TEST_CASE("A sequence that starts can have other settings") {
  Cache cache;
  std::vector<kvlab_rule> rules(kLayers * kHeads, {12, 2, 4, 0});
  kvlab_sequence_settings settings{.struct_size = sizeof settings, .rules = rules.data()};
  CHECK(cache.start(1, &settings) == "");
  for (int sequence = 0; sequence < 2; ++sequence) CHECK(cache.append(sequence, 0, 40) == "");
  CHECK(cache.info(0).kv_bytes == kLayers * kHeads * 23 * kTokenBytes);
  CHECK(cache.info(1).kv_bytes == kLayers * kHeads * 11 * kTokenBytes);
  CHECK(cache.clear() == "");  // this does not change the settings
  CHECK(cache.append(1, 0, 40) == "");
  CHECK(cache.info(1).kv_bytes == kLayers * kHeads * 11 * kTokenBytes);

  rules[3].budget = 25;
  rules[0].budget = 13;
  CHECK_THAT(cache.start(1, &settings),
             ContainsSubstring("rules[3].budget is 25 tokens, but the cache was created for 24"));
  CHECK(cache.info(1).tokens == 40);
  rules[3] = {2, 2, 4, 0};
  CHECK_THAT(cache.start(1, &settings),
             ContainsSubstring("rules[3].budget is 2; it should be more than sinks, 2,"));
  settings.struct_size = 8;
  CHECK_THAT(cache.start(1, &settings), ContainsSubstring("struct_size is 8"));

  Cache tiers({.budget = 84, .tiers = {{KVLAB_FORMAT_16, 8}, {KVLAB_FORMAT_4, 76}}});
  settings.struct_size = sizeof settings;
  rules[3] = {24, 2, 8, 0};
  CHECK_THAT(tiers.start(0, &settings),
             ContainsSubstring("it should be equal, because the cache has tiers"));
}

TEST_CASE("An append for which there is not enough memory changes nothing") {
  Cache cache;
  CHECK(cache.append(0, 0, 10) == "");
  const std::size_t before = fake_cuda::allocated();
  fake_cuda::set_memory(before + 1000);
  kvlab_append_chunk chunk = cache.chunk(1, 0, 0, 900);
  CHECK_THAT(cache.append(chunk), ContainsSubstring("an append"));
  fake_cuda::set_memory(std::numeric_limits<std::size_t>::max());
  CHECK(cache.tokens() == Counts{10, 0, 0});
  CHECK(cache.append(1, 0, 900) == "");
}

TEST_CASE("With `longest`, appends whose layers take turns do not allocate") {
  // 422 tokens may be live in a layer that has the append, so both layers together would need 723.
  constexpr std::uint32_t kTokens = 300;
  Cache cache({.every = 400, .longest = 423});
  const std::size_t before = fake_cuda::allocated();
  for (int layer = 0; layer < kLayers; ++layer)
    for (int sequence = 0; sequence < kSequences; ++sequence)
      CHECK(cache.append(cache.chunk(sequence, layer, 0, kTokens)) == "");
  CHECK(cache.tokens() == Counts{kTokens, kTokens, kTokens});
  CHECK(fake_cuda::allocated() == before);
}

TEST_CASE("The maximum length of a sequence depends on its own budgets only") {
  // With 20 draft tokens, a budget of 995 tokens would need more than the 1,000 slots that `tokens`
  // gives a pair.
  Cache cache({.budget = 995, .draft_tokens = 20});
  const std::vector<kvlab_rule> rules(kLayers * kHeads, {12, 2, 4, 0});
  const kvlab_sequence_settings settings{.struct_size = sizeof settings, .rules = rules.data()};
  CHECK(cache.start(1, &settings) == "");
  CHECK(cache.append(1, 0, 900) == "");
  CHECK(cache.append(1, 900, 900) == "");
  CHECK(cache.append(0, 0, 900) == "");
  CHECK_THAT(cache.append(0, 900, 101), ContainsSubstring("has slots for at most 1000"));
}

TEST_CASE("A policy that never evicts is refused with a budget") {
  CHECK_THAT(Cache({.policy = "full"}).refusal(),
             ContainsSubstring("rules[0].budget is 24, but the policy never evicts"));
  Cache cache({.policy = "full", .budget = UINT32_MAX, .sinks = 0, .recent = 0});
  CHECK(cache.refusal() == "");
  CHECK(cache.append(0, 0, 40) == "");
  CHECK(cache.info(0).evictions == 0);
}

namespace {

/// A cache whose sequences have different seeds and ids, and the same slots.
kernels::KvCacheConfig config_of(bool quantized) {
  kernels::KvCacheConfig config{.type = KVLAB_BF16,
                                .query_heads = kQueryHeads,
                                .kv_heads = kHeads,
                                .head_size = kSize,
                                .layers = {{.number = 3}, {.number = 7}},
                                .ropes = {{.inv_freq = std::vector<float>(kSize / 2, 1.0f)}},
                                .kernels = kvlab_find_policy("h2o")->kernels};
  for (std::uint32_t s = 0; s < kSequences; ++s) config.sequences.push_back({.seed = s, .id = s});
  for (std::size_t pair = 0; pair < kPairs; ++pair) {
    kernels::SlotPair one{.budget = pair % kHeads == 0 ? 20u : 30u, .protected_tokens = {2, 8}};
    if (quantized) one.tiers = {{kKvFormats[0], one.budget - 10}, {kKvFormats[3], 10}};
    config.pairs.push_back(one);
  }
  config.features = {.count = 1, .features = {KVLAB_KEY_COSINE}};
  return config;
}

/// Elements [first, first + count) of an array.
template <class T>
std::vector<T> part(const T* array, std::int64_t first, std::int64_t count) {
  return {array + first, array + first + count};
}

}  // namespace

TEST_CASE("Drafts need sequences that evict in the same way") {
  kernels::KvCacheConfig config = config_of(false);
  config.draft_tokens = 4;
  CHECK_NOTHROW(kernels::KvCache(config, nullptr));
  config.sequences[1].modifiers.every = 4;
  CHECK_THROWS_WITH(kernels::KvCache(config, nullptr), ContainsSubstring("the same modifiers"));
}

TEST_CASE("Copying a sequence copies all its arrays") {
  const bool quantized = GENERATE(false, true);
  CAPTURE(quantized);
  kernels::KvCache cache(config_of(quantized), nullptr);
  const kernels::SlotStorage& storage = cache.storage();
  const kernels::PairSlots& slots = cache.slots();
  // Every slot gets different contents.
  const auto total = static_cast<std::size_t>(slots.total());
  std::iota(storage.positions, storage.positions + total, 100u);
  std::iota(storage.features, storage.features + total, 1.0f);
  for (std::size_t i = 0; i < total * cache.config().kernels.slot_bytes; ++i)
    storage.states[i] = static_cast<std::byte>(i * 7);
  std::iota(storage.lengths, storage.lengths + slots.all(), 5);
  std::iota(storage.next_slots, storage.next_slots + slots.all(), 6);
  std::iota(storage.unit_keys, storage.unit_keys + slots.all() * kSize, 0.5f);
  const kernels::TierLayout layout(cache.config(), slots);
  if (quantized) {
    for (std::int64_t i = 0; i < layout.bytes; ++i)
      storage.tiers.bytes[i] = static_cast<std::byte>(i * 13);
    std::iota(storage.tiers.row_of_slot, storage.tiers.row_of_slot + total, 0u);
    std::iota(storage.tiers.slot_of_row, storage.tiers.slot_of_row + layout.rows, 9u);
    std::iota(storage.tiers.counts, storage.tiers.counts + slots.all() * kernels::kMaxDeviceTiers,
              0);
    std::iota(storage.tiers.next_rows, storage.tiers.next_rows + slots.all(), 0u);
    std::iota(storage.tiers.extents, storage.tiers.extents + slots.all(), 2);
  } else {
    for (std::size_t i = 0; i < total * kSize * 2; ++i) {
      storage.keys[i] = static_cast<std::byte>(i * 3);
      storage.values[i] = static_cast<std::byte>(i * 5);
    }
  }
  const auto third_before =
      part(storage.positions, slots.range(1, 2).first, slots.range(1, 2).count);
  cache.copy_sequence(0, 1);

  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    const kernels::PairSlots::Range from = slots.range(layer, 0), to = slots.range(layer, 1);
    REQUIRE(from.count == 50);
    const auto same = [&](const auto* array, std::int64_t width) {
      CHECK(part(array, from.first * width, from.count * width) ==
            part(array, to.first * width, to.count * width));
    };
    same(storage.positions, 1);
    same(storage.features, 1);
    same(storage.states, static_cast<std::int64_t>(cache.config().kernels.slot_bytes));
    const auto pair = static_cast<std::int64_t>(layer * slots.pairs());
    const auto same_pairs = [&](const auto* array, std::int64_t width) {
      CHECK(part(array, pair * width, kHeads * width) ==
            part(array, (pair + kHeads) * width, kHeads * width));
    };
    same_pairs(storage.lengths, 1);
    same_pairs(storage.next_slots, 1);
    same_pairs(storage.unit_keys, kSize);
    if (quantized) {
      same(storage.tiers.row_of_slot, 1);
      same_pairs(storage.tiers.counts, kernels::kMaxDeviceTiers);
      same_pairs(storage.tiers.next_rows, 1);
      same_pairs(storage.tiers.extents, 1);
      for (std::int64_t head = 0; head < kHeads; ++head) {
        const kernels::TierRegion &a = layout.regions[static_cast<std::size_t>(pair + head)],
                                  &b = layout
                                           .regions[static_cast<std::size_t>(pair + kHeads + head)];
        CHECK(part(storage.tiers.bytes, a.first_byte, a.bytes) ==
              part(storage.tiers.bytes, b.first_byte, b.bytes));
        CHECK(part(storage.tiers.slot_of_row, a.first_row, a.rows) ==
              part(storage.tiers.slot_of_row, b.first_row, b.rows));
      }
    } else {
      same(storage.keys, kSize * 2);
      same(storage.values, kSize * 2);
    }
  }
  CHECK(storage.seeds[1] == 0);
  CHECK(storage.sequence_ids[1] == 0);
  CHECK(storage.seeds[2] == 2);
  CHECK(third_before == part(storage.positions, slots.range(1, 2).first, slots.range(1, 2).count));
}

/// Kernels read whole tiles of rows. A row with NaN that no token uses would make outputs NaN.
TEST_CASE("A sequence that starts has no rows of the sequence before it") {
  kernels::KvCache cache(config_of(true), nullptr);
  const kernels::TierLayout layout(cache.config(), cache.slots());
  std::byte* const bytes = cache.storage().tiers.bytes;
  const auto rows_are = [&](std::size_t pair, int byte) {
    const kernels::TierRegion& region = layout.regions[pair];
    return std::all_of(bytes + region.first_byte, bytes + region.first_byte + region.bytes,
                       [byte](std::byte b) { return b == static_cast<std::byte>(byte); });
  };
  for (std::size_t pair = 0; pair < kPairs; ++pair) CHECK(rows_are(pair, 0));
  std::fill_n(bytes, layout.bytes, std::byte{0xff});
  cache.start(1, {});
  for (std::size_t pair = 0; pair < kPairs; ++pair) {
    CAPTURE(pair);
    CHECK(rows_are(pair, pair / kHeads % kSequences == 1 ? 0 : 0xff));
  }
}
