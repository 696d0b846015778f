// Compares the replay of layers with different kinds of attention with a reference in float64. Also
// tests that layers with a sliding window are left out.
#include <cmath>
#include <set>

#include "sim/access/full_attention.hpp"
#include "sim/replay.hpp"
#include "tests/catch.hpp"
#include "tests/sim/differential.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/traces/temporary_folder.hpp"

namespace kvlab {
namespace {

using Catch::Matchers::ContainsSubstring;
using test::TemporaryFolder;

Rope turning(double theta, std::uint32_t half, float factor = 1) {
  Rope rope{std::vector<float>(half), factor};
  for (std::uint32_t i = 0; theta > 0 && i < half; ++i)
    rope.inv_freq[i] = static_cast<float>(std::pow(theta, -static_cast<double>(i) / half));
  return rope;
}

/// Three layers: one with a soft cap, one with sinks and without rotation, and one with another
/// RoPE table and scale.
RandomTrace bent(std::uint32_t head_size) {
  const std::uint32_t half = head_size / 2;
  const float scale = 1 / std::sqrt(static_cast<float>(head_size));
  return {.layers = 3,
          .head_size = head_size,
          .segments = {{0, 30, SegmentKind::prompt}, {30, 50, SegmentKind::decode}},
          .gradients_of = Queries::all,
          .passages = {{"early", 3, 5}},
          .rows = {{.softcap = 3, .table = 0, .scale = scale, .rope = turning(1e4, half)},
                   {.table = 1,
                    .scale = scale,
                    .rope = turning(0, half),
                    .sinks = {4.0f, 0.0f, 6.0f, -30.0f}},
                   {.table = 2, .scale = 1.5f * scale, .rope = turning(100, half, 1.1f)}}};
}

/// Four layers of a ten-layer model, two of them with a sliding window.
RandomTrace windowed_trace() {
  const RowSpec plain{.table = 0, .scale = 0.25f, .rope = turning(1e4, 8)};
  RowSpec near{.window = 9, .table = 1, .scale = 0.25f, .rope = turning(100, 8)};
  near.sinks = {1, 0, 2, -1};
  return {.layers = 4,
          .residuals = false,
          .gradient_samples = 0,
          .rows = {near, plain, near, plain},
          .numbers = {1, 4, 6, 9}};
}

/// Writes a trace with some layers of `trace`, as if only these had been captured.
TraceReader copied(const TraceReader& trace, const std::filesystem::path& to,
                   const std::vector<std::uint32_t>& layers) {
  TraceHeader header = trace.header();
  header.shape.layers = static_cast<std::uint32_t>(layers.size());
  header.shape.numbers.clear();
  header.rows.clear();
  for (const std::uint32_t l : layers) {
    header.shape.numbers.push_back(trace.shape().number(l));
    header.rows.push_back(trace.row(l));
  }
  const std::size_t size = trace.shape().head_size, tokens = trace.tokens();
  const auto read = [&](Part part, std::uint32_t layer, std::uint32_t heads,
                        const Segment& segment) {
    std::vector<float> head(tokens * size), all(std::size_t{segment.tokens} * heads * size);
    for (std::uint32_t h = 0; h < heads; ++h) {
      trace.read(part, layer, h, 0, trace.tokens(), head.data());
      for (std::size_t t = 0; t < segment.tokens; ++t)
        std::copy_n(&head[(segment.start + t) * size], size, &all[(t * heads + h) * size]);
    }
    return all;
  };
  TraceWriter writer(to, header);
  for (const Segment& segment : trace.segments()) {
    writer.begin(std::vector<std::int32_t>(segment.tokens, 7), segment.kind, true);
    const std::vector<float> out(std::size_t{segment.tokens} * 4 * size);  // not verified
    for (std::uint32_t i = 0; i < layers.size(); ++i)
      writer.layer(i, read(Part::q, layers[i], 4, segment), read(Part::k, layers[i], 2, segment),
                   read(Part::v, layers[i], 2, segment), out, {});
    writer.end();
  }
  writer.finish();
  return TraceReader::open(to);
}

using Row = std::tuple<std::size_t, std::int32_t, std::int32_t, std::string, double>;

std::vector<Row> rows_of(const ReplayResult& result) {
  std::vector<Row> rows;
  for (const Measurement& m : result.measurements)
    rows.emplace_back(m.config, m.layer, m.head, m.metric, m.value);
  return rows;
}

}  // namespace

TEST_CASE(
    "replay agrees with the brute force for layers that differ in cap, sinks, table and "
    "scale") {
  const TemporaryFolder folder;
  const TraceReader trace = write_random_trace(folder / "trace", bent(16));
  REQUIRE(verify_trace(trace, 2).problems == std::vector<std::string>{});
  for (const bool plain : {false, true})
    check_agreement(trace, whole_sweep(trace.tokens()), {.plain = plain, .threads = 2}, 1e-5);
  check_agreement(trace, by_head_sweep(trace.shape(), trace.tokens()),
                  {.queries = Queries::all, .every_output_error = true, .threads = 2}, 1e-5);
}

TEST_CASE(
    "a trace with two RoPE tables gives the same results in configuration batches and plain") {
  const TemporaryFolder folder;
  RandomTrace wanted = bent(16);
  wanted.rows[0].softcap = 0;
  wanted.rows[1].sinks.clear();
  const TraceReader trace = write_random_trace(folder / "trace", wanted);
  const auto cases = whole_sweep(trace.tokens());
  for (const bool plain : {false, true})
    check_agreement(trace, cases, {.plain = plain, .threads = 2}, 1e-5);
}

TEST_CASE("a sink logit takes mass from the live tokens, and its share does not count as lost") {
  const TemporaryFolder folder;
  RandomTrace wanted = bent(16);
  wanted.rows[1].sinks = {20, 20, 20, 20};  // these take nearly all probability of every row
  const TraceReader trace = write_random_trace(folder / "trace", wanted);
  const ReplayOptions only{.layers = {1}};
  const CacheConfig config{.policy = parse_policy("window"), .budget = {.extent = tokens(2)}};
  for (const Measurement& m : replay(trace, 0, {&config, 1}, only).measurements) {
    if (m.metric == "recall") CHECK(m.value > 0.99);
    if (m.metric == "output_error") CHECK(m.value > 0.1);
  }
}

TEST_CASE("layers with a sliding window are left out, as if the trace did not contain them") {
  const TemporaryFolder folder;
  const TraceReader trace = write_random_trace(folder / "trace", windowed_trace());
  CHECK(trace.layers_with_window(true) == std::vector<std::uint32_t>{0, 2});
  const TraceReader without = copied(trace, folder / "without", {1, 3});
  std::vector<CacheConfig> sweep;
  for (const char* policy : {"h2o", "random", "lru:sinks=2", "h2o:scope=layer", "oracle_attention"})
    for (const char* budget : {"11", "pyramid(12)"})
      if (std::string_view(policy) != "h2o:scope=layer" || std::string_view(budget) == "11")
        sweep.push_back({.policy = parse_policy(policy, replay_oracles()),
                         .budget = parse_budget(budget),
                         .seed = 5});
  for (const bool plain : {false, true}) {
    const ReplayOptions options{.plain = plain, .threads = 2};
    const auto own = rows_of(replay(trace, 2, sweep, options));
    CHECK(own == rows_of(replay(without, 2, sweep, options)));
    std::set<std::int32_t> layers;
    for (const Row& row : own) layers.insert(std::get<1>(row));
    CHECK(layers == std::set<std::int32_t>{-1, 4, 9});
    const std::uint32_t queries[] = {50, 119};
    for (const CacheConfig& config : sweep) {
      const auto kept = kept_sets(trace, 2, config, options, 9, 1, queries),
                 alone = kept_sets(without, 2, config, options, 9, 1, queries);
      REQUIRE(kept.size() == 2);
      CHECK(kept[1].positions == alone[1].positions);
    }
  }
  ReplayOptions some{.layers = {9}};
  for (const Measurement& m : replay(trace, 2, sweep, some).measurements)
    CHECK((m.layer == 9 || m.layer == -1));
  for (const std::uint32_t layer : {0u, 1u, 5u}) {
    some.layers = {layer};
    CHECK_THROWS_WITH(replay(trace, 2, sweep, some),
                      ContainsSubstring("has layers 4, 9 without a window"));
  }
}

TEST_CASE("a trace with only sliding-window layers is refused in one line") {
  const TemporaryFolder folder;
  RandomTrace wanted = windowed_trace();
  for (RowSpec& row : wanted.rows) row.window = 5;
  wanted.rows[1].table = wanted.rows[3].table = 0;
  const TraceReader trace = write_random_trace(folder / "trace", wanted);
  CHECK(verify_trace(trace, 2).ok);
  const CacheConfig config{.policy = parse_policy("h2o"), .budget = {.extent = tokens(8)}};
  CHECK_THROWS_WITH(
      replay(trace, 0, {&config, 1}, {}),
      ContainsSubstring("every layer has a sliding window") && !ContainsSubstring("\n"));
}

TEST_CASE(
    "attention of a layer with a sliding window, and with sinks, agrees with the brute "
    "force") {
  const TemporaryFolder folder;
  const TraceReader trace = write_random_trace(folder / "trace", windowed_trace());
  const brute::Simulator exact(brute::load(trace));
  for (const std::uint32_t layer : {0u, 1u}) {
    FullAttention full(trace, layer, 1, 0.01);
    const auto p = full.probabilities(1, 0, trace.tokens());
    const brute::Matrix& wanted = exact.probabilities(layer, 3);
    double worst = 0;
    for (std::uint32_t t = 0; t < trace.tokens(); ++t)
      for (std::uint32_t j = 0; j <= t; ++j)
        worst = std::max(worst, std::abs(p[t * trace.tokens() + j] - wanted[t][j]));
    CHECK(worst < 1e-6);
    CHECK((p[100 * trace.tokens() + 91] == 0) == (layer == 0));
    CHECK(p[100 * trace.tokens() + 92] > 0);
  }
}

}  // namespace kvlab
