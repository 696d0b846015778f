// Tests of plans of formats by layer: the knapsack, its losses, and the plan file.
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "sim/plan/centre_file.hpp"
#include "sim/plan/engine_options.hpp"
#include "sim/plan/format_plan.hpp"
#include "sim/plan/plan_traces.hpp"
#include "sim/replay.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using Catch::Matchers::ContainsSubstring;
using test::error_of;
using test::TemporaryFolder;

/// The lowest sum of losses of all choices of formats that take at most `bytes` bytes.
double min_loss(std::span<const PlanPart> parts, std::uint32_t bytes) {
  if (parts.empty()) return 0;
  double lowest = std::numeric_limits<double>::infinity();
  for (std::size_t f = 0; f < parts.front().losses.size(); ++f)
    if (parts.front().bytes[f] <= bytes)
      lowest = std::min(lowest, parts.front().losses[f] +
                                    min_loss(parts.subspan(1), bytes - parts.front().bytes[f]));
  return lowest;
}

TraceReader random_trace(const TemporaryFolder& folder, const char* name = "trace",
                         std::uint64_t seed = 1, std::uint32_t gradient_samples = 0) {
  return write_random_trace(folder.path() / name, {.query_heads = 4,
                                                   .kv_heads = 2,
                                                   .head_size = 32,
                                                   .spread = 3,
                                                   .gradient_samples = gradient_samples,
                                                   .seed = seed});
}

PlanRequest request_of(const char* budget, const char* formats = "kvlab") {
  return {.set = parse_format_set(formats), .bits = parse_plan_bits(budget)};
}

FormatPlan plan_of(const TraceReader& trace, const PlanRequest& request) {
  const TraceReader* const traces[] = {&trace};
  return plan_formats(traces, request);
}

double metric_of(const TraceReader& trace, const TierPlan& tier_plan, std::int32_t layer,
                 std::string_view metric = "residual_error") {
  CacheConfig config;
  config.policy.tier_plan = tier_plan;
  for (const Measurement& own : replay(trace, 0, std::span(&config, 1), {}).measurements)
    if (own.layer == layer && own.head < 0 && own.metric == metric) return own.value;
  return std::nan("");
}

TEST_CASE("the knapsack finds the choice with the least loss, at every size") {
  std::mt19937 rng(3);
  for (int round = 0; round < 30; ++round) {
    std::vector<PlanPart> parts(1 + rng() % 4);
    for (PlanPart& part : parts)
      for (int f = 0; f < 3; ++f) {
        part.losses.push_back(static_cast<double>(rng() % 100) / 8);
        part.bytes.push_back(1 + rng() % 7);
      }
    const FormatKnapsack knapsack(parts, 30);
    for (std::uint32_t bytes = 0; bytes <= 30; ++bytes) {
      const double lowest = min_loss(parts, bytes);
      REQUIRE(knapsack.fits(bytes) == std::isfinite(lowest));
      if (!std::isfinite(lowest)) continue;
      CHECK(knapsack.loss(bytes) == lowest);
      double sum = 0;
      std::uint32_t used = 0;
      const std::vector<std::size_t> formats = knapsack.formats(bytes);
      for (std::size_t p = 0; p < parts.size(); ++p)
        sum += parts[p].losses[formats[p]], used += parts[p].bytes[formats[p]];
      CHECK(sum == lowest);
      CHECK(used <= bytes);
    }
  }
}

TEST_CASE("losses equal those of a replay with only the keys or values of one layer quantized") {
  const TemporaryFolder folder;
  const TraceReader trace = random_trace(folder);
  const FormatPlan plan = plan_of(trace, request_of("5bits"));
  CHECK(plan.metric == "residual_error");
  REQUIRE(plan.layers == std::vector<std::uint32_t>{0, 1});
  REQUIRE(plan.formats.size() == 6);
  const std::size_t four = 3;
  CHECK(plan.formats[four]->name == "4");
  for (std::int32_t layer : {0, 1}) {
    const auto& own = plan.losses[static_cast<std::size_t>(layer)];
    CHECK(own[0][0] == 0);
    CHECK(own[0][four] == metric_of(trace, parse_tier_plan("4/16"), layer));
    CHECK(own[1][four] == metric_of(trace, parse_tier_plan("16/4"), layer));
    CHECK(own[0][4] > own[0][four]);  // the loss with 3 bits is higher
  }
}

TEST_CASE("a plan for a trace with gradients minimizes kl_estimate") {
  const TemporaryFolder folder;
  const TraceReader trace = random_trace(folder, "trace", 1, 3);
  const FormatPlan plan = plan_of(trace, request_of("5bits"));
  CHECK(plan.metric == "kl_estimate");
  CHECK(plan.losses[1][0][3] == metric_of(trace, parse_tier_plan("4/16"), 1, "kl_estimate"));
  CHECK(plan.plan.joint.value == metric_of(trace, plan.plan.tier_plan, -1, "kl_estimate_joint"));
  PlanRequest request = request_of("5bits");
  request.metric = "residual_error";
  CHECK(plan_of(trace, request).metric == "residual_error");
}

TEST_CASE("a plan fits its bits and is at least as good as one format for all layers") {
  const TemporaryFolder folder;
  const TraceReader trace = random_trace(folder);
  for (const char* budget : {"3bits", "4.5bits", "31.25%bytes", "9bits", "16bits"}) {
    INFO(budget);
    const FormatPlan plan = plan_of(trace, request_of(budget));
    CHECK(plan.plan.bits <= parse_plan_bits(budget));
    CHECK(plan.uniform.bits <= parse_plan_bits(budget));
    CHECK(plan.plan.added <= plan.uniform.added);
    CHECK(plan.plan.joint.value == metric_of(trace, plan.plan.tier_plan, -1));
    CHECK(parse_tier_plan(plan.plan.tier_plan.text()) == plan.plan.tier_plan);
    CHECK(!plan.uniform.tier_plan.is_by_layer());
    for (std::size_t i = 1; i < plan.frontier.size(); ++i)
      CHECK(plan.frontier[i].added < plan.frontier[i - 1].added);
  }
  CHECK(plan_of(trace, request_of("16bits")).plan.tier_plan.is_plain());
}

TEST_CASE("a plan for an engine uses only what the engine supports") {
  const TemporaryFolder folder;
  const TraceReader trace = random_trace(folder);
  const FormatPlan llama = plan_of(trace, request_of("6bits", "llama.cpp"));
  CHECK(!llama.plan.tier_plan.is_by_layer());
  CHECK(llama.plan.tier_plan == llama.uniform.tier_plan);
  const FormatPlan vllm = plan_of(trace, request_of("12bits", "vllm"));
  REQUIRE(vllm.plan.tier_plan.is_by_layer());
  for (const KvFormat& format : vllm.plan.tier_plan.layers) CHECK(format.key == format.value);
}

TEST_CASE("a plan for CUDA is the best of the formats that the kernels have") {
  const TemporaryFolder folder;
  const TraceReader trace = random_trace(folder);
  for (const double bits : {3.0, 3.5, 4.5, 6.0, 9.0}) {
    PlanRequest request = request_of("16bits", "cuda");
    request.bits = bits;
    const FormatPlan plan = plan_of(trace, request);
    REQUIRE(plan.layers.size() == 2);
    const auto loss = [&](std::size_t layer, const KvFormat& format) {
      const auto at = [&](const RowFormat* row) {
        return std::ranges::find(plan.formats, row) - plan.formats.begin();
      };
      return plan.losses[layer][0][at(format.key)] + plan.losses[layer][1][at(format.value)];
    };
    double lowest = std::numeric_limits<double>::infinity();
    for (std::size_t a = 0; a < kKernelFormats; ++a)
      for (std::size_t b = 0; b < kKernelFormats; ++b)
        if (kKvFormats[a].bits() + kKvFormats[b].bits() <= 2 * bits)
          lowest = std::min(lowest, loss(0, kKvFormats[a]) + loss(1, kKvFormats[b]));
    INFO(bits << " bits: " << plan.plan.tier_plan.text());
    CHECK(plan.plan.added == Approx(lowest));
    for (const KvFormat& format : plan.plan.tier_plan.formats()) CHECK(kernel_format(format));
    for (const KvFormat& format : plan.uniform.tier_plan.formats()) CHECK(kernel_format(format));
  }
}

TEST_CASE("losses that are not finite are refused") {
  const TemporaryFolder folder;
  const TraceReader trace = random_trace(folder);
  const PlanPart broken{.losses = {0, std::nan("")}, .bytes = {2, 1}};
  const FormatKnapsack knapsack(std::span(&broken, 1), 3);
  CHECK(!knapsack.fits(1));
  CHECK(knapsack.loss(3) == 0);
}

TEST_CASE("losses of several traces are means") {
  const TemporaryFolder folder;
  const TraceReader a = random_trace(folder, "a");
  const TraceReader b = random_trace(folder, "b", 9);
  const TraceReader* const both[] = {&a, &b};
  const PlanRequest request = request_of("5bits");
  const FormatPlan plan = plan_formats(both, request), first = plan_of(a, request),
                   second = plan_of(b, request);
  CHECK(plan.losses[1][0][3] == Approx((first.losses[1][0][3] + second.losses[1][0][3]) / 2));
}

TEST_CASE("a plan file contains the plan, and is read as a tier plan") {
  const TemporaryFolder folder;
  const TraceReader trace = random_trace(folder);
  const PlanRequest request = request_of("4.5bits");
  const FormatPlan plan = plan_of(trace, request);
  const std::string path = (folder / "plan.json").string();
  test::write_bytes(path, plan_text(plan, request, folder.path()));
  const PlanFile file = read_plan_file(path);
  CHECK(file.tier_plan == plan.plan.tier_plan);
  CHECK(file.layers == std::vector<std::uint32_t>{0, 1});
  CHECK(!file.has_windows);
  const nlohmann::json json = parse_json(plan_text(plan, request, folder.path()), "plan");
  CHECK(json.at("losses").size() == 2);
  CHECK(json.at("losses").at(1).at("keys").at("4") == plan.losses[1][0][3]);
  for (const auto& [text, why] : std::initializer_list<std::pair<const char*, const char*>>{
           {"{", "plan.json"},
           {R"({"format": 2})", "format"},
           {R"({"format": 1})", "tiers"},
           {R"({"format": 1, "tiers": "4", "layers": [-1]})", "layers"},
           {R"({"format": 1, "tiers": "4", "layers": []})", "layers"},
           {R"({"format": 1, "tiers": "4", "layers": [1, 1]})", "ascending"},
           {R"({"format": 1, "tiers": "16:50%,4:50%", "layers": [0]})", "one format"},
           {R"({"format": 1, "tiers": "kivi4", "layers": [0]})", "one format"},
           {R"({"format": 1, "tiers": "4x1-8x1", "layers": [0]})", "layers"},
           {R"({"format": 1, "tiers": "4", "layers": [0], "centre": "x"})", "plan.json: "},
           {R"({"format": 1, "tiers": "5"})", "plan.json: tiers '5'"}}) {
    test::write_bytes(path, text);
    CHECK_THAT(error_of<std::runtime_error>([&] { read_plan_file(path); }), ContainsSubstring(why));
  }
}

TEST_CASE("a plan for a centre file names it relative to its own folder") {
  const TemporaryFolder folder;
  const TraceReader trace = random_trace(folder);
  const TraceReader* const traces[] = {&trace};
  std::filesystem::create_directories(folder.path() / "plans");
  const std::string centre = (folder.path() / "c.safetensors").string(),
                    path = (folder.path() / "plans" / "plan.json").string();
  write_centre_file(centre, mean_centres(traces));
  PlanRequest request = request_of("4.5bits");
  request.centre = parse_key_centre("@" + centre);
  load_centre(request.centre);
  const FormatPlan plan = plan_of(trace, request);
  // The centre of this trace's own prompt equals that of the file, so the losses are the same.
  PlanRequest of_prompt = request_of("4.5bits");
  of_prompt.centre = KeyCentre::prompt;
  CHECK(plan.losses == plan_of(trace, of_prompt).losses);
  CHECK(plan.losses != plan_of(trace, request_of("4.5bits")).losses);

  const std::string text = plan_text(plan, request, folder.path() / "plans");
  CHECK(parse_json(text, "plan").at("centre") == "@../c.safetensors");
  test::write_bytes(path, text);
  const CentreSetting read = read_plan_file(path).centre;
  CHECK(read.kind == KeyCentre::constants);
  CHECK(std::filesystem::equivalent(read.file, centre));
  CHECK(!read.constants);
}

TEST_CASE("formats of llama.cpp are rotated if the head size is a multiple of 64") {
  const auto names = [](const char* set, std::uint32_t head_size) {
    std::vector<std::string> found;
    for (const RowFormat* format : row_formats(parse_format_set(set), head_size))
      found.emplace_back(format->name);
    return found;
  };
  const std::vector<std::string> rotated{"16",       "q8_0_rot", "q5_1_rot",
                                         "q5_0_rot", "q4_1_rot", "q4_0_rot"};
  CHECK(names("llama.cpp", 64) == rotated);
  CHECK(names("llama.cpp", 192) == rotated);
  CHECK(names("llama.cpp", 96) ==
        std::vector<std::string>{"16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"});
  CHECK(names("q4_0,q8_0_rot", 64) == std::vector<std::string>{"q8_0_rot", "q4_0"});
}

TEST_CASE("a plan is written as the options of an engine") {
  const auto options = [](const char* tiers, const char* engine, bool has_windows = false) {
    return engine_options({parse_tier_plan(tiers), KeyCentre::none, {0, 1, 5, 7}, has_windows},
                          engine);
  };
  CHECK(options("16", "vllm") == "--kv-cache-dtype auto");
  CHECK(options("fp8_e4m3", "vllm") == "--kv-cache-dtype fp8_e4m3");
  CHECK(options("16x1-fp8_e4m3x2-16x1", "vllm") ==
        "--kv-cache-dtype fp8_e4m3 --kv-cache-dtype-skip-layers 0 7");
  CHECK(options("nvfp4", "vllm", true) ==
        "--kv-cache-dtype nvfp4 --kv-cache-dtype-skip-layers sliding_window");
  CHECK(options("q8_0_rot/q4_0_rot", "llama.cpp") ==
        "--flash-attn on --cache-type-k q8_0 --cache-type-v q4_0");
  CHECK(options("16/q4_1_rot", "llama.cpp") ==
        "--flash-attn on --cache-type-k f16 --cache-type-v q4_1");
  CHECK(options("q5_1x4", "llama.cpp") ==
        "# environment: LLAMA_ATTN_ROT_DISABLE=1\n"
        "--flash-attn on --cache-type-k q5_1 --cache-type-v q5_1");
  CHECK(options("fp8_e4m3", "tensorrt-llm") == "kv_cache_config:\n  dtype: fp8");
  CHECK(options("16", "transformers") == "DynamicCache(config=model.config)");
  CHECK(options("int2_g64", "transformers") ==
        "QuantizedCache(\"quanto\", model.config, nbits=2, axis_key=0, axis_value=0, "
        "q_group_size=64)");
  CHECK(options("16", "tensorrt-llm") == "kv_cache_config:\n  dtype: auto");
}

TEST_CASE("a plan that an engine cannot express is refused by name") {
  for (const auto& [tiers, engine, why] :
       std::initializer_list<std::tuple<const char*, const char*, const char*>>{
           {"4", "vllm", "vllm does not have the format 4"},
           {"fp8_e4m3/nvfp4", "vllm", "one format for keys and values, not fp8_e4m3/nvfp4"},
           {"fp8_e4m3x2-nvfp4x2", "vllm", "one format besides 16 bit, not fp8_e4m3 and nvfp4"},
           {"q8_0x1-q4_0x3", "llama.cpp", "the same formats in all layers, not q8_0 and q4_0"},
           {"8", "llama.cpp", "llama.cpp does not have the format 8"},
           {"q8_0_rot/q4_0", "llama.cpp", "rotates both keys and values, or neither"},
           {"16x1-fp8_e4m3x3", "tensorrt-llm", "the same formats in all layers"},
           {"q4_0", "tensorrt-llm", "does not have the format q4_0"},
           {"8", "transformers", "does not have the format 8"},
           {"int4_g64x1-16x3", "transformers", "the same formats in all layers"},
           {"16", "sglang", "should be one of vllm, llama.cpp, tensorrt-llm, transformers"}}) {
    INFO(tiers << " " << engine);
    const PlanFile plan{parse_tier_plan(tiers), KeyCentre::none, {0, 1, 5, 7}};
    CHECK_THAT(error_of<std::invalid_argument>([&] { engine_options(plan, engine); }),
               ContainsSubstring(why));
  }
  const PlanFile windows{parse_tier_plan("q8_0"), KeyCentre::none, {0}, true},
      centred{parse_tier_plan("fp8_e4m3"), KeyCentre::prompt, {0}};
  CHECK_THAT(error_of<std::invalid_argument>([&] { engine_options(windows, "llama.cpp"); }),
             ContainsSubstring("sliding window"));
  CHECK_THAT(error_of<std::invalid_argument>([&] { engine_options(centred, "vllm"); }),
             ContainsSubstring("does not centre keys"));
}

TEST_CASE("requests that cannot be planned are refused") {
  const auto refusal = [](auto call) { return error_of<std::invalid_argument>(call); };
  for (const char* text :
       {"", "4", "bits", "0bits", "-1bits", "17bits", "nanbits", "101%bytes", "4%"})
    CHECK_THAT(refusal([&] { parse_plan_bits(text); }),
               ContainsSubstring("should be a mean per element"));
  CHECK(parse_plan_bits("25%bytes") == 4);
  for (const char* text : {"", "5", "4,", "4,4", "kivi4", "16,8,llama.cpp"})
    CHECK_THAT(refusal([&] { parse_format_set(text); }),
               ContainsSubstring("should be one of kvlab, cuda, vllm, llama.cpp, tensorrt-llm"));
  const TemporaryFolder folder;
  const TraceReader trace = random_trace(folder);
  CHECK_THAT(refusal([&] { plan_of(trace, request_of("2bits")); }),
             ContainsSubstring("the smallest of these formats take 3 bits"));
  PlanRequest request = request_of("5bits");
  request.metric = "kl_estimate";
  CHECK_THAT(refusal([&] { plan_of(trace, request); }), ContainsSubstring("no kl_estimate"));
  request.metric = "recall";
  CHECK_THAT(refusal([&] { plan_of(trace, request); }), ContainsSubstring("should be one of"));
  const TraceReader narrow = write_random_trace(folder.path() / "narrow", {});
  CHECK_THAT(refusal([&] { plan_of(narrow, request_of("5bits")); }),
             ContainsSubstring("a multiple of 32"));
  const TraceReader* const differ[] = {&trace, &narrow};
  CHECK_THAT(refusal([&] { plan_formats(differ, request_of("5bits")); }),
             ContainsSubstring("different models"));
}

}  // namespace
}  // namespace kvlab
