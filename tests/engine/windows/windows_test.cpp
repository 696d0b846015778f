// Tests that layers with a sliding window keep exactly that window, and that policies evict in the
// other layers.
#include <memory>
#include <numeric>

#include "engine/capture.hpp"
#include "engine/decoder.hpp"
#include "tests/catch.hpp"
#include "tests/engine/plain_forward.hpp"
#include "tests/engine/windows/gemma_mini.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"

using namespace kvlab;
using test::gemma, test::kPrompt, test::kTokens, test::kWindow, test::window_ids;

namespace {

ResolvedConfig cache(const std::string& policy, std::uint32_t budget, Prefill prefill = {}) {
  CacheConfig config{.policy = parse_policy(policy), .budget = {.extent = tokens(budget)}};
  config.positions = config.policy.entry->info.positions;
  config.prefill = prefill;
  return resolve(config, kTokens, 0, gemma().config().heads());
}

struct Fed {
  std::unique_ptr<Decoder> decoder;
  std::vector<float> logits;
};

/// Runs a prompt and decoded tokens. Returns the decoder and the logits of all tokens.
Fed fed(const ResolvedConfig& config, unsigned threads = 1) {
  Fed run{std::make_unique<Decoder>(gemma(), config, threads), {}};
  const auto ids = window_ids();
  std::vector<float> decoded;
  run.decoder->feed(std::span(ids).first(kPrompt), SegmentKind::prompt, &run.logits);
  for (std::size_t i = kPrompt; i < kTokens; ++i) {
    run.decoder->feed(std::span(ids).subspan(i, 1), SegmentKind::decode, &decoded);
    run.logits.insert(run.logits.end(), decoded.begin(), decoded.end());
  }
  return run;
}

std::vector<std::uint32_t> live(const Fed& run, std::uint32_t layer) {
  const auto positions = run.decoder->live(layer, 1).positions();
  return {positions.begin(), positions.end()};
}

}  // namespace

TEST_CASE("A decoder with sliding windows equals a plain forward pass, for every prefill mode") {
  const Fed whole = fed({});
  CHECK(test::relative_error(whole.logits, test::plain_forward(gemma(), window_ids(), 1)) < 1e-5);
  for (const std::uint32_t chunk : {1u, 4u, kWindow, 29u})
    CHECK(fed(cache("full", kNoBudget, {chunk})).logits == whole.logits);
  CHECK(fed({}, 3).logits == whole.logits);
}

TEST_CASE("Layers with a sliding window keep it under any policy; the others keep the budget") {
  std::vector<std::uint32_t> window(kWindow);
  std::iota(window.begin(), window.end(), kTokens - kWindow);
  const Fed full = fed({});
  for (const char* policy : {"full", "window", "streaming_h2o", "h2o:scope=layer"})
    for (const Prefill prefill : {Prefill{0}, Prefill{7}, Prefill{1}}) {
      CAPTURE(policy, prefill.text());
      const Fed run = fed(cache(policy, 24, prefill));
      const bool evicts = std::string(policy) != "full";
      for (const std::uint32_t layer : {0u, 1u, 3u}) CHECK(live(run, layer) == window);
      CHECK(live(run, 2).size() == (evicts ? 24u : kTokens));
      CHECK(run.decoder->evictions() == (evicts ? 2 * (kTokens - 24) : 0u));
      CHECK((run.logits == full.logits) == !evicts);
    }
  CHECK(fed(cache("h2o", kTokens)).logits == full.logits);
}

TEST_CASE("Budgets by head are given only for layers without a sliding window") {
  CacheConfig config{.policy = parse_policy("h2o"), .budget = budget_of_heads({{20, 30}})};
  const ResolvedConfig own = resolve(config, kTokens, 0, gemma().config().heads());
  CHECK(own.requested_tokens == 25);
  const Fed run = fed(own);
  CHECK(run.decoder->kept() ==
        HeadBudgets{{kWindow, kWindow}, {kWindow, kWindow}, {20, 30}, {kWindow, kWindow}});
  config.budget = budget_of_heads({{20}, {20}, {20}, {20}});
  CHECK_THROWS_AS(resolve(config, kTokens, 0, gemma().config().heads()), std::invalid_argument);
}

TEST_CASE("A policy is refused if every layer has a sliding window") {
  CacheShape model = gemma().config().heads();
  model.windows = {4, 4, 4, 4};
  CHECK_NOTHROW(resolve({}, kTokens, 0, model));
  const CacheConfig h2o{.policy = parse_policy("h2o"), .budget = {.extent = tokens(24)}};
  CHECK(test::error_of<std::invalid_argument>([&] {
          resolve(h2o, kTokens, 0, model);
        }).find("every layer") != std::string::npos);
}

TEST_CASE("A capture records each layer's kind of attention, and verifies") {
  const test::TemporaryFolder folder;
  const auto ids = window_ids();
  for (const char* name : {"dense", "stream"}) {
    TraceWriter writer(folder / name, trace_header(gemma(), {}));
    Capture capture(writer);
    Decoder decoder(gemma(), cache("full", kNoBudget, {std::string(name) == "stream" ? 1u : 0u}),
                    1);
    decoder.watch(&capture);
    decoder.feed(std::span(ids).first(kPrompt), SegmentKind::prompt);
    decoder.feed(std::span(ids).subspan(kPrompt), SegmentKind::decode);
    writer.finish();
  }
  const TraceReader trace = TraceReader::open(folder / "dense");
  CHECK(trace.header().format() == 3);
  CHECK(trace.layers_with_window(false) == std::vector<std::uint32_t>{2});
  for (std::uint32_t layer = 0; layer < 4; ++layer) {
    const RowSpec &row = trace.row(layer), &own = gemma().config().rows[layer];
    CHECK((row.window == own.window && row.scale == own.scale && row.rope == own.rope));
  }
  // Gemma 3 applies a norm after attention, so an error of the attention output is not simply added
  // to the residual stream. Its traces therefore have no residuals.
  CHECK_FALSE(trace.has_residuals());
  const TraceCheck check = verify_trace(trace, 1);
  CHECK(check.ok);
  CHECK(check.worst_lse < 1e-5);
  CHECK(TraceReader::open(folder / "stream").shards().front().xxh3 == trace.shards().front().xxh3);
}
