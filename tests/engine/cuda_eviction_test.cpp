// The CUDA decoder's caches that evict: against the CPU decoder's, and under the simulator's eyes.
#include <cmath>

#include "engine/backend.hpp"
#include "engine/cuda/cuda_sequence.hpp"
#include "engine/decoder.hpp"
#include "tests/catch.hpp"
#include "tests/skip.hpp"
#include "tools/verify.hpp"

using namespace kvlab;
using Ids = std::vector<std::int32_t>;

namespace {

const std::string kTiny = KVLAB_SOURCE_DIR "/engine/models/tiny";

bool no_device() {
  if (has_cuda_device()) return false;
  skip("no CUDA device");
  return true;
}

const Model& cpu_tiny() {
  static const Model model = Model::load(kTiny, 2);
  return model;
}

const DeviceModel& tiny(Dtype dtype) {
  static const DeviceModel bf16 = DeviceModel::load(kTiny, Dtype::bf16),
                           f32 = DeviceModel::load(kTiny, Dtype::f32);
  return dtype == Dtype::f32 ? f32 : bf16;
}

Ids some_ids(std::size_t count, std::int64_t first = 0) {
  Ids ids{0};
  while (ids.size() < count)
    ids.push_back(
        static_cast<std::int32_t>((static_cast<std::int64_t>(ids.size()) + first) * 7919 % 8192));
  return ids;
}

CacheOptions cache(const std::string& policy, std::uint32_t budget, Prefill prefill,
                   Positions positions) {
  return {.policy = parse_policy(policy),
          .budget = budget,
          .budgets = {},
          .positions = positions,
          .prefill = prefill,
          .seed = 11};
}

/// A prompt, decoded tokens, and a second turn: logits of every token.
std::vector<float> conversation(SequenceDecoder& decoder) {
  std::vector<float> all, some;
  const auto feed = [&](const Ids& ids, SegmentKind kind) {
    decoder.feed(ids, kind, &some);
    all.insert(all.end(), some.begin(), some.end());
  };
  feed(some_ids(90), SegmentKind::prompt);
  feed(some_ids(60, 500), SegmentKind::decode);
  feed(some_ids(50, 900), SegmentKind::prompt);
  feed(some_ids(20, 1300), SegmentKind::decode);
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

TEST_CASE("In float32 every policy's logits are the CPU decoder's, in every mode", "[gpu]") {
  if (no_device()) return;
  for (const char* policy : kPolicies)
    for (const Prefill prefill : {Prefill{0}, Prefill{32}, Prefill{1}})
      for (const Positions positions : {Positions::original, Positions::cache}) {
        const CacheOptions options = cache(policy, 48, prefill, positions);
        CudaSequence cuda(tiny(Dtype::f32), {.tokens = 220, .cache = options});
        Decoder cpu(cpu_tiny(), options, 2);
        CAPTURE(policy, prefill.text(), name_of(positions));
        // A near-tie may part them: later rows then differ by what one token of 48 is worth.
        CHECK(relative_error(conversation(cuda), conversation(cpu)) < 1e-3);
        CHECK(cuda.evictions() == cpu.evictions());
        CHECK(cuda.tokens() == 220);
      }
}

TEST_CASE(
    "Sequences of a batch, each with its own budget, guards and mode, pass the three questions",
    "[gpu]") {
  if (no_device()) return;
  const DeviceModel& model = tiny(Dtype::bf16);
  for (const char* policy : kPolicies)
    for (const bool plain : {false, true})
      for (const Positions positions : {Positions::original, Positions::cache}) {
        std::vector<CacheOptions> caches{
            cache(std::string(policy) + ":recent=8", 24, Prefill{0}, positions),
            cache(std::string(policy) + ":sinks=2:recent=25%", 64, Prefill{16}, positions),
            cache(policy, 40, Prefill{1}, positions),
            cache(std::string(policy) + ":sinks=0:recent=0", 1, Prefill{0}, positions)};
        for (std::uint32_t s = 0; s < caches.size(); ++s) {
          caches[s].sequence = s;
          caches[s].seed = 3 + s;
        }
        for (std::uint32_t i = 0; i < 8; ++i) caches[0].budgets.push_back(16 + 4 * i);
        CudaDecoder decoder(model, {.sequences = 4,
                                    .prefill_tokens = 24,
                                    .caches = caches,
                                    .watched = true,
                                    .plain_eviction = plain});
        std::vector<std::unique_ptr<Verifier>> verifiers;
        for (int s = 0; s < 4; ++s) {
          verifiers.push_back(std::make_unique<Verifier>(model.config(),
                                                         caches[static_cast<std::size_t>(s)],
                                                         Dtype::bf16, VerifyOptions{.threads = 2}));
          decoder.watch(s, &verifiers.back()->observer());
        }
        const std::size_t lengths[]{70, 33, 50, 9};
        for (int s = 0; s < 4; ++s) decoder.prefill(s, some_ids(lengths[s], 100 * s));
        decoder.choose(4);
        for (int step = 0; step < 60; ++step) decoder.step(4);
        decoder.prefill(1, some_ids(40, 7));  // a later turn
        decoder.choose(4);
        for (int step = 0; step < 20; ++step) decoder.step(4);
        for (int s = 0; s < 4; ++s) {
          const VerifyReport report = verifiers[static_cast<std::size_t>(s)]->report();
          CAPTURE(policy, plain, name_of(positions), s, report.worst_mass, report.tolerance);
          CHECK(report.identical);
          CHECK(report.first_difference == "");
          CHECK(report.right());
          CHECK(report.wrong_requests == 0);
          CHECK(report.evictions > 0);
        }
      }
}
