// Tests of tier plans in the replay. Several equal tiers must give the results of one tier, and
// attention over quantized values must agree with a reference.
#include <cmath>
#include <map>
#include <numeric>
#include <string>

#include "sim/access/key_quantization.hpp"
#include "sim/cache/host_cache.hpp"
#include "sim/head_view.hpp"
#include "sim/live_counts.hpp"
#include "tests/catch.hpp"
#include "tests/sim/brute_force.hpp"
#include "tests/sim/differential.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/numeric/quantize.hpp"

namespace kvlab {
namespace {

using test::TemporaryFolder;

TraceReader random_trace(const TemporaryFolder& folder, std::uint32_t head_size = 32) {
  return write_random_trace(
      folder.path() / "trace",
      {.query_heads = 4, .kv_heads = 2, .head_size = head_size, .passages = {{"s", 3, 5}}});
}

using MetricValues = std::map<std::tuple<std::int32_t, std::int32_t, std::string>, double>;

MetricValues metric_values(const TraceReader& trace, const CacheConfig& config, bool plain = true) {
  MetricValues all;
  const ReplayOptions options{.every_output_error = true, .plain = plain};
  const ReplayResult result = replay(trace, 0, std::span(&config, 1), options);
  for (const Measurement& m : result.measurements) all[{m.layer, m.head, m.metric}] = m.value;
  return all;
}

CacheConfig config_of(const std::string& policy, const std::string& tier_plan, std::uint32_t budget,
                      Prefill prefill = {}) {
  return {.policy = parse_policy(policy + ":tiers=" + tier_plan),
          .budget = {.extent = tokens(budget)},
          .prefill = prefill};
}

using Rows = std::vector<brute::Vector>;

/// The mean output error of decoded queries, in float64 except for quantized values. `held(keys,
/// values)` takes a head's exact rotated keys and values. It returns a function that gives, for a
/// query's position, the keys and values that the query sees instead.
template <class Held>
double naive_error(const TraceReader& trace, Held held) {
  const brute::Sequence s = brute::load(trace);
  double sum = 0, count = 0;
  for (std::uint32_t l = 0; l < s.layers; ++l) {
    const brute::RopeAngles angles = brute::exact_angles(s, l);
    for (std::uint32_t h = 0; h < s.query_heads; ++h) {
      const Rows &k = s.k[l][h / s.group()], &v = s.v[l][h / s.group()];
      Rows exact;
      for (std::uint32_t i = 0; i < s.tokens; ++i) exact.push_back(brute::rotate(angles, k[i], i));
      auto held_for = held(exact, v);
      for (std::uint32_t t = s.segments[1].start; t < s.tokens; ++t) {
        const brute::Vector q = brute::rotate(angles, s.q[l][h][t], t);
        const auto output = [&](const Rows& keys, const Rows& values, std::size_t rows) {
          brute::Vector logits, sums(q.size());
          for (std::size_t i = 0; i < rows; ++i)
            logits.push_back(
                s.score(l, std::inner_product(q.begin(), q.end(), keys[i].begin(), 0.0)));
          const brute::Vector p = brute::softmax(logits, brute::sink_of(s.row(l), h));
          for (std::size_t i = 0; i < rows; ++i)
            for (std::size_t d = 0; d < q.size(); ++d) sums[d] += p[i] * values[i][d];
          return sums;
        };
        const auto [keys, values] = held_for(t);
        const brute::Vector own = output(keys, values, std::min<std::size_t>(keys.size(), t + 1)),
                            whole = output(exact, v, t + 1);
        double error = 0, size = 0;
        for (std::size_t d = 0; d < q.size(); ++d)
          error += (own[d] - whole[d]) * (own[d] - whole[d]), size += whole[d] * whole[d];
        sum += std::sqrt(error / size), ++count;
      }
    }
  }
  return sum / count;
}

/// The error of policy `window` after a dense prompt. The live tokens and their tiers are known,
/// because this policy keeps the newest tokens.
double naive_tier_plan_error(const TraceReader& trace, const std::vector<TierSlots>& tier_plan) {
  const auto quantize = [&](const brute::Vector& exact, std::size_t tier, bool key) {
    if (tier_plan[tier].format.exact()) return exact;
    std::vector<float> row(exact.begin(), exact.end());
    for (std::size_t r = 0; r <= tier; ++r)
      if (r == 0 || tier_plan[r].format != tier_plan[r - 1].format)
        quantize_row(row, key ? *tier_plan[r].format.key : *tier_plan[r].format.value,
                     key ? RowPart::key : RowPart::value);
    return brute::Vector(row.begin(), row.end());
  };
  return naive_error(trace, [&](const Rows& exact, const Rows& v) {
    return [&](std::uint32_t t) {
      std::pair<Rows, Rows> rows;
      std::uint32_t young = t + 1;  // starting with the youngest
      for (std::size_t tier = 0; tier < tier_plan.size(); ++tier)
        for (std::uint32_t left = tier_plan[tier].slots; left > 0 && young > 0; --left) {
          rows.first.push_back(quantize(exact[--young], tier, true));
          rows.second.push_back(quantize(v[young], tier, false));
        }
      return rows;
    };
  });
}

}  // namespace

TEST_CASE("equal tiers are one tier, bit for bit") {
  const TemporaryFolder folder;
  const TraceReader trace = random_trace(folder);
  const std::vector<std::pair<const char*, const char*>> pairs{{"16", "16@50%+16@50%"},
                                                               {"16", "16@3t+16@30%+16@70%"},
                                                               {"8", "8@50%+8@50%"},
                                                               {"4", "4@25%+4@75%"}};
  for (const char* policy :
       {"window", "lru:sinks=2", "h2o", "h2o:every=5", "a2sf:smooth=1:scope=layer",
        "snapkv:recent=4", "h2o:scope=layer:every=3", "random:every=6"})
    for (const auto& [one, several] : pairs)
      for (const std::uint32_t budget : {9u, 17u})
        for (const Prefill& prefill : {Prefill{}, parse_prefill("chunk:7")}) {
          INFO(policy << ", " << several << ", budget " << budget);
          const CacheConfig config = config_of(policy, several, budget, prefill);
          REQUIRE(metric_values(trace, config_of(policy, one, budget, prefill)) ==
                  metric_values(trace, config));
          REQUIRE(metric_values(trace, config, false) ==
                  metric_values(trace, config_of(policy, several, budget, prefill), false));
        }
}

void check_tier_plans(const TraceReader& trace, const std::vector<std::string>& tier_plans) {
  for (const std::string& tier_plan : tier_plans) {
    INFO(tier_plan);
    const CacheConfig config = config_of("window", tier_plan, 12);
    const ResolvedConfig resolved = resolve(config, trace.tokens());
    const double expected = naive_tier_plan_error(trace, resolved.tiers.at(resolved.budget_tokens));
    const double own = metric_values(trace, config).at({-1, -1, "output_error"});
    CHECK(own == Approx(expected).epsilon(1e-5));
  }
}

TEST_CASE("attention over quantized values agrees with float64") {
  const TemporaryFolder folder;
  check_tier_plans(random_trace(folder), {"16@50%+16@50%",
                                          "4",
                                          "fp8",
                                          "2",
                                          "k4v2",
                                          "16@5t+4@100%",
                                          "8@40%+4@30%+2@30%",
                                          "16@50%+fp8@50%",
                                          "3",
                                          "fp8_e4m3",
                                          "q8_0",
                                          "q5_1",
                                          "q5_0",
                                          "q4_1",
                                          "q4_0",
                                          "nvfp4",
                                          "16/4",
                                          "q8_0/q4_0",
                                          "8/nvfp4",
                                          "16@5t+q8_0/q5_1@50%+q4_0/2@50%"});
}

TEST_CASE("every format agrees with float64, in heads of 64 channels, which some formats need") {
  const TemporaryFolder folder;
  std::vector<std::string> tier_plans{"q8_0_rot/q4_1_rot", "16@5t+q8_0_rot@50%+4@50%"};
  for (const RowFormat& format : kRowFormats)
    if (!format.exact()) tier_plans.emplace_back(format.name);
  check_tier_plans(random_trace(folder, 64), tier_plans);
  const TemporaryFolder other;
  CHECK_THROWS_WITH(metric_values(random_trace(other), config_of("window", "q8_0_rot", 12)),
                    Catch::Matchers::ContainsSubstring("multiple of 64 channels, not 32"));
}

/// The error of KIVI with `bits` bits after a dense prompt.
double naive_kivi_error(const TraceReader& trace, int bits) {
  const auto quantize = [&](std::vector<double*> group) {
    double lowest = *group[0], highest = lowest;
    for (const double* x : group) lowest = std::min(lowest, *x), highest = std::max(highest, *x);
    const float levels = static_cast<float>((1 << bits) - 1),
                mn = round_to(Dtype::f16, static_cast<float>(lowest)),
                scale = round_to(Dtype::f16, static_cast<float>(highest - lowest) / levels);
    for (double* x : group)
      *x = std::rint(std::clamp((static_cast<float>(*x) - mn) / scale, 0.0f, levels)) * scale + mn;
  };
  return naive_error(trace, [&](Rows keys, Rows values) {
    // The cache before query t. Whenever there are 128 more keys, they are quantized in groups of
    // 32. A value is quantized when 128 newer values follow it.
    return [quantize, keys, values, quantized_keys = 0u,
            quantized_values = 0u](std::uint32_t t) mutable {
      for (std::uint32_t full = t - t % 128; quantized_keys < full; quantized_keys += 32)
        for (std::size_t d = 0; d < keys[0].size(); ++d) {
          std::vector<double*> group;
          for (std::uint32_t i = 0; i < 32; ++i) group.push_back(&keys[quantized_keys + i][d]);
          quantize(group);
        }
      for (; t - quantized_values > 128; ++quantized_values) {
        std::vector<double*> group;
        for (double& x : values[quantized_values]) group.push_back(&x);
        quantize(group);
      }
      return std::pair(keys, values);
    };
  });
}

TEST_CASE(
    "KIVI quantizes keys by channel when a window is full, values when the window has moved on, "
    "and keeps all tokens") {
  const TemporaryFolder folder;
  const TraceReader trace = write_random_trace(
      folder.path() / "trace",
      {.layers = 1,
       .query_heads = 2,
       .kv_heads = 1,
       .head_size = 32,
       .segments = {{0, 140, SegmentKind::prompt}, {140, 130, SegmentKind::decode}}});
  for (const int bits : {2, 4}) {
    const CacheConfig config{.policy = parse_policy("full:tiers=kivi" + std::to_string(bits))};
    const MetricValues own = metric_values(trace, config),
                       config_batches = metric_values(trace, config, false);
    CHECK(own.at({-1, -1, "output_error"}) == Approx(naive_kivi_error(trace, bits)).epsilon(1e-5));
    CHECK(own == config_batches);
    CHECK(own.at({-1, -1, "recall"}) == 1);
    // The last query before a window is full sees 128 keys and 129 values in 16 bits.
    const double quantized = 32 * bits / 8 + 4;
    CHECK(own.at({-1, -1, "kv_bytes_peak"}) ==
          std::max(256 * 64 + 64 + 0.0, 128 * (quantized + 64) + 127 * quantized + 129 * 64));
  }
  for (const char* policy : {"h2o:tiers=kivi2", "full:tiers=kivi4:sinks=4"})
    CHECK_THROWS_AS(resolve({.policy = parse_policy(policy)}, 300), std::invalid_argument);
  CHECK_THROWS_WITH(parse_tier_plan("16:50%,kivi2:50%"),
                    "tiers '16:50%,kivi2:50%': kivi2 keeps all tokens in its own format; give it "
                    "alone, without other tiers");
}

TEST_CASE("KIVI's quantized values equal the authors' and transformers' quantized cache") {
  const std::string file = KVLAB_SOURCE_DIR "/tests/data/quantized_cache.json";
  const nlohmann::json theirs = parse_json(read_text_file(file, 1 << 20), file);
  constexpr std::size_t kDim = 32;
  for (const int bits : {2, 4}) {
    std::vector<float> keys;
    for (std::size_t i = 0; i < kQuantBlock * kDim; ++i)
      keys.push_back(static_cast<float>(
          std::sin(49.0 * static_cast<double>(i / kDim) + 14.0 * static_cast<double>(i % kDim)) *
          (0.1 + static_cast<double>(i % kDim) / 8)));
    std::vector<float> values = keys;
    quantize_by_channel(keys, kDim, bits);
    quantize_row(values, bits, false);
    // The authors' code rounds to fp16 at other points of the computation, so values may differ
    // slightly. The tolerance is less than one quantization step.
    for (const std::string whose : {"", "authors_"})
      for (std::size_t i = 0; i < 8; ++i)
        for (std::size_t j = 0; j < kDim; ++j) {
          const auto found = [&](const std::string& part, std::size_t row, std::size_t column) {
            return theirs[whose + part + std::to_string(bits)][row][column].get<float>();
          };
          CHECK(keys[j * kDim + i] == Approx(found("keys", j, i)).epsilon(2e-3).margin(5e-3));
          CHECK(values[i * kDim + j] == Approx(found("values", i, j)).epsilon(2e-3).margin(5e-3));
        }
  }
}

TEST_CASE("tiers share a budget to the byte, and 16-bit tokens take the same bytes") {
  const TemporaryFolder folder;
  const TraceReader trace = random_trace(folder);  // heads of size 32: 128 bytes per token
  const auto requested = [](const char* policy, const char* budget) {
    return CacheConfig{.policy = parse_policy(policy), .budget = parse_budget(budget)};
  };
  for (const char* policy : {"h2o", "h2o:tiers=4", "lru:tiers=16@5t+4@100%"})
    CHECK(metric_values(trace, requested(policy, "1536B")) ==
          metric_values(trace, requested(policy, "12")));
  const ResolvedConfig odd =
      resolve(requested("h2o:tiers=16@2t+4@100%", "1535B"), 64, 0, {1, 1, 32});
  REQUIRE(odd.tiers.at(odd.budget_tokens).size() == 2);
  CHECK(odd.tiers.at(odd.budget_tokens)[1].slots == (1535 - 2 * 128) / 40);
  const ResolvedConfig share = resolve(requested("h2o:tiers=4", "50%bytes"), 63, 0, {1, 1, 32});
  CHECK(share.budget_tokens == 63 * 128 / 2 / 40);
  CHECK(share.requested_tokens == 31);
}

TEST_CASE("bytes count 16-bit elements under every tier plan, for every data type of the trace") {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16}) {
    const TemporaryFolder folder;
    const TraceReader trace =
        write_random_trace(folder.path() / "trace",
                           {.query_heads = 4, .kv_heads = 2, .head_size = 32, .dtype = dtype});
    const auto bytes = [&](const char* tier_plan, const char* metric) {
      return metric_values(trace, config_of("window", tier_plan, 12)).at({-1, -1, metric});
    };
    const double budget = bytes("16", "budget_bytes");
    CHECK(bytes("16", "kv_bytes") == budget);
    CHECK(bytes("16@50%+16@50%", "kv_bytes") == budget);
    for (const char* tier_plan : {"16", "16@50%+16@50%", "16@50%+4@50%", "8", "4"}) {
      INFO(tier_plan);
      CHECK(bytes(tier_plan, "kv_bytes") == bytes(tier_plan, "kv_bytes_peak"));
      CHECK(bytes(tier_plan, "kv_bytes") <= budget);
      CHECK(bytes(tier_plan, "kv_bytes") > 0.8 * budget);
    }
  }
}

TEST_CASE("attention over quantized values uses the layer's table, scale, cap and sinks") {
  const TemporaryFolder folder;
  std::vector<RowSpec> rows(2);
  for (std::uint32_t l = 0; l < 2; ++l) {
    rows[l] = {.softcap = 2.0f * l, .table = l, .scale = l ? 0.1f : 0.3f};
    for (std::uint32_t i = 0; i < 16; ++i)
      rows[l].rope.inv_freq.push_back(l ? 0 : 1 / static_cast<float>(i + 1));
  }
  rows[1].sinks = {1, 0, 3, -2};
  const TraceReader trace = write_random_trace(
      folder.path() / "trace", {.query_heads = 4, .kv_heads = 2, .head_size = 32, .rows = rows});
  for (const char* tier_plan : {"4", "16@5t+4@100%"}) {
    const CacheConfig config = config_of("window", tier_plan, 12);
    const ResolvedConfig resolved = resolve(config, trace.tokens());
    const double expected = naive_tier_plan_error(trace, resolved.tiers.at(resolved.budget_tokens));
    CHECK(metric_values(trace, config).at({-1, -1, "output_error"}) ==
          Approx(expected).epsilon(1e-5));
  }
}

TEST_CASE("the quantization error is relative to the same tokens in 16 bits") {
  const TemporaryFolder folder;
  const TraceReader trace = random_trace(folder);
  for (const char* tier_plan : {"4", "16@5t+2@100%", "fp8@50%+4@50%"})
    for (const bool plain : {true, false}) {
      const CacheConfig config = config_of("window", tier_plan, 12);
      INFO(config.policy.text());
      const MetricValues quantized = metric_values(trace, config, plain);
      const std::uint32_t held = resolve(config, trace.tokens()).budget_tokens;
      const MetricValues exact = metric_values(
          trace, {.policy = parse_policy("window"), .budget = {.extent = tokens(held)}});
      for (const auto& [where, error] : exact) {
        auto [layer, head, metric] = where;
        CHECK(metric != "quantization_error");
        if (metric == "residual_error")
          CHECK(quantized.at({layer, head, "quantization_error"}) ==
                Approx(quantized.at(where) - error).margin(1e-6));
      }
      CHECK(std::abs(quantized.at({-1, -1, "quantization_error"})) > 1e-4);
    }
}

TEST_CASE("a full cache on one tier quantizes every decoded token") {
  const TemporaryFolder folder;
  const TraceReader trace = random_trace(folder);
  const MetricValues exact = metric_values(trace, {}),
                     quantized = metric_values(trace, {.policy = parse_policy("full:tiers=8")});
  CHECK(quantized.at({-1, -1, "recall"}) == 1);
  CHECK(exact.at({-1, -1, "output_error"}) == 0);
  CHECK(quantized.at({-1, -1, "output_error"}) > 0);
  CHECK(quantized.at({-1, -1, "output_error"}) < 0.02);
  CHECK(quantized.at({-1, -1, "quantization_error"}) ==
        Approx(quantized.at({-1, -1, "residual_error"})));
  CHECK(quantized.at({-1, -1, "kv_bytes_peak"}) == exact.at({-1, -1, "kv_bytes_peak"}) * 288 / 512);
}

TEST_CASE("with formats by layer, each layer equals that layer with its format everywhere") {
  const TemporaryFolder folder;
  const TraceReader trace = random_trace(folder);
  for (const bool plain : {true, false}) {
    const auto values = [&](const char* tier_plan) {
      return metric_values(trace, {.policy = parse_policy(tier_plan)}, plain);
    };
    const MetricValues mixed = values("full:tiers=8/4x1-2x1"), first = values("full:tiers=8/4"),
                       second = values("full:tiers=2");
    std::size_t compared = 0;
    for (const auto& [key, value] : mixed) {
      if (std::get<0>(key) < 0) continue;
      INFO(std::get<0>(key) << " " << std::get<2>(key));
      const double alone = (std::get<0>(key) == 0 ? first : second).at(key);
      CHECK((value == alone || (std::isnan(value) && std::isnan(alone))));
      ++compared;
    }
    CHECK(compared > 40);
    const auto sum = [](const MetricValues& all, const char* name, std::int32_t layer) {
      return all.at({layer, -1, name});
    };
    CHECK(sum(mixed, "residual_error", -1) ==
          Approx(sum(first, "residual_error", 0) + sum(second, "residual_error", 1)));
    CHECK(sum(mixed, "kv_bytes_peak", -1) ==
          sum(first, "kv_bytes_peak", 0) + sum(second, "kv_bytes_peak", 1));
  }
}

TEST_CASE("with formats by layer, a layer in 16 bit is exact") {
  const TemporaryFolder folder;
  const TraceReader trace = random_trace(folder);
  const MetricValues mixed = metric_values(trace, {.policy = parse_policy("full:tiers=16x1-4x1")});
  CHECK(mixed.at({0, -1, "output_error"}) == 0);
  CHECK(mixed.at({1, -1, "output_error"}) > 0);
  CHECK(mixed.at({-1, -1, "quantization_error"}) == mixed.at({1, -1, "quantization_error"}));
}

TEST_CASE("with formats by layer, a policy keeps the same number of tokens in each layer") {
  const TemporaryFolder folder;
  const TraceReader trace = random_trace(folder);
  // Per head, a token takes 128 bytes in 16 bit, 72 in 8 bits and 40 in 4 bits. The bytes of 12
  // tokens of 16 bit in both layers hold 2 * 12 * 128 / (72 + 40) tokens.
  for (const char* policy : {"h2o", "window:every=4"}) {
    const MetricValues mixed = metric_values(trace, config_of(policy, "8x1-4x1", 12));
    CHECK(mixed.at({0, -1, "live_max"}) == mixed.at({1, -1, "live_max"}));
    const double full_bytes = 12 * 2 * 2 * 128;  // two layers with two heads each
    CHECK(mixed.at({-1, -1, "budget_bytes"}) <= full_bytes);
    CHECK(mixed.at({-1, -1, "budget_bytes"}) > full_bytes * 0.9);
  }
}

TEST_CASE("a token's bytes are those of its tier's format") {
  const TemporaryFolder folder;
  const TraceReader trace = random_trace(folder);
  for (const char* policy : {"h2o", "h2o:once", "lru:every=6"})
    for (const char* tier_plan : {"4", "16@5t+4@100%", "8@40%+4@30%+2@30%"}) {
      INFO(policy << " " << tier_plan);
      ResolvedConfig config = resolve(config_of(policy, tier_plan, 11), trace.segments(), 0, {});
      LiveSet live = config.live_set(0, 0);
      double held = 0, peak = 0, count = 0;
      std::uint64_t floats = 0;
      for (const Append& append : config.appends) {
        live.evict_to_budget(append.first);
        live.append(append.first, append.tokens);
        std::uint64_t all = 0;
        for (std::uint32_t age = 0; age < live.size(); ++age)
          all += live.positions()[age] >= append.first + (append.tokens == 1) ||
                         live.format(age).exact()
                     ? 64 * 4
                     : live.format(age).block_bytes();
        floats = std::max(floats, all);
        live.observe(std::vector<Observation>(live.size()));
        if (append.ends_prompt) live.end_prompt();
        if (!append.decodes) continue;
        double own = 0;
        for (std::uint32_t age = 0; age < live.size(); ++age)
          own += live.format(age).block_bytes() / 128.0;
        held += own, peak = std::max(peak, own), ++count;
      }
      const LiveCounts counts = live_counts(config, 0, config.budget_tokens);
      CHECK(counts.held_mean == Approx(held / count));
      CHECK(counts.held_peak == peak);
      CHECK(counts.bytes_peak == floats);
      CHECK(counts.evictions == live.evictions());
    }
}

TEST_CASE("layers whose keys change too much in 4 bits are named") {
  const TemporaryFolder folder;
  const auto trace_of = [&](const char* name, double spread, std::uint32_t head_size) {
    return write_random_trace(folder.path() / name,
                              {.head_size = head_size, .spread = spread, .numbers = {3, 7}});
  };
  const TraceReader plain = trace_of("plain", 1.5, 32), longer = trace_of("longer", 60, 32);
  for (const double error : key_quantization_errors(plain)) CHECK((error > 0.01 && error < 1));
  CHECK(key_quantization_warning(plain).empty());
  for (const double error : key_quantization_errors(longer)) CHECK(error > 1);
  CHECK_THAT(key_quantization_warning(longer),
             Catch::Matchers::ContainsSubstring("in layers 3 (by ") &&
                 Catch::Matchers::ContainsSubstring(", 7 (by ") &&
                 Catch::Matchers::ContainsSubstring("(--tiers 8/4x2, on the CPU)"));
  CHECK(key_quantization_errors(trace_of("narrow", 60, 16)).empty());
}

TEST_CASE("options that tier plans do not support are refused") {
  const auto refuse = [](CacheConfig config, const char* why) {
    CHECK_THROWS_WITH(resolve(config, 64, 0, {2, 2}), Catch::Matchers::ContainsSubstring(why));
  };
  CacheConfig config = config_of("h2o", "4", 16);
  config.positions = Positions::cache;
  refuse(config, "original positions");
  config = config_of("h2o", "4", 16);
  config.budget = parse_budget("ada(16)");
  refuse(config, "an even budget");
  refuse({.policy = parse_policy("full:tiers=16@50%+4@50%")}, "one format");
  refuse({.policy = parse_policy("full:tiers=8x1-4x2")},
         "has 3 layers, but the model has 2 layers without a window");
  config = config_of("h2o", "8x1-4x1", 16);
  config.budget = parse_budget("pyramid(16)");
  refuse(config, "one budget for all heads");
  refuse(config_of("h2o", "16@1%+4@99%", 16), "too few for one token on its first tier");
  const TemporaryFolder folder;
  const TraceReader trace = write_random_trace(folder.path() / "trace", {});  // heads of size 16
  CHECK_THROWS_WITH(metric_values(trace, config_of("h2o", "4", 16)),
                    Catch::Matchers::ContainsSubstring("a multiple of 32"));
}

}  // namespace kvlab
