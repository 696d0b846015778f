// Tests of policy sources on the device: NVRTC compiles the text of every policy, and the result
// gives the same bits as the built-in policy.
#include <fmt/format.h>

#include "kernels/evict/append.hpp"
#include "kernels/runtime/policy_kernels.hpp"
#include "sim/source/policy_source.hpp"
#include "tests/kernels/evicting_batch.hpp"
#include "tests/policies/probe_outcome.hpp"
#include "tests/skip.hpp"
#include "tests/traces/temporary_folder.hpp"

using namespace kvlab;
using namespace kvlab::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// The registry's header of `policy` as a policy source with the name my_<policy>.
std::shared_ptr<const PolicyEntry> source_of(const std::string& header, const std::string& policy) {
  std::string text = read_bytes(fmt::format("{}/{}", KVLAB_SOURCE_DIR, header));
  const std::string name = fmt::format("\"{}\"", policy);
  text.replace(text.find(name), name.size(), fmt::format("\"my_{}\"", policy));
  const TemporaryFolder folder;
  write_bytes(folder / "my.hpp", text);
  return compile_policy_source(folder / "my.hpp");
}

const std::pair<const char*, const char*> kHeaders[] = {{"policies/mass/h2o.hpp", "h2o"},
                                                        {"policies/recency/lru.hpp", "lru"},
                                                        {"policies/baseline/random.hpp", "random"},
                                                        {"tests/policies/leaky.hpp", "leaky"}};

bool has_nvrtc() {
  try {
    kernels::compile({.text = "", .headers = {}, .kernels = {}, .architecture = 90});
  } catch (const std::runtime_error&) {
    return false;
  }
  return true;
}

/// The result of compacting a prompt of kPrompt tokens to kBudget at the end of its append.
struct CompactedPrompt {
  std::vector<std::int32_t> lengths, next_slots;
  std::vector<std::uint32_t> positions;
  std::vector<std::byte> states;

  bool operator==(const CompactedPrompt&) const = default;
};

CompactedPrompt compact_prompt(const kernels::DevicePolicy& policy) {
  constexpr int kPrompt = 200, kBudget = 32, kHeadSize = 64;
  const std::vector<kvlab_rule> two_rules(2, {kBudget, 2, 8});
  std::vector<Observation> seen(2 * kPrompt);
  std::mt19937 random(5);
  for (Observation& one : seen)
    one = {.mass = random() % 50,
           .requests = 1,
           .last_request = static_cast<std::uint32_t>(random() % kPrompt)};
  const auto array = [](auto value) {
    return DeviceArray<decltype(value)>(std::vector<decltype(value)>(2, value));
  };
  const DeviceArray<std::int64_t> from_slots(std::vector<std::int64_t>{0, kPrompt}),
      to_slots(std::vector<std::int64_t>{0, kBudget});
  const DeviceArray<float> from_keys(2 * kPrompt * kHeadSize), from_values(2 * kPrompt * kHeadSize),
      to_keys(2 * kBudget * kHeadSize), to_values(2 * kBudget * kHeadSize);
  const DeviceArray<std::uint32_t> from_positions(2 * kPrompt), to_positions(2 * kBudget);
  const auto lengths = array(std::int32_t{0}), next = array(std::int32_t{0}),
             to_lengths = array(std::int32_t{0}), to_next = array(std::int32_t{0});
  const auto now = array(std::uint32_t{0}), ids = array(std::uint32_t{0}),
             appended = array(std::uint32_t{kPrompt});
  const auto seeds = array(std::uint64_t{0});
  const DeviceArray<kvlab_rule> rules(two_rules);
  const DeviceArray<Observation> device_seen(seen);
  const DeviceArray<std::byte> states(2 * kPrompt * policy.slot_bytes),
      to_states(2 * kBudget * policy.slot_bytes);
  kvlab_cache_view from{.type = KVLAB_F32,
                        .sequences = 1,
                        .query_heads = 2,
                        .kv_heads = 2,
                        .head_size = kHeadSize,
                        .softmax_scale = 1,
                        .max_slots = kPrompt,
                        .first_slot = from_slots.data(),
                        .keys = from_keys.data(),
                        .values = from_values.data(),
                        .positions = from_positions.data(),
                        .lengths = lengths.data(),
                        .next_slots = next.data()};
  kvlab_cache_view to = from;
  to.max_slots = kBudget;
  to.first_slot = to_slots.data();
  to.keys = to_keys.data();
  to.values = to_values.data();
  to.positions = to_positions.data();
  to.lengths = to_lengths.data();
  to.next_slots = to_next.data();
  const DeviceArray<std::byte> workspace(kernels::compact_workspace(from));
  check_cuda(kernels::compact(policy,
                              {.from = from,
                               .to = to,
                               .policy = {.states = states.data(),
                                          .rules = rules.data(),
                                          .params = nullptr,
                                          .threshold16 = nullptr,
                                          .seeds = seeds.data(),
                                          .sequence_ids = ids.data(),
                                          .layer = 0,
                                          .seen = nullptr},
                               .to_states = to_states.data(),
                               .now = now.data(),
                               .appended = appended.data(),
                               .seen = reinterpret_cast<kvlab_observation*>(device_seen.data()),
                               .workspace = workspace.data()},
                              nullptr));
  return {to_lengths.to_host(), to_next.to_host(), to_positions.to_host(), to_states.to_host()};
}

}  // namespace

TEST_CASE("NVRTC compiles a policy source for every architecture of kvlab, without a device") {
  if (!has_nvrtc()) return skip("no NVRTC");
  for (const auto& [header, policy] : kHeaders)
    for (const int architecture : {80, 90}) {
      const auto code =
          kernels::compile(kernels::eviction_program(*source_of(header, policy), architecture));
      CHECK(code.image.size() > 1000);
      CHECK(code.symbols.size() == 4);
    }
}

TEST_CASE("NVRTC compiles the replay kernels of registered policies and sources without a device") {
  if (!has_nvrtc()) return skip("no NVRTC");
  using Tokens = kernels::ReplayTokens;
  const auto h2o = parse_policy("h2o").entry,
             leaky = source_of("tests/policies/leaky.hpp", "leaky");
  const auto compiles = [](const PolicyEntry& entry, const kernels::WalkVariant& variant,
                           int architecture) {
    const auto code = kernels::compile(kernels::walk_program(entry, variant, architecture));
    return code.image.size() > 1000 && code.symbols.size() == 1;
  };
  CHECK(kernels::has_text(*h2o));
  CHECK(kernels::has_text(*leaky));
  CHECK(compiles(*h2o, {1, Tokens::cache_positions, true, KVLAB_BF16}, 90));
  CHECK(compiles(*h2o, {2, Tokens::exact, true, KVLAB_F16}, 80));
  CHECK(compiles(*h2o,
                 {.head_groups = 1,
                  .tokens = Tokens::exact,
                  .in_shared = true,
                  .type = KVLAB_BF16,
                  .largest = true},
                 90));
  CHECK(compiles(*parse_policy("criticalkv").entry, {1, Tokens::exact, true, KVLAB_BF16}, 90));
  CHECK(compiles(*h2o, {2, Tokens::tiered, true, KVLAB_F16}, 80));
  CHECK(compiles(*leaky, {2, Tokens::cache_positions, false, KVLAB_F32}, 80));
  CHECK(compiles(*leaky, {1, Tokens::exact, false, KVLAB_BF16}, 90));
}

TEST_CASE("text that the device compiler refuses is reported at the source's line") {
  if (!has_nvrtc()) return skip("no NVRTC");
  PolicyEntry entry = *source_of("policies/mass/h2o.hpp", "h2o");
  PolicySource broken = *entry.source;
  broken.path = "my.hpp";
  const std::string_view good = "slot.mass += seen.mass;";
  broken.text.replace(broken.text.find(good), good.size(), "slot.mass += sen.mass;");
  entry.source = std::make_shared<const PolicySource>(broken);
  std::string message;
  try {
    kernels::code_of(kernels::eviction_program(entry, 90), entry);
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  CHECK_THAT(message, ContainsSubstring("my.hpp: does not compile for the device\nmy.hpp(") &&
                          ContainsSubstring("\"sen\" is undefined"));
}

TEST_CASE("a policy source gives the same bits on the device as on the host", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const std::vector<Step> steps = make_steps();
  const std::vector<Observation> seen = make_observations(steps);
  const Stream stream;
  for (const auto& [header, policy] : kHeaders) DYNAMIC_SECTION(policy) {
      const auto entry = source_of(header, policy);
      const kernels::PolicyKernels compiled(entry);
      const PolicySpec spec = parse_policy(entry->info.name, {}, entry);
      const Outcome host = run_on_host(spec, steps, seen);
      DeviceRun run(compiled.policy(), spec, steps, seen);
      check_cuda(run.enqueue(stream.get()));
      check_equal(run.take(), host);
    }
}

TEST_CASE("a policy source evicts on the device as on the host, fast and plain", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const auto& [header, policy] : std::span(kHeaders).first(3)) DYNAMIC_SECTION(policy) {
      const kernels::PolicyKernels compiled(source_of(header, policy));
      for (const auto& device : {kernels::observing_kernels(compiled.policy()),
                                 kernels::plain_kernels(compiled.policy())}) {
        // On the host, the batch uses the registry's policy of that name.
        kernels::EvictingBatch batch(device,
                                     {.policy = policy, .sequences = 2, .prompt = 20, .steps = 60});
        const Stream stream;
        for (int step = 0; step < 60; ++step) {
          batch.sample_tokens();
          check_cuda(batch.enqueue(stream.get()));
          check_cuda(cudaDeviceSynchronize());
          batch.check();
        }
      }
    }
}

TEST_CASE("a policy source compacts a prompt to the same bits as the built-in policy", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const auto& [header, policy] : std::span(kHeaders).first(3)) DYNAMIC_SECTION(policy) {
      const kernels::PolicyKernels compiled(source_of(header, policy));
      const CompactedPrompt own = compact_prompt(compiled.policy());
      CHECK(own.lengths == std::vector<std::int32_t>{31, 31});
      for (const kernels::DevicePolicy& other : kernels::device_policies())
        if (other.name == policy) CHECK((own == compact_prompt(other)));
    }
}
