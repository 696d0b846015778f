// A model with random weights on the CPU and on the device, and checks that compare both.
#pragma once

#include <memory>

#include "engine/backend.hpp"
#include "engine/cuda/cuda_decoder.hpp"
#include "engine/cuda/cuda_sequence.hpp"
#include "engine/decoder.hpp"
#include "engine/evaluation/verify.hpp"
#include "tests/catch.hpp"
#include "tests/engine/cuda_fixture.hpp"
#include "tests/engine/expected_logits.hpp"
#include "tests/traces/temporary_folder.hpp"

namespace kvlab::test {

inline constexpr double kFloatTolerance = 2e-5;  // same as for models without sliding windows
inline constexpr double kBf16Tolerance = 0.03;
inline constexpr std::int32_t kVocab = 301;
inline constexpr std::uint32_t kConversation = 390;  ///< tokens

class BothSides {
 public:
  explicit BothSides(const nlohmann::json& config) {
    write_checkpoint(folder_ / "model", config);
    cpu_ = std::make_unique<Model>(Model::load(path(), 2));
  }
  std::filesystem::path path() const { return folder_ / "model"; }
  const Model& cpu() const { return *cpu_; }
  const DeviceModel& device(Dtype dtype) {
    auto found = on_device_.find(dtype);
    if (found == on_device_.end())
      found = on_device_.emplace(dtype, DeviceModel::load(path(), dtype)).first;
    return found->second;
  }
  ResolvedConfig cache(const std::string& policy, std::uint32_t budget, Prefill prefill,
                       Positions positions = Positions::original) const {
    return resolve({.policy = parse_policy(policy),
                    .budget = {.extent = tokens(budget)},
                    .prefill = prefill,
                    .positions = positions,
                    .seed = 11},
                   400, 0, cpu().config().heads());
  }

 private:
  TemporaryFolder folder_;
  std::unique_ptr<Model> cpu_;
  std::map<Dtype, DeviceModel> on_device_;
};

/// The logits of every token of a conversation: a prompt, decoded tokens, a second prompt and its
/// decoded tokens.
inline std::vector<float> conversation(SequenceDecoder& decoder) {
  std::vector<float> all, some;
  const auto feed = [&](std::size_t count, int first, SegmentKind kind) {
    decoder.feed(some_ids(count, kVocab, first), kind, &some);
    all.insert(all.end(), some.begin(), some.end());
  };
  feed(170, 0, SegmentKind::prompt);
  feed(120, 500, SegmentKind::decode);
  feed(70, 900, SegmentKind::prompt);
  feed(30, 1300, SegmentKind::decode);
  return all;
}

/// Compares the device's logits with the CPU's, for two dtypes and several sizes of chunks. Calls
/// after(sequence, dtype) for each sequence on the device at its end.
template <class After>
void check_logits(BothSides& model, After after, double bf16_tolerance = kBf16Tolerance) {
  Decoder cpu(model.cpu(), {}, 2);
  const std::vector<float> expected = conversation(cpu);
  for (const auto& [dtype, tolerance] :
       {std::pair{Dtype::f32, kFloatTolerance}, {Dtype::bf16, bf16_tolerance}})
    for (const std::uint32_t chunk : {512u, 64u, 7u, 1u}) {
      CudaSequence sequence(model.device(dtype), {.tokens = 400, .prefill_chunk = chunk});
      CAPTURE(torch_name(dtype), chunk);
      CHECK(relative_error(conversation(sequence), expected) < tolerance);
      after(sequence, dtype);
    }
}

inline void check_policies(BothSides& model, std::initializer_list<const char*> policies) {
  for (const char* policy : policies)
    for (const Prefill prefill : {Prefill{0}, Prefill{32}, Prefill{1}})
      for (const Positions positions : {Positions::original, Positions::cache}) {
        const ResolvedConfig options = model.cache(policy, 48, prefill, positions);
        CudaSequence cuda(model.device(Dtype::f32), {.tokens = 400, .cache = options});
        Decoder cpu(model.cpu(), options, 2);
        CAPTURE(policy, prefill.text(), name_of(positions));
        CHECK(relative_error(conversation(cuda), conversation(cpu)) < 1e-3);
        CHECK(cuda.evictions() == cpu.evictions());
        CHECK(cuda.kept() == cpu.kept());
      }
}

/// Runs the checks of `kvlab verify` on a batch of three sequences with different budgets.
inline void verify_batch(BothSides& both, const char* policy) {
  const DeviceModel& model = both.device(Dtype::bf16);
  const Positions positions = parse_policy(policy).entry->info.positions;
  const std::vector<ResolvedConfig> caches{both.cache(policy, 24, Prefill{0}, positions),
                                           both.cache(policy, 70, Prefill{16}, positions),
                                           both.cache(policy, 40, Prefill{1}, positions)};
  CudaDecoder decoder(
      model,
      {.sequences = 3, .slots = 400, .prefill_tokens = 32, .caches = caches, .watched = true});
  std::vector<std::unique_ptr<Verifier>> verifiers;
  for (int s = 0; s < 3; ++s) {
    verifiers.push_back(std::make_unique<Verifier>(
        model.config(), caches[static_cast<std::size_t>(s)], model.dtype(),
        VerifyOptions{.threads = 2}, model.output_projections()));
    decoder.watch(s, &verifiers.back()->observer());
  }
  const std::size_t lengths[]{130, 33, 50};
  for (int s = 0; s < 3; ++s) decoder.prefill(s, some_ids(lengths[s], kVocab, 100 * s));
  decoder.choose(3);
  for (int step = 0; step < 60; ++step) decoder.step(3);
  decoder.prefill(1, some_ids(90, kVocab, 7));
  decoder.choose(3);
  for (int step = 0; step < 20; ++step) decoder.step(3);
  for (int s = 0; s < 3; ++s) {
    const VerifyReport report = verifiers[static_cast<std::size_t>(s)]->report();
    CAPTURE(policy, s, report.worst_mass, report.tolerance, report.outputs.layer,
            report.outputs.worst_error, report.outputs.tolerance);
    CHECK(report.outputs.rows > 0);
    CHECK(report.outputs.right());
    CHECK(report.identical);
    CHECK(report.first_difference == "");
    CHECK(report.right());
    CHECK(report.evictions > 0);
  }
}

/// Captures a trace on the device, in `folder`, and checks that it verifies.
inline TraceReader capture_on_device(BothSides& model, const std::filesystem::path& folder) {
  TraceWriter writer(folder / "trace", cuda_trace_header(model.device(Dtype::bf16), {}));
  CudaSequence sequence(model.device(Dtype::bf16), {.tokens = 400, .writer = &writer});
  sequence.feed(some_ids(150, kVocab), SegmentKind::prompt);
  Sampler sampler({});
  sequence.extend(sampler, 40, [](std::int32_t) { return true; });
  sequence.flush();
  writer.finish();
  TraceReader trace = TraceReader::open(folder / "trace");
  CHECK(verify_trace(trace, 2).ok);
  return trace;
}

}  // namespace kvlab::test
