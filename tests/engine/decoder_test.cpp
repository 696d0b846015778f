#include "engine/decoder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "engine/sequence_decoder.hpp"
#include "tests/catch.hpp"
#include "tests/engine/llama_reference.hpp"

using namespace kvlab;

namespace {

const std::filesystem::path kTiny = KVLAB_SOURCE_DIR "/engine/models/tiny";

const Model& tiny() {
  static const Model model = Model::load(kTiny, 1);
  return model;
}

/// <s>, and then arbitrary ids.
std::vector<std::int32_t> some_ids(std::size_t count) {
  std::vector<std::int32_t> ids{0};
  for (std::uint32_t x = 1; ids.size() < count;) {
    x = x * 1664525u + 1013904223u;
    ids.push_back(static_cast<std::int32_t>(x >> 20));
  }
  return ids;
}

ResolvedConfig cache(const std::string& policy, std::uint32_t budget, Prefill prefill = {}) {
  ResolvedConfig options;
  options.policy = parse_policy(policy);
  options.budget_tokens = budget;
  options.positions = options.policy.entry->info.positions;
  options.prefill = prefill;
  return options;
}

/// The logits of every token of a conversation: two prompts, each followed by decoded tokens.
std::vector<float> conversation_logits(const ResolvedConfig& options, unsigned threads = 1) {
  const auto ids = some_ids(120);
  Decoder decoder(tiny(), options, threads);
  std::vector<float> all;
  const auto feed = [&](std::size_t first, std::size_t count, SegmentKind kind) {
    std::vector<float> logits;
    decoder.feed(std::span(ids).subspan(first, count), kind, &logits);
    all.insert(all.end(), logits.begin(), logits.end());
  };
  feed(0, 70, SegmentKind::prompt);
  feed(70, 15, SegmentKind::decode);
  feed(85, 20, SegmentKind::prompt);
  feed(105, 15, SegmentKind::decode);
  CHECK(decoder.tokens() == 120);
  return all;
}

/// Records every call.
class Recorder : public DecoderObserver {
 public:
  void begin_append(std::span<const std::int32_t> ids, std::uint32_t first, SegmentKind kind,
                    bool new_segment) override {
    log += fmt::format("a{}+{}{}{} ", first, ids.size(), kind == SegmentKind::prompt ? "p" : "d",
                       new_segment ? "!" : "");
  }
  void evicted(std::uint32_t layer, std::uint32_t kv_head, std::uint32_t now,
               std::span<const std::uint32_t> victims) override {
    if (layer == 0 && kv_head == 0)
      for (const std::uint32_t victim : victims) log += fmt::format("e{}@{} ", victim, now);
    calls += fmt::format("e{}{}", layer, kv_head);
  }
  void observed(std::uint32_t layer, std::uint32_t kv_head, const LiveTokens& live,
                std::span<const Observation> seen) override {
    sizes_agree = sizes_agree && seen.size() == live.size();
    calls += fmt::format("o{}{}", layer, kv_head);
  }
  void layer(std::uint32_t layer, std::span<const float>, std::span<const float>,
             std::span<const float>, std::span<const float>, std::span<const float>) override {
    calls += fmt::format("l{}", layer);
  }
  void end_append() override { calls += "."; }

  std::string log, calls;
  bool sizes_agree = true;
};

}  // namespace

TEST_CASE("The full cache's logits equal a plain forward pass in float64") {
  const auto ids = some_ids(48);
  const auto expected = llama_logits(kTiny, tiny().config(), ids);
  Decoder decoder(tiny(), {}, 1);
  std::vector<float> logits;
  decoder.feed(ids, SegmentKind::prompt, &logits);
  REQUIRE(logits.size() == expected.size());
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    error += std::pow(double{logits[i]} - expected[i], 2);
    norm += std::pow(expected[i], 2);
  }
  CHECK(std::sqrt(error / norm) < 1e-5);
}

TEST_CASE("With a budget for every token, every policy gives the bits of the full cache") {
  static const auto full = conversation_logits({});
  const std::string policy = GENERATE("window", "sink", "lru", "h2o", "streaming_h2o", "random");
  const Prefill prefill = GENERATE(Prefill{0}, Prefill{32}, Prefill{1});
  CAPTURE(policy, prefill.text());
  CHECK(conversation_logits(cache(policy, 120, prefill)) == full);
  CHECK(conversation_logits(cache(policy, 60, prefill)) != full);
}

TEST_CASE("Threads and append sizes do not change the bits of a full cache's logits", "[threads]") {
  const auto full = conversation_logits({});
  CHECK(conversation_logits({}, 3) == full);
  CHECK(conversation_logits(cache("full", kNoBudget, {1})) == full);
  CHECK(conversation_logits(cache("full", kNoBudget, {29})) == full);
}

TEST_CASE("Threads do not change what a policy keeps", "[threads]") {
  const std::string policy = GENERATE("lru", "streaming_h2o");
  CHECK(conversation_logits(cache(policy, 40), 3) == conversation_logits(cache(policy, 40), 1));
}

// A sequence that is too long is refused before its ids are read, so the ids need not exist.
TEST_CASE("A sequence ends before a sum of attention or a count of requests overflows") {
  const auto sum_of_ones = [](std::uint64_t group) {
    return static_cast<double>(longest_sequence(static_cast<std::uint32_t>(group)) * group);
  };
  for (const std::uint64_t group : {1, 2, 3, 4, 8, 71}) CHECK(sum_of_ones(group) < 4294967296.0);
  CHECK(longest_sequence(1) == 2147483647);

  Decoder decoder(tiny(), cache("h2o", 32), 1);
  const std::vector<std::int32_t> ids = some_ids(1);
  const std::uint32_t max_tokens =
      longest_sequence(tiny().config().query_heads / tiny().config().kv_heads);
  CHECK_THROWS_WITH(
      decoder.feed({ids.data(), std::size_t{max_tokens} + 1}, SegmentKind::prompt),
      fmt::format("decoder: a sequence has at most {} tokens; start a new one", max_tokens));
  CHECK(decoder.tokens() == 0);
}

TEST_CASE("A decoded query sees the tokens of its budget, and a dense prompt sees all its tokens") {
  Decoder decoder(tiny(), cache("h2o", 32), 1);
  const auto ids = some_ids(100);
  decoder.feed(std::span(ids).first(80), SegmentKind::prompt);
  CHECK(decoder.live(3, 1).size() == 80);
  CHECK(decoder.evictions() == 0);
  decoder.feed(std::span(ids).subspan(80), SegmentKind::decode);
  const std::uint64_t heads = 4 * 2;
  CHECK(decoder.live(3, 1).size() == 32);
  CHECK(decoder.evictions() == heads * (100 - 32));
  CHECK(decoder.kv_bytes_peak() == heads * 80 * 2 * 64 * sizeof(float));
}

TEST_CASE("Budgets may differ by layer and KV head") {
  ResolvedConfig options = cache("window", kNoBudget, {1});
  options.head_budgets = {{8, 9}, {10, 11}, {12, 13}, {14, 15}};
  Decoder decoder(tiny(), options, 1);
  decoder.feed(some_ids(30), SegmentKind::prompt);
  for (std::uint32_t i = 0; i < 8; ++i) CHECK(decoder.live(i / 2, i % 2).size() == 8 + i);
  CHECK(decoder.kept() == options.head_budgets);
  options.head_budgets.back().pop_back();
  CHECK_THROWS_AS(Decoder(tiny(), options, 1), std::invalid_argument);
}

TEST_CASE("An observer is called for every step in order") {
  const auto ids = some_ids(20);
  Decoder decoder(tiny(), cache("lru:sinks=1", 4, {3}), 1);
  Recorder recorder;
  decoder.watch(&recorder);
  decoder.feed(std::span(ids).first(5), SegmentKind::prompt);
  decoder.feed(std::span(ids).subspan(5, 2), SegmentKind::decode);
  decoder.feed(std::span(ids).subspan(7, 1), SegmentKind::prompt);
  const auto without_victims = [&] {
    std::string log;
    for (std::size_t i = 0; i < recorder.log.size();) {
      const std::size_t end = recorder.log.find(' ', i) + 1;
      if (recorder.log[i] == 'a') log += recorder.log.substr(i, end - i);
      i = end;
    }
    return log;
  }();
  CHECK(without_victims == "a0+3p! a3+2p a5+1d a6+1d a7+1p! ");
  CHECK(std::count(recorder.log.begin(), recorder.log.end(), 'e') == 0 + 0 + 2 + 1 + 1);
  std::string append;
  for (const char layer : {'0', '1', '2', '3'})
    for (const char* call : {"e_0", "e_1", "o_0", "o_1", "l_"})
      for (const char c : std::string(call)) append += c == '_' ? layer : c;
  append += ".";
  CHECK(recorder.calls == append + append + append + append + append);
  CHECK(recorder.sizes_agree);
}

TEST_CASE("A decoder refuses configurations that it cannot run") {
  CHECK_THROWS_AS(Decoder(tiny(), cache("sink", 4), 1), std::invalid_argument);
  const std::string_view oracles[] = {"oracle_attention"};
  ResolvedConfig reference;
  reference.policy = parse_policy("oracle_attention", oracles);
  CHECK_THROWS_AS(Decoder(tiny(), reference, 1), std::invalid_argument);
  Decoder decoder(tiny(), {}, 1);
  CHECK_THROWS_AS(decoder.feed({}, SegmentKind::prompt), std::invalid_argument);
  const std::int32_t unknown = 8192;
  CHECK_THROWS_AS(decoder.feed({&unknown, 1}, SegmentKind::prompt), std::out_of_range);
}
