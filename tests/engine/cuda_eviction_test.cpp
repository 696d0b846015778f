// Compares the evicting caches of the CUDA decoder with those of the CPU decoder and with the
// simulator.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "engine/backend.hpp"
#include "engine/bench.hpp"
#include "engine/cuda/cache/evicting_cache.hpp"
#include "engine/cuda/cuda_sequence.hpp"
#include "engine/decoder.hpp"
#include "engine/evaluation/verify.hpp"
#include "tests/catch.hpp"
#include "tests/conformance.hpp"
#include "tests/engine/cuda_fixture.hpp"

using namespace kvlab;

namespace {

ResolvedConfig cache(PolicySpec policy, std::uint32_t budget, Prefill prefill,
                     Positions positions) {
  if (policy.centre == KeyCentre::constants)
    policy.centre.constants = test::some_centres(cpu_tiny().config().heads());
  return resolve({.policy = policy,
                  .budget = {.extent = tokens(budget)},
                  .prefill = prefill,
                  .positions = positions,
                  .seed = 11},
                 budget, 0, cpu_tiny().config().heads());
}
ResolvedConfig cache(const std::string& policy, std::uint32_t budget, Prefill prefill,
                     Positions positions) {
  return cache(parse_policy(policy), budget, prefill, positions);
}

/// The logits of every token of a conversation: a prompt, decoded tokens, and a second turn.
std::vector<float> conversation(SequenceDecoder& decoder) {
  std::vector<float> all, some;
  const auto feed = [&](const Ids& ids, SegmentKind kind) {
    decoder.feed(ids, kind, &some);
    all.insert(all.end(), some.begin(), some.end());
  };
  feed(some_ids(90), SegmentKind::prompt);
  feed(some_ids(60, 8192, 500), SegmentKind::decode);
  feed(some_ids(50, 8192, 900), SegmentKind::prompt);
  feed(some_ids(20, 8192, 1300), SegmentKind::decode);
  return all;
}

double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size() || b.empty()) return INFINITY;
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i])) return INFINITY;
    difference += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(difference / norm);
}

constexpr const char* kPolicies[]{"window", "sink", "lru", "h2o", "streaming_h2o", "random"};

}  // namespace

TEST_CASE("In float32, logits equal the CPU decoder's for every cache configuration", "[gpu]") {
  if (no_device()) return;
  const CacheShape heads = cpu_tiny().config().heads();
  const test::Choices choices{
      .policies = {"window", "sink", "lru", "h2o", "snapkv", "random"},
      .tier_plans = {"", "4", "8", "16@12t+4@100%", "fp8@50%+k4v2@50%", "16@9t+8@40%+4@1%+2@59%"},
      .budgets = test::budgets_about(48, heads),
      .prefills = {Prefill{0}, Prefill{32}, Prefill{1}, Prefill{89}}};
  std::vector<CacheConfig> configs = test::covering(choices, &kCudaDecoder, 220, heads);
  const std::string rest = "x" + std::to_string(heads.layers - 1);
  for (const std::string& tiers : {std::string("4"), "8x1-4/2" + rest, "16x1-4" + rest})
    for (const char* policy : {"full", "h2o"})
      configs.push_back(
          {.policy = parse_policy(policy + (":tiers=" + tiers)), .budget = {.extent = tokens(48)}});
  for (const CacheConfig& config : configs) {
    const ResolvedConfig options = resolve(config, 220, 0, heads);
    CudaSequence cuda(tiny(Dtype::f32), {.tokens = 220, .cache = options});
    Decoder cpu(cpu_tiny(), options, 2);
    INFO(test::text_of(config));
    // If two tokens have nearly equal ranks, CPU and GPU may evict different ones. Later rows then
    // differ by the effect of one token of 48. Also, a key that differs in its last bit may have
    // another quantized value.
    CHECK(relative_error(conversation(cuda), conversation(cpu)) <
          (options.policy.tier_plan.is_quantized() ? 1e-2 : 1e-3));
    CHECK(cuda.evictions() == cpu.evictions());
    CHECK(cuda.tokens() == 220);
  }
}

TEST_CASE("In float32, logits with centred keys equal the CPU decoder's", "[gpu]") {
  if (no_device()) return;
  const CacheShape heads = cpu_tiny().config().heads();
  // In this plan the first layer is in 16 bit, so its keys are not centred.
  const std::string by_layer = "h2o:tiers=16x1-4x" + std::to_string(heads.layers - 1);
  for (const char* policy :
       {"full:tiers=4", "h2o:tiers=8", "h2o:tiers=16@12t+4@100%",
        "lru:every=3:tiers=8@50%+k4v2@50%", "snapkv:tiers=fp8", by_layer.c_str()})
    for (const Prefill& prefill : {Prefill{}, Prefill{128}}) {
      INFO(policy << ", " << prefill.text());
      const auto run = [&](const std::string& text, auto check) {
        const ResolvedConfig options = cache(text, 48, prefill, Positions::original);
        CudaSequence cuda(tiny(Dtype::f32), {.tokens = 220, .cache = options});
        Decoder cpu(cpu_tiny(), options, 2);
        check(conversation(cuda), conversation(cpu), cuda.evictions() == cpu.evictions());
      };
      std::vector<float> plain;
      run(policy,
          [&](const std::vector<float>& cuda, const std::vector<float>&, bool) { plain = cuda; });
      for (const char* centre : {"prompt", "@c.safetensors"})
        run(std::string(policy) + ":centre=" + centre,
            [&](const std::vector<float>& cuda, const std::vector<float>& cpu, bool same) {
              CHECK(relative_error(cuda, cpu) < 1e-2);
              CHECK(same);
              CHECK(cuda != plain);
            });
    }
}

TEST_CASE("With a centre from a file, keys are centred from the first token on", "[gpu]") {
  if (no_device()) return;
  // For a prompt of one token, the mean of the prompt's keys cannot be used as a centre. The centre
  // of a file can.
  for (const Prefill& prefill : {Prefill{}, Prefill{1}}) {
    const auto logits = [&](auto&& decoder) {
      std::vector<float> all, some;
      for (const std::int32_t id : some_ids(40)) {
        decoder.feed({&id, 1}, all.empty() ? SegmentKind::prompt : SegmentKind::decode, &some);
        all.insert(all.end(), some.begin(), some.end());
      }
      return all;
    };
    const auto run = [&](const std::string& policy) {
      const ResolvedConfig options = cache(policy, 24, prefill, Positions::original);
      const std::vector<float> cuda =
          logits(CudaSequence(tiny(Dtype::f32), {.tokens = 40, .cache = options}));
      CHECK(relative_error(cuda, logits(Decoder(cpu_tiny(), options, 2))) < 1e-2);
      return cuda;
    };
    INFO(prefill.text());
    const std::vector<float> plain = run("full:tiers=4");
    if (prefill.chunk == 0) CHECK(run("full:tiers=4:centre=prompt") == plain);
    CHECK(run("full:tiers=4:centre=@c.safetensors") != plain);
    run("h2o:tiers=4:centre=@c.safetensors");
  }
}

TEST_CASE("Tiers take the bytes of their tier plan, padded to whole tiles", "[gpu]") {
  if (no_device()) return;
  const DeviceModel& model = tiny(Dtype::bf16);
  const ModelConfig& config = model.config();
  for (const char* policy : {"h2o:tiers=16@12t+4@100%", "lru:tiers=fp8@50%+k4v2@50%"}) {
    const std::vector caches{cache(policy, 48, {}, Positions::original)};
    const kernels::KvCacheConfig slots = slots_config(model, {.caches = caches});
    const kernels::TierLayout plan(slots, kernels::PairSlots(slots));
    std::int64_t expected = 0;
    for (const TierSlots& tier : caches[0].tiers.at(caches[0].budget_tokens))
      expected += std::int64_t{tier.slots} * tier.format.block_bytes();
    expected *= config.layers * config.kv_heads * (config.head_size / kQuantBlock);
    CHECK(plan.bytes - plan.padding == expected);
    CHECK(plan.rows % kernels::kRowsOfTile == 0);
  }
}

TEST_CASE("The CUDA decoder refuses a feature that it cannot compute", "[gpu]") {
  if (no_device()) return;
  CHECK_THROWS_WITH(
      CudaSequence(tiny(Dtype::f32),
                   {.tokens = 220, .cache = cache("lagkv", 48, {}, Positions::original)}),
      "policy lagkv: the CUDA decoder does not support its feature lagkv; --device cpu does");
}

TEST_CASE("A benchmark measures the configurations that run, and names the others", "[gpu]") {
  if (no_device()) return;
  const auto config = [](const std::string& policy) {
    return CacheConfig{.policy = parse_policy(policy), .budget = {.extent = tokens(48)}};
  };
  EvictBenchOptions how{.model = {.directory = kTiny, .random_weights = {}},
                        .configs = {config("lagkv"), config("h2o"), config("sink:sinks=64")},
                        .batch = 2,
                        .prompt = 96,
                        .decoded = 32};
  const auto found = bench_evict(how);
  CHECK(found["full"]["batch"] == 2);
  CHECK(found["largest_full"]["batch"] > 2);
  REQUIRE(found["configurations"].size() == 3);
  const auto &lagkv = found["configurations"][0], &h2o = found["configurations"][1];
  CHECK(lagkv["policy"] == how.configs[0].policy.text());
  CHECK(lagkv["budget_tokens"] == 48);
  CHECK(lagkv["refused"] ==
        "policy lagkv: the CUDA decoder does not support its feature lagkv; --device cpu does");
  CHECK(h2o["policy"] == how.configs[1].policy.text());
  CHECK(h2o["budget_tokens"] == 48);
  CHECK(h2o["evicting"]["batch"] == 2);
  CHECK(h2o["largest_evicting"]["tokens_per_second"] > 0);
  CHECK(h2o["time_ratio"] > 0);
  CHECK(h2o["throughput_ratio"] > 0);
  CHECK_FALSE(h2o.contains("refused"));
  CHECK(found["configurations"][2].contains("refused"));  // more protected tokens than the budget
  how.configs.erase(how.configs.begin() + 1);
  CHECK_THROWS_WITH(bench_evict(how), lagkv["refused"].get<std::string>());
}

TEST_CASE("Cache positions lose no precision with rotated keys", "[gpu]") {
  if (no_device()) return;
  for (const char* policy : {"window", "sink"}) {
    const auto error = [&](Positions positions) {
      const ResolvedConfig options = cache(policy, 48, Prefill{0}, positions);
      CudaSequence cuda(tiny(Dtype::bf16), {.tokens = 220, .cache = options});
      Decoder cpu(cpu_tiny(), options, 2);
      return relative_error(conversation(cuda), conversation(cpu));
    };
    const double original = error(Positions::original), cache_positions = error(Positions::cache);
    CAPTURE(policy, original, cache_positions);
    CHECK(cache_positions < 1.5 * original);
  }
}

namespace {

/// The size of a run of parity(), and the options of its checks.
struct ParityShape {
  std::uint32_t scale = 1;    ///< factor of budgets and lengths of prompts
  bool shares_slots = false;  ///< the budgets are ada()
  int steps = 60, steps_of_second_turn = 20;
  VerifyOptions verify{.threads = 2};
};

/// The caches of four sequences. They cover budgets by layer and head, protected tokens, a budget
/// of one token, and all three prefill modes.
std::vector<ResolvedConfig> parity_caches(const PolicySpec& policy, Positions positions,
                                          const ModelConfig& model, const ParityShape& shape) {
  const std::uint32_t scale = shape.scale;
  const auto num_protected = [&](Extent sinks, Extent recent) {
    PolicySpec own = policy;
    own.sinks = sinks, own.recent = recent;
    return own;
  };
  // Budgets of quantized tiers are halved, because the same bytes keep more quantized tokens. They
  // are at least 4, so that no tier is empty.
  const auto bytes_of = [&](std::uint32_t tokens) {
    return policy.tier_plan.is_quantized() ? std::max(tokens / 2, 4u) : tokens;
  };
  std::vector<ResolvedConfig> caches{
      cache(num_protected(policy.sinks, tokens(8)), bytes_of(24 * scale), Prefill{0}, positions),
      cache(num_protected(tokens(2), percent(25)), bytes_of(64 * scale), Prefill{16}, positions),
      cache(policy, bytes_of(40 * scale), Prefill{1}, positions),
      cache(num_protected(tokens(0), tokens(0)), bytes_of(1), Prefill{0}, positions)};
  for (std::uint32_t s = 0; s < caches.size(); ++s) {
    caches[s].sequence = s;
    caches[s].seed = 3 + s;
    if (shape.shares_slots) caches[s].budget.split = Budget::Split::ada;
  }
  if (shape.shares_slots || !policy.tier_plan.is_plain()) return caches;
  for (std::uint32_t i = 0; i < model.layers * model.kv_heads; ++i) {
    if (i % model.kv_heads == 0) caches[0].head_budgets.emplace_back();
    const std::uint32_t kind = caches[0].evicts_by_layer() ? i / model.kv_heads : i;
    caches[0].head_budgets.back().push_back((16 + 4 * (kind % 8)) * scale);
  }
  return caches;
}

/// Decodes a batch of four sequences, one of them with a second turn, and runs the three checks of
/// `kvlab verify` on each.
std::vector<VerifyReport> parity(const DeviceModel& model, const PolicySpec& policy, bool plain,
                                 Positions positions, const ParityShape& shape) {
  const auto caches = parity_caches(policy, positions, model.config(), shape);
  CudaDecoder decoder(model, {.sequences = 4,
                              .slots = caches[0].policy.modifiers.once ? 400u * shape.scale : 0,
                              .prefill_tokens = 24 * static_cast<std::uint32_t>(shape.scale),
                              .caches = caches,
                              .watched = true,
                              .plain_eviction = plain});
  std::vector<std::unique_ptr<Verifier>> verifiers;
  for (int s = 0; s < 4; ++s) {
    verifiers.push_back(
        std::make_unique<Verifier>(model.config(), caches[static_cast<std::size_t>(s)],
                                   model.dtype(), shape.verify, model.output_projections()));
    decoder.watch(s, &verifiers.back()->observer());
  }
  const std::size_t lengths[]{70, 33, 50, 9};
  for (int s = 0; s < 4; ++s) {
    decoder.prefill(s, some_ids(lengths[s] * shape.scale, 8192, 100 * s));
    // Tokens are sampled, because the greedy text of a small model soon repeats itself.
    decoder.set_sampling(s, {.temperature = 1, .seed = 5u + static_cast<unsigned>(s)});
  }
  decoder.choose(4);
  for (int step = 0; step < shape.steps; ++step) decoder.step(4);
  decoder.prefill(1, some_ids(40 * shape.scale, 8192, 7));
  decoder.choose(4);
  for (int step = 0; step < shape.steps_of_second_turn; ++step) decoder.step(4);
  std::vector<VerifyReport> reports;
  for (const auto& verifier : verifiers) reports.push_back(verifier->report());
  return reports;
}

void check_parity(const std::vector<VerifyReport>& reports, bool evicts = true) {
  for (std::size_t s = 0; s < reports.size(); ++s) {
    const VerifyReport& report = reports[s];
    CAPTURE(s, report.worst_mass, report.tolerance, report.outputs.layer,
            report.outputs.worst_error, report.outputs.tolerance);
    CHECK(report.outputs.rows > 0);
    CHECK(report.outputs.right());
    CHECK(report.identical);
    CHECK(report.first_difference == "");
    CHECK(report.right());
    CHECK(report.wrong_requests == 0);
    CHECK((report.evictions > 0 || !evicts));
  }
}

/// Prints a line for each sequence, for docs/internals/measurements.
void print_parity(const std::string& model, const std::string& policy, Positions positions,
                  const std::vector<VerifyReport>& reports) {
  for (std::size_t s = 0; s < reports.size(); ++s) {
    const VerifyReport& r = reports[s];
    double widest = 0;
    for (const Parting& parting : r.partings) widest = std::max(widest, parting.margin);
    std::printf(
        "%-14s %-14s %-9s %zu  %-9s %9llu %10llu %9.1e %9.1e %6llu  %4zu of %u, %.1e\n",
        model.c_str(), policy.c_str(), std::string(name_of(positions)).c_str(), s,
        r.identical ? "identical" : "DIFFERENT", static_cast<unsigned long long>(r.evictions),
        static_cast<unsigned long long>(r.observations), r.worst_mass, r.tolerance,
        static_cast<unsigned long long>(r.wrong_requests), r.partings.size(), r.heads, widest);
  }
  std::fflush(stdout);
}

std::string environment(const char* name, const char* otherwise) {
  const char* const value = std::getenv(name);
  return value ? value : otherwise;
}

}  // namespace

TEST_CASE("Sequences that are fed side by side have the same logits as alone", "[gpu]") {
  if (no_device()) return;
  const auto cuda = load_backend(Device::cuda, kTiny, 2);
  for (const char* policy : {"full", "h2o", "sink"}) {
    std::vector<ResolvedConfig> caches;
    for (std::uint32_t s = 0; s < 12; ++s) {  // more rows than the kernels for few rows support
      caches.push_back(cache(policy, 16 + 4 * s, Prefill{0}, Positions::original));
      caches.back().sequence = s;
    }
    const auto batch = cuda->batches().batch_decoder(caches, 120);
    REQUIRE(batch != nullptr);
    const std::size_t vocab = cuda->config().vocab;
    constexpr int kRows = 12, kSteps = 40;
    Ids ids;
    for (int i = 0; i < kSteps * kRows; ++i) ids.push_back(i * 7919 % 8192);
    for (int s = 0; s < kRows; ++s) batch->prompt(s, 1, some_ids(60, 8192, 100 * s), nullptr);
    const auto logits = cuda->batches().logit_memory(ids.size() * vocab);
    batch->decode(kRows, ids, logits->data());
    const std::vector<float> together = logits->to_host();
    for (const int s : {0, 5, 11}) {
      const auto alone = cuda->decoder(caches[static_cast<std::size_t>(s)], 120);
      alone->feed(some_ids(60, 8192, 100 * s), SegmentKind::prompt);
      Ids own;
      std::vector<float> expected, rows;
      for (int step = 0; step < kSteps; ++step) {
        const std::size_t at = static_cast<std::size_t>(step * kRows + s);
        own.push_back(ids[at]);
        rows.insert(rows.end(), together.begin() + static_cast<std::ptrdiff_t>(at * vocab),
                    together.begin() + static_cast<std::ptrdiff_t>((at + 1) * vocab));
      }
      alone->feed(own, SegmentKind::decode, &expected);
      CAPTURE(policy, s);
      // The comparison has a tolerance, because the matrix products of a single sequence use other
      // kernels, in bf16.
      CHECK(relative_error(rows, expected) < 0.03);
      CHECK(batch->kv_bytes_peak(s) == alone->kv_bytes_peak());
    }
  }
}

TEST_CASE("Later prompts of a batch have the same logits as alone", "[gpu]") {
  if (no_device()) return;
  const auto cuda = load_backend(Device::cuda, kTiny, 2);
  const std::size_t vocab = cuda->config().vocab;
  constexpr int kRows = 5;
  const Ids first = some_ids(60, 8192, 1), second = some_ids(9, 8192, 2), decoded(kRows, 77);
  for (const char* policy : {"full", "h2o", "sink"}) {
    std::vector<ResolvedConfig> caches;
    for (std::uint32_t s = 0; s < kRows; ++s)
      caches.push_back(cache(policy, 16 + 4 * s, Prefill{0}, Positions::original));
    const auto batch = cuda->batches().batch_decoder(caches, 120);
    REQUIRE(batch != nullptr);
    const auto prompts = cuda->batches().logit_memory(kRows * vocab),
               steps = cuda->batches().logit_memory(kRows * vocab);
    batch->prompt(0, kRows, first, prompts->data());
    batch->prompt(0, kRows, second, prompts->data());
    batch->decode(kRows, decoded, steps->data());
    const std::vector<float> prompt_logits = prompts->to_host(), step_logits = steps->to_host();
    for (std::size_t s = 0; s < kRows; ++s) {
      const auto alone = cuda->decoder(caches[s], 120);
      alone->feed(first, SegmentKind::prompt);
      const auto row = [&](const std::vector<float>& rows) {
        return std::vector<float>(rows.begin() + static_cast<std::ptrdiff_t>(s * vocab),
                                  rows.begin() + static_cast<std::ptrdiff_t>((s + 1) * vocab));
      };
      const auto last = [](std::span<const float> logits) {
        return std::vector<float>(logits.begin(), logits.end());
      };
      CAPTURE(policy, s);
      CHECK(relative_error(row(prompt_logits), last(alone->feed(second, SegmentKind::prompt))) <
            0.03);
      CHECK(relative_error(row(step_logits),
                           last(alone->feed({decoded.data(), 1}, SegmentKind::decode))) < 0.03);
    }
  }
}

/// The part of the covering configurations that one test case runs. The parts are so small that no
/// case takes over a minute while twelve run side by side.
struct BatchPart {
  Dtype dtype;
  bool plain_steps;  ///< whether prompts are streamed by plain steps
  bool early_names;  ///< policies a to k; otherwise l to z
};

void check_batches(const BatchPart& part) {
  if (no_device()) return;
  const test::Choices choices{
      .beside = {"feature:name=key_norm", "feature:name=value_norm", "feature:name=value_norm1",
                 "feature:name=key_cosine"},
      .tier_plans = {"", "4", "16@12t+4@100%", "8@25%+4@50%+k4v2@25%", "fp8@30%+fp8@30%+2@40%"},
      .budgets = {parse_budget("64"), parse_budget("ada(64)")},
      .prefills = {Prefill{0}, Prefill{1}}};  // the second one uses plain steps
  const CacheShape heads = cpu_tiny().config().heads();
  bool bf16 = false;
  int checked = 0;
  for (const CacheConfig& config : test::covering(choices, &kCudaDecoder, 400, heads)) {
    const bool plain = config.prefill.chunk == 1;
    bf16 = !bf16;
    if (bf16 != (part.dtype == Dtype::bf16) || plain != part.plain_steps ||
        (config.policy.name < "l") != part.early_names)
      continue;
    CAPTURE(config.policy.text(), config.budget.text(), plain, name_of(config.positions), bf16);
    // With a tier plan, all tokens of a short prompt may fit. With `once`, nothing is then evicted.
    const bool evicts = !(config.policy.tier_plan.is_quantized() && config.policy.modifiers.once);
    check_parity(parity(tiny(part.dtype), config.policy, plain, config.positions,
                        {.shares_slots = config.shares_slots()}),
                 evicts);
    ++checked;
  }
  CHECK(checked > 0);
}

TEST_CASE("Sequences of a batch pass verify's three checks: bf16, whole prompts, policies a to k",
          "[gpu]") {
  check_batches({.dtype = Dtype::bf16, .plain_steps = false, .early_names = true});
}
TEST_CASE("Sequences of a batch pass verify's three checks: bf16, whole prompts, policies l to z",
          "[gpu]") {
  check_batches({.dtype = Dtype::bf16, .plain_steps = false, .early_names = false});
}
TEST_CASE("Sequences of a batch pass verify's three checks: bf16, plain steps, policies a to k",
          "[gpu]") {
  check_batches({.dtype = Dtype::bf16, .plain_steps = true, .early_names = true});
}
TEST_CASE("Sequences of a batch pass verify's three checks: bf16, plain steps, policies l to z",
          "[gpu]") {
  check_batches({.dtype = Dtype::bf16, .plain_steps = true, .early_names = false});
}
TEST_CASE(
    "Sequences of a batch pass verify's three checks: float32, whole prompts, policies a "
    "to k",
    "[gpu]") {
  check_batches({.dtype = Dtype::f32, .plain_steps = false, .early_names = true});
}
TEST_CASE(
    "Sequences of a batch pass verify's three checks: float32, whole prompts, policies l "
    "to z",
    "[gpu]") {
  check_batches({.dtype = Dtype::f32, .plain_steps = false, .early_names = false});
}
TEST_CASE("Sequences of a batch pass verify's three checks: float32, plain steps, policies a to k",
          "[gpu]") {
  check_batches({.dtype = Dtype::f32, .plain_steps = true, .early_names = true});
}
TEST_CASE("Sequences of a batch pass verify's three checks: float32, plain steps, policies l to z",
          "[gpu]") {
  check_batches({.dtype = Dtype::f32, .plain_steps = true, .early_names = false});
}

// This test is hidden, because it takes minutes. The environment variable KVLAB_PARITY_MODEL is the
// folder of a checkpoint, or a configuration for random weights. KVLAB_PARITY_STEPS,
// KVLAB_PARITY_POLICY and KVLAB_PARITY_POSITIONS choose what runs.
TEST_CASE("Long sequences of a chosen model pass verify's three checks", "[.][parity][gpu]") {
  if (no_device()) return;
  const std::filesystem::path path = environment("KVLAB_PARITY_MODEL", kTiny.c_str());
  const bool drawn = path.extension() == ".json";
  const DeviceModel model =
      drawn ? DeviceModel::random(read_model_config(path, "drawn")) : DeviceModel::load(path);
  const std::string only = environment("KVLAB_PARITY_POLICY", "");
  const std::string positioned = environment("KVLAB_PARITY_POSITIONS", "");
  ParityShape shape{.scale = 2, .steps = std::stoi(environment("KVLAB_PARITY_STEPS", "2000"))};
  shape.steps_of_second_turn = shape.steps / 4;
  shape.verify.check_every = 16;
  // For a large model, checks (b) and (c) run on the first, middle and last layer only. Check (a)
  // runs on all layers.
  const std::uint32_t layers = model.config().layers;
  if (layers > 16) shape.verify.layers = {0, layers / 2, layers - 1};
  for (const char* policy : kPolicies)
    for (const Positions positions : {Positions::original, Positions::cache}) {
      if (!only.empty() && only != policy) continue;
      if (!positioned.empty() && positioned != name_of(positions)) continue;
      CAPTURE(policy, name_of(positions));
      const auto reports = parity(model, parse_policy(policy), false, positions, shape);
      print_parity(drawn ? path.stem().string() : path.filename().string(), policy, positions,
                   reports);
      check_parity(reports);
    }
}
