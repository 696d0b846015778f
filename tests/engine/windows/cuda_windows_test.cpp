// The CUDA decoder of a model whose layers see windows, against the CPU's and under the simulator's
// eyes: heads of 256, two tables of RoPE, norms behind blocks and above one, GELU.
#include "engine/backend.hpp"
#include "engine/cuda/cuda_decoder.hpp"
#include "engine/cuda/cuda_sequence.hpp"
#include "engine/decoder.hpp"
#include "engine/loop/verify.hpp"
#include "tests/catch.hpp"
#include "tests/engine/cuda_fixture.hpp"
#include "tests/engine/expected_logits.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/trace.hpp"

using namespace kvlab;
using test::relative_error;

namespace {

constexpr double kFloatTolerance = 2e-5;  // as for models without windows
constexpr double kBf16Tolerance = 0.03;
constexpr std::int32_t kVocab = 301;
constexpr std::uint32_t kWindow = 100;  // more than a tile of slots

/// Layers 1 and 3 of 5 see all tokens.
class Windowed {
 public:
  Windowed() {
    nlohmann::json json = small_config("Gemma3ForCausalLM", "gemma3_text", 4, 2, 256);
    json.erase("hidden_act");
    json.update({{"hidden_activation", "gelu_pytorch_tanh"},
                 {"num_hidden_layers", 5},
                 {"query_pre_attn_scalar", 200},
                 {"sliding_window", kWindow},
                 {"rope_local_base_freq", 300.0},
                 {"layer_types", nlohmann::json::array()}});
    for (const bool full : {false, true, false, true, false})
      json["layer_types"].push_back(full ? "full_attention" : "sliding_attention");
    write_checkpoint(folder_ / "model", json);
  }
  std::filesystem::path path() const { return folder_ / "model"; }

 private:
  test::TemporaryFolder folder_;
};

const Windowed& checkpoint() {
  static const Windowed written;
  return written;
}
const Model& on_cpu() {
  static const Model model = Model::load(checkpoint().path(), 2);
  return model;
}
const DeviceModel& on_device(Dtype dtype) {
  static std::map<Dtype, DeviceModel> models;
  auto found = models.find(dtype);
  if (found == models.end())
    found = models.emplace(dtype, DeviceModel::load(checkpoint().path(), dtype)).first;
  return found->second;
}

ResolvedConfig cache(const std::string& policy, std::uint32_t budget, Prefill prefill,
                     Positions positions = Positions::original) {
  return resolve({.policy = parse_policy(policy),
                  .budget = {.extent = tokens(budget)},
                  .prefill = prefill,
                  .positions = positions,
                  .seed = 11},
                 400, 0, on_cpu().config().heads());
}

/// A prompt, decoded tokens, a second turn and its answer: logits of every token.
std::vector<float> conversation(SequenceDecoder& decoder) {
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

void check_parity(const VerifyReport& report) {
  CAPTURE(report.worst_mass, report.tolerance);
  CHECK(report.identical);
  CHECK(report.first_difference == "");
  CHECK(report.right());
  CHECK(report.evictions > 0);
}

}  // namespace

TEST_CASE("Logits of layers with windows are the CPU decoder's, in every dtype and chunk",
          "[gpu]") {
  if (no_device()) return;
  Decoder cpu(on_cpu(), {}, 2);
  const std::vector<float> expected = conversation(cpu);
  for (const auto& [dtype, tolerance] :
       {std::pair{Dtype::f32, kFloatTolerance}, {Dtype::bf16, kBf16Tolerance}})
    for (const std::uint32_t chunk : {512u, 64u, 7u, 1u}) {
      CudaSequence sequence(on_device(dtype), {.tokens = 400, .prefill_chunk = chunk});
      CAPTURE(torch_name(dtype), chunk);
      CHECK(relative_error(conversation(sequence), expected) < tolerance);
      const CacheShape heads = on_cpu().config().heads();
      const std::uint64_t of_token = 2 * heads.kv_heads * heads.head_size * bytes_of(dtype);
      CHECK(sequence.kv_bytes_peak() == (2 * 390 + 3 * kWindow) * of_token);
    }
}

TEST_CASE("Sequences with windows decode in a batch as they do alone, replayed and plain",
          "[gpu]") {
  if (no_device()) return;
  constexpr int kRows = 9;  // more than the products of a few rows take
  const std::size_t lengths[kRows]{1, 99, 100, 0, 101, 250, 64, 3, 199};
  const auto run = [&](const DeviceModel& model, bool graph) {
    CudaDecoder decoder(model, {.sequences = kRows, .slots = 400, .prefill_tokens = 64});
    for (int r = 0; r < kRows; ++r)
      if (lengths[r] > 0) decoder.prefill(r, some_ids(lengths[r], kVocab, r));
    decoder.choose(kRows);
    for (int i = 0; i < 8; ++i) graph ? decoder.step(kRows) : decoder.step_plain(kRows);
    std::vector<std::vector<float>> logits;
    for (int r = 0; r < kRows; ++r) logits.push_back(decoder.logits(r));
    return logits;
  };
  const auto together = run(on_device(Dtype::f32), true);
  CHECK(run(on_device(Dtype::bf16), true) == run(on_device(Dtype::bf16), false));
  for (int r = 0; r < kRows; ++r) {
    if (lengths[r] == 0) continue;
    CudaDecoder alone(on_device(Dtype::f32), {.sequences = 1, .slots = 400, .prefill_tokens = 64});
    alone.prefill(0, some_ids(lengths[r], kVocab, r));
    alone.choose(1);
    for (int i = 0; i < 8; ++i) alone.step(1);
    CAPTURE(r);
    CHECK(relative_error(together[static_cast<std::size_t>(r)], alone.logits(0)) < kFloatTolerance);
  }
}

TEST_CASE("Policies act on the layers without a window, as on the CPU, in every mode", "[gpu]") {
  if (no_device()) return;
  for (const char* policy : {"window", "sink", "lru", "h2o", "random", "h2o:every=16"})
    for (const Prefill prefill : {Prefill{0}, Prefill{32}, Prefill{1}})
      for (const Positions positions : {Positions::original, Positions::cache}) {
        const ResolvedConfig options = cache(policy, 48, prefill, positions);
        CudaSequence cuda(on_device(Dtype::f32), {.tokens = 400, .cache = options});
        Decoder cpu(on_cpu(), options, 2);
        CAPTURE(policy, prefill.text(), name_of(positions));
        CHECK(relative_error(conversation(cuda), conversation(cpu)) < 1e-3);
        CHECK(cuda.evictions() == cpu.evictions());
        CHECK(cuda.kept() == cpu.kept());
      }
}

TEST_CASE("A batch with windows, each sequence with its own budget, passes the three questions",
          "[gpu]") {
  if (no_device()) return;
  const DeviceModel& model = on_device(Dtype::bf16);
  for (const char* policy : {"h2o", "lru", "streaming_h2o", "knorm", "h2o:scope=layer"}) {
    const Positions positions = parse_policy(policy).entry->info.positions;
    const std::vector<ResolvedConfig> caches{cache(policy, 24, Prefill{0}, positions),
                                             cache(policy, 70, Prefill{16}, positions),
                                             cache(policy, 40, Prefill{1}, positions)};
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
      CAPTURE(policy, s);
      check_parity(verifiers[static_cast<std::size_t>(s)]->report());
    }
  }
}

TEST_CASE("A trace of layers with windows that was captured on the device verifies", "[gpu]") {
  if (no_device()) return;
  const test::TemporaryFolder folder;
  {
    TraceWriter writer(folder / "trace", cuda_trace_header(on_device(Dtype::bf16), {}));
    CudaSequence sequence(on_device(Dtype::bf16), {.tokens = 400, .writer = &writer});
    sequence.feed(some_ids(150, kVocab), SegmentKind::prompt);
    Sampler sampler({});
    sequence.extend(sampler, 40, [](std::int32_t) { return true; });
    sequence.flush();
    writer.finish();
  }
  const TraceReader trace = TraceReader::open(folder / "trace");
  CHECK(trace.layers_with_span(false) == std::vector<std::uint32_t>{1, 3});
  CHECK_FALSE(trace.has_residuals());
  CHECK(verify_trace(trace, 2).ok);
}

TEST_CASE("What a window has left behind cannot be fed again, but all can be forgotten", "[gpu]") {
  if (no_device()) return;
  CudaDecoder decoder(on_device(Dtype::f32), {.sequences = 1, .slots = 400, .prefill_tokens = 64});
  CHECK_FALSE(decoder.can_forget());
  decoder.prefill(0, some_ids(150, kVocab));
  const std::vector<float> first = decoder.logits(0);
  CHECK_THROWS_AS(decoder.rewind(0, 149), std::logic_error);
  decoder.rewind(0, 0);
  decoder.prefill(0, some_ids(150, kVocab));
  CHECK(decoder.logits(0) == first);
}

TEST_CASE("Windows and squeezed positions may share one table of RoPE", "[gpu]") {
  if (no_device()) return;
  nlohmann::json json = small_config("Qwen3ForCausalLM", "qwen3", 4, 2, 64);
  json.update(
      {{"use_sliding_window", true}, {"sliding_window", kWindow}, {"max_window_layers", 1}});
  const test::TemporaryFolder folder;
  write_checkpoint(folder / "model", json);
  const Model model = Model::load(folder / "model", 2);
  const DeviceModel device = DeviceModel::load(folder / "model");
  REQUIRE((model.config().has_spans() && model.config().rope_tables() == 1));
  const ResolvedConfig options = cache("h2o", 48, Prefill{0}, Positions::cache);
  CudaSequence cuda(device, {.tokens = 400, .cache = options});
  Decoder cpu(model, options, 2);
  CHECK(relative_error(conversation(cuda), conversation(cpu)) < 1e-3);
}
