// Compares the decoder's evictions with the simulator's, on the bundled model.
#include "engine/evaluation/verify.hpp"

#include <cmath>
#include <cstdlib>
#include <fstream>

#include "engine/tokenizer/tokenizer.hpp"
#include "policies/executor.hpp"
#include "policies/observation.hpp"
#include "policies/ops/make_ops.hpp"
#include "tests/catch.hpp"
#include "tests/conformance.hpp"
#include "tests/policies/leaky.hpp"
#include "tests/skip.hpp"
#include "tests/tools/faulty_backend.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/safetensors.hpp"

namespace kvlab {
namespace {

const std::string kModel = KVLAB_SOURCE_DIR "/engine/models/tiny";

std::vector<VerifyTurn> two_turns(std::uint32_t decode_tokens) {
  const Tokenizer tokenizer = Tokenizer::load(kModel + "/tokenizer.json");
  const std::string text = read_text_file(KVLAB_SOURCE_DIR "/tools/demo/prompt.txt", 1 << 20);
  const std::vector<std::int32_t> ids = tokenizer.encode(text, false);
  REQUIRE(ids.size() >= 130);
  std::vector<std::int32_t> first{0}, second(ids.begin() + 80, ids.begin() + 130);
  first.insert(first.end(), ids.begin(), ids.begin() + 80);
  return {{first, decode_tokens}, {second, decode_tokens / 2}};
}

ResolvedConfig cache(const PolicyEntry& entry, std::uint32_t budget, Prefill prefill,
                     Positions positions, const CompiledPolicies& compiled = nullptr) {
  return resolve({.policy = parse_policy(entry.info.name, {}, compiled),
                  .budget = {.extent = tokens(budget)},
                  .prefill = prefill,
                  .positions = positions,
                  .seed = 11},
                 budget);
}

const Model& model() {
  static const Model model = Model::load(kModel, 2);
  return model;
}

VerifyReport report_of(Backend& backend, const ResolvedConfig& options,
                       const std::vector<VerifyTurn>& turns) {
  return verify_decoder(backend, options, turns, {.temperature = 1, .seed = 5},
                        {.threads = 2, .reference = &model()});
}

void check(Backend& backend, const ResolvedConfig& options, const std::vector<VerifyTurn>& turns) {
  INFO(test::text_of(options));
  const VerifyReport report = report_of(backend, options, turns);
  CHECK(report.outputs.rows > 0);
  CHECK(report.outputs.worst_error <= 1e-5);
  CHECK(report.logits.rows > 0);
  CHECK(report.logits.error <= 1e-5);
  CHECK(report.ok());
  CHECK(report.identical);
  CHECK(report.first_difference == "");
  CHECK(report.worst_mass <= 1e-5);
  CHECK(report.wrong_requests == 0);
  // Victims may differ only if two tokens had nearly equal ranks before. If heads share slots, a
  // near tie in one head may also change the victims of another head, because it changes that
  // head's budget.
  for (const Parting& parting : report.partings)
    CHECK((parting.margin <= 1e-5 || options.shares_slots()));
  CHECK(report.heads == 8);
  if (options.policy.entry->info.evicts) CHECK(report.evictions > 0);
  if (options.policy.entry->info.needs != Needs::nothing) CHECK(report.observations > 0);
}

TEST_CASE("The engine and the simulator evict the same tokens for every configuration") {
  const auto backend = cpu_backend(model(), 2);
  const CacheShape heads = backend->config().heads();
  test::Choices choices{
      .beside = {"feature:name=key_norm", "feature:name=value_norm", "feature:name=value_norm1",
                 "feature:name=key_cosine", "feature:name=value_out_norm1", "lru:prompt",
                 "vatp*key_norm"},
      .tier_plans = {"", "16@12t+8@30%+4@70%", "4", "fp8@50%+k4v2@50%", "8@25%+4@50%+2@25%"},
      .budgets = test::budgets_about(36, heads)};
  choices.budgets.push_back(parse_budget("10%bytes"));
  // With every=16, 20 decoded tokens are enough for one eviction of several tokens after the
  // prompt.
  const auto turns = two_turns(std::getenv("KVLAB_EVERY") ? 60 : 20);
  check(*backend, resolve({}, 300), turns);
  for (const CacheConfig& config : test::covering(choices, &kDecoder, 300, heads))
    check(*backend, resolve(config.at_prompt(81), 300, 0, heads), turns);
}

TEST_CASE("A decoder refuses a feature that it cannot compute") {
  const auto backend = cpu_backend(model(), 2);
  const ResolvedConfig options =
      resolve({.policy = parse_policy("feature:name=mine"), .budget = {.extent = tokens(32)}}, 32);
  CHECK_THROWS_WITH(verify_decoder(*backend, options, two_turns(4), {}, {}),
                    "policy feature: feature mine: a decoder computes only key_norm, value_norm, "
                    "value_norm1, key_cosine, value_out_norm1, lagkv, expected_attention, "
                    "redundancy; a replay reads other features from a trace, and the end-to-end "
                    "evaluation on the CPU from --features");
}

TEST_CASE("A policy that needs mass and requests passes verify") {
  const auto backend = cpu_backend(model(), 2);
  const CompiledPolicies compiled{
      std::make_shared<const PolicyEntry>(PolicyEntry{make_ops<Leaky>()})};
  for (const Prefill prefill : {Prefill{0}, Prefill{16}, Prefill{1}})
    check(*backend, cache(*compiled.entries[0], 32, prefill, Positions::original, compiled),
          two_turns(40));
}

/// Writes the bundled model with one number in config.json changed.
void write_changed_model(const std::filesystem::path& folder, const char* key, double value) {
  std::filesystem::create_directories(folder);
  for (const char* file : {"model.safetensors", "tokenizer.json"})
    std::filesystem::create_symlink(std::filesystem::path(kModel) / file, folder / file);
  auto config = nlohmann::json::parse(read_text_file(kModel + "/config.json", 1 << 20));
  REQUIRE(config.contains(key));
  config[key] = value;
  std::ofstream(folder / "config.json") << config;
}

const char* const kFaultPolicies[] = {"full", "window", "sink", "h2o"};

ResolvedConfig fault_config(const std::string& policy, const CacheShape& model = {}) {
  return resolve({.policy = parse_policy(policy), .budget = parse_budget("64")}, 400, 0, model);
}

/// Breaks the attention of layer 2 in several ways. Check (d) has to find each fault, and the other
/// checks have to pass.
void check_output_faults(Backend& backend) {
  constexpr std::uint32_t broken = 2;
  const auto turns = two_turns(20);
  const std::size_t width =
      std::size_t{backend.config().query_heads} * backend.config().head_size;  // per token
  std::vector<float> last;
  const std::vector<std::pair<const char*, test::Fault>> faults{
      {"writes nothing", [](auto, std::span<float> out) { std::ranges::fill(out, 0.0f); }},
      {"writes nothing for decoded tokens",
       [&](auto, std::span<float> out) {
         if (out.size() == width) std::ranges::fill(out, 0.0f);
       }},
      {"leaves what it wrote for the token before",
       [&](auto, std::span<float> out) {
         const std::vector<float> own(out.end() - static_cast<std::ptrdiff_t>(width), out.end());
         if (out.size() == width && !last.empty()) std::ranges::copy(last, out.begin());
         last = own;
       }},
      {"writes nothing for one head",
       [&](auto, std::span<float> out) {
         for (std::size_t at = 0; at < out.size(); at += width)
           std::ranges::fill(out.subspan(at, backend.config().head_size), 0.0f);
       }},
      {"writes something that is no number",
       [](auto, std::span<float> out) { out.back() = std::nanf(""); }}};
  for (const auto& [name, fault] : faults)
    for (const char* policy : kFaultPolicies) {
      CAPTURE(name, policy);
      last.clear();
      test::FaultyBackend faulty(backend, backend, backend,
                                 [&](std::uint32_t layer, std::span<float> out) {
                                   if (layer == broken) fault(layer, out);
                                 });
      const VerifyReport report = report_of(faulty, fault_config(policy), turns);
      CHECK(!report.ok());
      CHECK(!report.outputs.right());
      CHECK(report.outputs.layer == broken);
      CHECK(report.identical);
      CHECK(report.right());
      CHECK(report.logits.right());
    }
}

/// Verifies decoders that differ from the model that they claim to run. Verification has to fail.
void check_model_faults(
    Backend& backend,
    const std::function<std::unique_ptr<Backend>(const std::filesystem::path&)>& load) {
  const auto turns = two_turns(20);
  const test::TemporaryFolder folder;
  write_changed_model(folder / "rope", "rope_theta", 500);
  write_changed_model(folder / "norm", "rms_norm_eps", 1);
  const auto rope = load(folder / "rope"), norm = load(folder / "norm");
  for (const char* policy : kFaultPolicies) {
    CAPTURE(policy);
    const ResolvedConfig config = fault_config(policy);
    REQUIRE(report_of(backend, config, turns).ok());

    test::FaultyBackend attention(backend, *rope, *rope);
    const VerifyReport turned = report_of(attention, config, turns);
    CHECK(!turned.ok());
    CHECK(!turned.outputs.right());
    CHECK(!turned.logits.right());

    test::FaultyBackend elsewhere(backend, *norm, *norm);
    const VerifyReport normed = report_of(elsewhere, config, turns);
    CHECK(!normed.ok());
    CHECK(normed.outputs.right());
    CHECK(!normed.logits.right());

    // In this case only the decoder without an observer runs another model.
    test::FaultyBackend alone(backend, backend, *rope);
    const VerifyReport other = report_of(alone, config, turns);
    CHECK(!other.ok());
    CHECK(other.outputs.right());
    CHECK(!other.logits.right());
  }
}

TEST_CASE("verify finds broken attention in one layer for every kind of policy") {
  check_output_faults(*cpu_backend(model(), 2));
}

TEST_CASE("verify finds a decoder that differs from its model") {
  check_model_faults(*cpu_backend(model(), 2), [](const std::filesystem::path& folder) {
    return cpu_backend(Model::load(folder, 2), 2);
  });
}

TEST_CASE("verify finds errors of a tenth of a percent in float32") {
  const auto backend = cpu_backend(model(), 2);
  test::FaultyBackend faulty(*backend, *backend, *backend,
                             [](std::uint32_t layer, std::span<float> out) {
                               for (float& x : out) x *= layer == 1 ? 1.001f : 1.0f;
                             });
  CHECK(!report_of(faulty, fault_config("full"), two_turns(10)).outputs.right());
}

TEST_CASE("verify finds broken attention and broken models on a device", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  const auto load = [](const std::filesystem::path& folder) {
    return load_backend(Device::cuda, folder, 2);
  };
  const auto backend = load(kModel);
  check_output_faults(*backend);
  check_model_faults(*backend, load);
}

TEST_CASE("verify passes on a device, for every tier and mode", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  const auto backend = load_backend(Device::cuda, kModel, 2);
  const auto turns = two_turns(40);
  const std::string rest = "x" + std::to_string(backend->config().layers - 1);
  for (const std::string& policy : std::vector<std::string>{
           "full", "full:tiers=4", "window", "sink", "random", "h2o", "tova:scope=layer",
           "h2o:tiers=fp8", "h2o:tiers=4", "window:tiers=16@12t+8@30%+2@70%",
           "full:tiers=8x1-4/2" + rest, "h2o:tiers=16x1-4" + rest})
    for (const Prefill prefill : {Prefill{0}, Prefill{16}, Prefill{1}}) {
      ResolvedConfig config = fault_config(policy, backend->config().heads());
      config.prefill = prefill;
      const VerifyReport report = report_of(*backend, config, turns);
      CAPTURE(policy, prefill.text(), report.outputs.layer, report.outputs.worst_error,
              report.outputs.tolerance, report.logits.error, report.logits.tolerance);
      CHECK(report.identical);
      CHECK(report.right());
      CHECK(report.outputs.right());
      CHECK(report.logits.right());
      CHECK(report.outputs.rows > 0);
      CHECK(report.logits.rows > 0);
    }
}

}  // namespace
}  // namespace kvlab
