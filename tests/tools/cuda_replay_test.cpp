// Compares the replay on a device with the plain replay on the CPU.
#include "sim/device/cuda_replay.hpp"

#include <cstdlib>
#include <map>
#include <tuple>

#include "engine/backend.hpp"
#include "kernels/host/memory.hpp"
#include "kernels/loaded_code.hpp"
#include "sim/metrics.hpp"
#include "sim/source/policy_source.hpp"
#include "tests/catch.hpp"
#include "tests/sim/differential.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/skip.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

constexpr auto kPrompt = SegmentKind::prompt, kDecode = SegmentKind::decode;
constexpr double kTolerance = 1e-4;

/// Options that use all cores. Most of the time is needed to compile the kernels that walk through
/// a replay, two to three seconds for each kernel.
ReplayOptions options_for(Queries queries) {
  return {.queries = queries, .plain = true, .threads = default_threads()};
}

/// The traces of group_shapes(), and one with several hundred tokens and two turns.
std::vector<RandomTrace> shapes() {
  std::vector<RandomTrace> all = group_shapes();
  all.push_back(
      {.layers = 1,
       .query_heads = 4,
       .kv_heads = 1,
       .head_size = 16,
       .segments = {{0, 130, kPrompt}, {130, 250, kDecode}, {380, 7, kPrompt}, {387, 90, kDecode}},
       .seed = 8});
  return all;
}

using KeptSets =
    std::map<std::pair<std::size_t, std::size_t>, Sets>;  ///< by head task and configuration
/// A device replayer that records the kept sets.
auto keeping(KeptSets& kept, const TraceReader& trace) {
  return cuda_replayer(
      [&kept, tokens = trace.tokens()](auto task, auto config, auto query, auto live) {
        Sets& sets = kept[{task, config}];
        sets.resize(tokens);
        sets[query] = {live.begin(), live.end()};
      });
}

/// Compares the metrics and kept sets of a device with those of the plain replay, for both kinds of
/// measured queries.
void check_measures(const RandomTrace& wanted) {
  for (const Queries queries : {Queries::decode, Queries::all}) {
    const test::TemporaryFolder folder;
    RandomTrace own = wanted;
    own.gradients_of = queries;
    const TraceReader trace = write_random_trace(folder / "trace", own);
    std::vector<Case> cases;
    for (Case& c : whole_sweep(trace.tokens())) cases.push_back(std::move(c));
    const auto configs = replay_configs(cases);
    KeptSets kept;
    const auto device = keeping(kept, trace);
    ReplayOptions options = options_for(queries);
    options.every_output_error = queries == Queries::all;
    const ReplayResult here = replay(trace, kSequence, configs, options);
    options.elsewhere = device.get();
    const ReplayResult there = replay(trace, kSequence, configs, options);
    check_measured(there, here, kTolerance, [&](std::size_t c) { return cases[c].text; });
    const ReplayResult again = replay(trace, kSequence, configs, options);
    for (std::size_t i = 0; i < again.measurements.size(); ++i)
      REQUIRE(again.measurements[i].value == there.measurements[i].value);

    options.elsewhere = nullptr;
    std::size_t taken = 0;
    for (const Case& c : cases) {
      if (!device->takes(trace, c.replay)) continue;
      INFO(c.text);
      check_sets(kept[{0, taken++}], every_set(trace, kSequence, c.replay, options, 0, 0));
    }
  }
}

TEST_CASE("a device gives the plain replay's metrics and kept sets: single query heads", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  check_measures(shapes()[0]);
}

TEST_CASE("a device gives the plain replay's metrics and kept sets: groups of three", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  check_measures(shapes()[1]);
}

TEST_CASE("a device gives the plain replay's metrics and kept sets: groups of seven", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  check_measures(shapes()[2]);
}

TEST_CASE("a device gives the plain replay's metrics and kept sets: further shapes", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  const std::vector<RandomTrace> all = shapes();
  for (const RandomTrace& wanted : std::span(all).subspan(3)) check_measures(wanted);
}

TEST_CASE("a device replays layers that differ in rotation and scale, by their layer numbers",
          "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  const test::TemporaryFolder folder;
  RandomTrace wanted{.layers = 4, .gradient_samples = 0, .numbers = {1, 4, 6, 9}};
  for (std::uint32_t l = 0; l < 4; ++l) {
    wanted.rows.push_back({.window = l == 2 ? 9u : 0, .table = l % 2, .scale = 0.2f + 0.05f * l});
    for (int i = 0; i < 8; ++i)
      wanted.rows[l].rope.inv_freq.push_back(l % 2 ? 0 : 1 / static_cast<float>(i + 1));
  }
  const TraceReader trace = write_random_trace(folder / "trace", wanted);
  std::vector<CacheConfig> sweep;
  for (const char* policy : {"h2o", "random", "window", "h2o:scope=layer"})
    for (const Positions positions : {Positions::original, Positions::cache})
      sweep.push_back({.policy = parse_policy(policy),
                       .budget = {.extent = tokens(11)},
                       .positions = positions});
  sweep.push_back(sweep[2]);
  sweep.back().budget = budget_of_heads({{5, 9}, {20, 3}, {7, 7}});
  const auto device = cuda_replayer();
  const TraceReader acted = trace.select_layers(trace.layers_with_window(false));
  for (const CacheConfig& config : sweep) REQUIRE(device->takes(acted, config));
  ReplayOptions options = options_for(ReplayOptions{}.queries);
  const ReplayResult here = replay(trace, kSequence, sweep, options);
  options.elsewhere = device.get();
  check_measured(replay(trace, kSequence, sweep, options), here, kTolerance,
                 [&](std::size_t c) { return sweep[c].policy.text(); });
  wanted.rows[3].softcap = 3;
  CHECK(!device->takes(write_random_trace(folder / "capped", wanted), sweep[0]));
}

/// Checks that a device gives the plain replay's metrics, and its kept sets at every query, for all
/// head tasks.
void check_same(const TraceReader& trace, const std::vector<CacheConfig>& sweep) {
  KeptSets kept;
  const auto device = keeping(kept, trace);
  const auto text = [&](std::size_t c) { return test::text_of(sweep[c]); };
  for (const CacheConfig& config : sweep) REQUIRE(device->takes(trace, config));
  ReplayOptions options = options_for(Queries::all);
  const ReplayResult here = replay(trace, kSequence, sweep, options);
  options.elsewhere = device.get();
  check_measured(replay(trace, kSequence, sweep, options), here, kTolerance, text);
  options.elsewhere = nullptr;
  const ModelShape& shape = trace.shape();
  for (std::size_t c = 0; c < sweep.size(); ++c)
    for (std::uint32_t task = 0; task < shape.layers * shape.kv_heads; ++task) {
      INFO(text(c) << " head task " << task);
      check_sets(kept[{task, c}], every_set(trace, kSequence, sweep[c], options,
                                            task / shape.kv_heads, task % shape.kv_heads));
    }
}

/// Compares all policies. One policy of each kind (by what it observes and by its modifiers) is
/// compared on all shapes. The others are compared on one shape each, because the code of a
/// policy's hooks is the same for all shapes. With KVLAB_EVERY in the environment, all policies run
/// on all shapes.
void check_policies(const RandomTrace& wanted, std::size_t shape) {
  constexpr std::size_t shapes = 3;
  std::vector<std::string> policies{"feature:name=drawn",
                                    "feature:name=key_cosine:keep=-1",
                                    "keydiff:sinks=2:recent=5",
                                    "lru:sinks=2",
                                    "vatp:every=7",
                                    "knorm:once:smooth=2",
                                    "h2o:every=500",
                                    "criticalkv:every=9:smooth=1000",
                                    "random"};
  std::size_t number = 0;
  for (const PolicyEntry& entry : policy_catalogue())
    if (entry.info.evicts && (number++ % shapes == shape || std::getenv("KVLAB_EVERY")))
      policies.push_back(entry.info.name);
  const test::TemporaryFolder folder;
  const TraceReader trace = write_with_features(folder / "trace", wanted);
  check_same(trace, configs_of({.policies = policies}, &kCudaReplay, trace, 37));
}

TEST_CASE("a device keeps the plain replay's sets for every configuration: groups of heads",
          "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  check_policies(shapes()[1], 0);
}

TEST_CASE("a device keeps the plain replay's sets for every configuration: one KV head", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  check_policies(shapes()[2], 1);
}

TEST_CASE("a device keeps the plain replay's sets for every configuration: two turns", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  check_policies({.layers = 3,
                  .segments = {{0, 40, kPrompt}, {40, 80, kDecode}, {120, 20, kPrompt}},
                  .passages = {{"early", 10, 9}},
                  .seed = 12},
                 2);
}

/// Traces whose head sizes are multiples of a block of channels. They have query groups of 1, 3, 7
/// and 4 heads, every rounding, and two turns. In one, all exponentials of a row are 0 if the heavy
/// tokens are evicted.
std::vector<RandomTrace> quantized_shapes() {
  return {
      {.query_heads = 2,
       .kv_heads = 2,
       .head_size = 64,
       .segments = {{0, 40, kPrompt}, {40, 60, kDecode}, {100, 17, kPrompt}, {117, 30, kDecode}},
       .gradients_of = Queries::all,
       .passages = {{"early", 20, 5}},
       .seed = 21},
      {.layers = 3,
       .query_heads = 6,
       .kv_heads = 2,
       .head_size = 32,
       .dtype = Dtype::bf16,
       .rounding = Rounding::model_dtype,
       .gradient_samples = 5,
       .gradients_of = Queries::all,
       .seed = 22},
      {.layers = 1,
       .query_heads = 7,
       .kv_heads = 1,
       .head_size = 160,
       .dtype = Dtype::f16,
       .rounding = Rounding::model_dtype,
       .gradients_of = Queries::all,
       .seed = 23},
      {.layers = 1,
       .kv_heads = 1,
       .head_size = 32,
       .pull = 90,
       .gradients_of = Queries::all,
       .seed = 24}};
}

void check_tiers(const RandomTrace& wanted) {
  const test::TemporaryFolder folder;
  const TraceReader trace = write_with_features(folder / "trace", wanted);
  auto sweep = configs_of({.policies = {"h2o", "lru:sinks=2", "window", "a2sf:sinks=1:recent=3",
                                        "snapkv:recent=4", "vatp", "random"},
                           .tier_plans = {"", "4", "fp8", "16@50%+16@50%", "16@5t+4@100%",
                                          "8@25%+4@50%+k4v2@25%", "16@2t+8@30%+8@30%+2@40%"},
                           .positions = {Positions::original}},
                          &kCudaReplay, trace, 37);
  for (const char* policy : {"full:tiers=8", "h2o:every=500:tiers=4"})
    sweep.push_back({.policy = parse_policy(policy), .budget = parse_budget("30")});
  check_same(trace, sweep);
}

TEST_CASE("a device keeps tokens on tiers as the plain replay does: single query heads", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  check_tiers(quantized_shapes()[0]);
}

TEST_CASE("a device keeps tokens on tiers as the plain replay does: bf16", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  check_tiers(quantized_shapes()[1]);
}

TEST_CASE("a device keeps tokens on tiers as the plain replay does: fp16, large heads", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  check_tiers(quantized_shapes()[2]);
}

TEST_CASE("a device keeps tokens on tiers as the plain replay does: heavy tokens", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  check_tiers(quantized_shapes()[3]);
}

TEST_CASE("on a device, equal tiers give the results of one tier", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  {  // Fills the device's memory with -1.5. With such numbers, sorting once never ended, because it
     // read recalls of an fp16 copy that are never written.
    const cuda::DeviceBuffer garbage(std::size_t{1} << 30, "the test");
    cuda::check(cudaMemset(garbage.data(), 0xbf, garbage.bytes()), "the test");
  }
  const test::TemporaryFolder folder;
  const TraceReader trace = write_random_trace(folder / "trace", quantized_shapes()[1]);
  std::vector<CacheConfig> sweep;
  for (const char* policy : {"h2o", "lru:sinks=2", "random:every=6", "a2sf:smooth=1:scope=layer"})
    for (const char* tier_plan : {"16", "16@3t+16@30%+16@70%", "4", "4@50%+4@50%"})
      for (const char* budget : {"9", "17"})
        sweep.push_back({.policy = parse_policy(std::string(policy) + ":tiers=" + tier_plan),
                         .budget = parse_budget(budget)});
  KeptSets kept;
  const auto device = keeping(kept, trace);
  const ReplayResult result =
      replay(trace, 0, sweep, {.elsewhere = device.get(), .threads = default_threads()});
  std::map<std::tuple<std::size_t, std::int32_t, std::int32_t, std::string>, double> metrics;
  for (const Measurement& m : result.measurements)
    metrics[{m.config, m.layer, m.head, m.metric}] = m.value;
  for (const auto& [at, value] : metrics) {
    const auto& [config, layer, head, metric] = at;
    if (config % 4 < 2 || metric == "quantization_error")
      continue;  // a configuration with one tier
    INFO(sweep[config].policy.text() << " " << metric);
    CHECK(value == metrics.at({config - 2, layer, head, metric}));
  }
  for (std::size_t c = 0; c < sweep.size(); ++c)
    if (c % 4 >= 2) check_sets(kept[{0, c}], kept[{0, c - 2}]);
}

TEST_CASE("a device refuses heads that share slots", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  const test::TemporaryFolder folder;
  const TraceReader trace = write_random_trace(folder / "trace", {});
  CHECK(!cuda_replayer()->takes(
      trace, {.policy = parse_policy("h2o"), .budget = parse_budget("ada(24)")}));
}

TEST_CASE("a device supports one KV head of a layer whose caches evict together", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  const test::TemporaryFolder folder;
  const TraceReader trace = write_random_trace(folder / "trace", {});
  const std::vector<CacheConfig> sweep{
      {.policy = parse_policy("h2o:scope=layer"), .budget = {.extent = tokens(12)}}};
  const auto device = cuda_replayer();
  const ReplayOptions options{.elsewhere = device.get()};
  const ReplayJob job(trace, kSequence, sweep, options);
  const std::size_t last[] = {3}, all[] = {0, 1, 2, 3};
  const auto alone = job.run_together(last), together = job.run_together(all);
  REQUIRE(alone.size() == 1);
  CHECK(alone[0][0].stats.sums == together[3][0].stats.sums);
}

TEST_CASE("a device replays the sample trace as the CPU does", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  const auto trace =
      TraceReader::open(std::string(KVLAB_SOURCE_DIR) + "/traces/samples/tiny-story");
  std::vector<CacheConfig> sweep;
  for (const char* policy : {"lru", "window", "h2o", "sink", "streaming_h2o", "random", "full",
                             "lru:sinks=4:recent=50%"})
    for (const char* budget : {"5%", "20%", "60%", "pyramid(20%)", "ada(20%)"}) {
      CacheConfig config{.policy = parse_policy(policy), .budget = parse_budget(budget)};
      config.positions = config.policy.entry->info.positions;
      sweep.push_back(config);
    }
  const auto device = cuda_replayer();
  ReplayOptions options{.queries = Queries::all, .threads = default_threads()};
  const ReplayResult here = replay(trace, 0, sweep, options);
  options.elsewhere = device.get();
  const auto text = [&](std::size_t c) {
    return sweep[c].policy.text() + " " + sweep[c].budget.text();
  };
  check_measured(replay(trace, 0, sweep, options), here, kTolerance, text);
}

/// The trace is in float32, because the kernel that computes the outputs then has a ring of only
/// two stages.
TEST_CASE("a device with 99 KB of shared memory replays as the CPU does", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  const kernels::SmallerGpu small(101'376);
  const test::TemporaryFolder folder;
  const TraceReader trace = write_random_trace(folder / "trace", shapes().back());
  std::vector<CacheConfig> sweep;
  for (const char* policy : {"lru", "h2o", "streaming_h2o"})
    for (const char* budget : {"20", "60%"}) {
      CacheConfig config{.policy = parse_policy(policy), .budget = parse_budget(budget)};
      config.positions = config.policy.entry->info.positions;
      sweep.push_back(config);
    }
  const auto device = cuda_replayer();
  for (const CacheConfig& config : sweep) REQUIRE(device->takes(trace, config));
  ReplayOptions options{.queries = Queries::all, .threads = default_threads()};
  const ReplayResult here = replay(trace, kSequence, sweep, options);
  options.elsewhere = device.get();
  check_measured(replay(trace, kSequence, sweep, options), here, kTolerance,
                 [&](std::size_t c) { return sweep[c].policy.text(); });
}

TEST_CASE("a device replays policies from sources as the CPU does, together with registered ones",
          "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  const std::string root = KVLAB_SOURCE_DIR;
  const auto trace = TraceReader::open(root + "/traces/samples/tiny-story");
  const test::TemporaryFolder folder;
  std::string own = test::read_bytes(root + "/policies/mass/h2o.hpp");
  own.replace(own.find("\"h2o\""), 5, "\"own_h2o\"");
  test::write_bytes(folder / "own_h2o.hpp", own);
  std::vector<CacheConfig> sweep;
  const auto add = [&](const PolicySpec& policy) {
    for (const char* budget : {"5%", "40%"})
      for (const Positions positions : {Positions::original, Positions::cache})
        sweep.push_back({.policy = policy, .budget = parse_budget(budget), .positions = positions});
  };
  const auto leaky = compile_policy_source(root + "/tests/policies/leaky.hpp");
  add(parse_policy("h2o"));
  add(parse_policy("own_h2o", {}, compile_policy_source(folder / "own_h2o.hpp")));
  add(parse_policy(leaky->info.name, {}, leaky));
  const auto device = cuda_replayer();
  for (const CacheConfig& config : sweep) CHECK(device->takes(trace, config));
  ReplayOptions options{.queries = Queries::all, .threads = default_threads()};
  const ReplayResult here = replay(trace, 0, sweep, options);
  options.elsewhere = device.get();
  check_measured(replay(trace, 0, sweep, options), here, kTolerance, [&](std::size_t c) {
    return sweep[c].policy.text() + " " + sweep[c].budget.text();
  });
}

}  // namespace
}  // namespace kvlab
