// Compares the CUDA decoder with the CPU decoder: logits, batches, graphs, texts and traces.
#include "engine/cuda/cuda_decoder.hpp"

#include <cmath>

#include "engine/backend.hpp"
#include "engine/cuda/cuda_sequence.hpp"
#include "engine/cuda/model/weight_plan.hpp"
#include "engine/decoder.hpp"
#include "sim/replay.hpp"
#include "tests/catch.hpp"
#include "tests/engine/cuda_fixture.hpp"
#include "tests/engine/expected_logits.hpp"
#include "tests/error_of.hpp"
#include "tests/skip.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"

using namespace kvlab;
using Catch::Matchers::ContainsSubstring;
using kvlab::test::error_of;
using test::relative_error;

namespace {

// The largest allowed errors of logits, relative to those of the CPU decoder, which computes in
// float32 from the same weights.
constexpr double kFloatTolerance = 2e-5;  // float32: only the order of sums differs
// Twice the error of transformers in bf16 on this model (0.0066).
constexpr double kBf16Tolerance = 2 * 0.0066;
constexpr double kF16Tolerance = kBf16Tolerance / 8;  // fp16 has three more bits

std::vector<float> all_logits_on_cpu(const Model& model, const Ids& ids) {
  Decoder decoder(model, {}, 2);
  std::vector<float> logits;
  decoder.feed(ids, SegmentKind::prompt, &logits);
  return logits;
}

std::span<const float> row(const std::vector<float>& logits, std::size_t index, std::size_t vocab) {
  return std::span(logits).subspan(index * vocab, vocab);
}

/// The sampled ids of a step, and the logits from which they were sampled.
struct Sampled {
  std::vector<std::int32_t> ids;
  std::vector<std::vector<float>> logits;  // by row
  bool operator==(const Sampled&) const = default;
};

/// Runs `steps` greedy steps of all rows after prompts of these lengths. A row of length 0 has no
/// prompt.
std::vector<Sampled> run_batch(const DeviceModel& model, const std::vector<std::size_t>& lengths,
                               int steps, bool graph, std::uint32_t chunk = 64) {
  const auto rows = static_cast<int>(lengths.size());
  CudaDecoder decoder(model, {.sequences = rows, .slots = 400, .prefill_tokens = chunk});
  for (int r = 0; r < rows; ++r) {
    const std::size_t length = lengths[static_cast<std::size_t>(r)];
    if (length > 0) decoder.prefill(r, some_ids(length, 8192, r));
  }
  decoder.choose(rows);
  std::vector<Sampled> result;
  for (int step = 0; step < steps; ++step) {
    if (graph)
      decoder.step(rows);
    else
      decoder.step_plain(rows);
    const auto ids = decoder.ids(decoder.published() - 1);
    Sampled sampled{.ids = {ids.begin(), ids.end()}, .logits = {}};
    for (int r = 0; r < rows; ++r) sampled.logits.push_back(decoder.logits(r));
    result.push_back(std::move(sampled));
  }
  return result;
}

Ids generate(SequenceDecoder& decoder, const Ids& prompt, std::uint32_t count,
             SamplingOptions sampling) {
  decoder.feed(prompt, SegmentKind::prompt);
  Sampler sampler(sampling);
  Ids ids;
  decoder.extend(sampler, count, [&](std::int32_t id) {
    ids.push_back(id);
    return true;
  });
  return ids;
}

}  // namespace

namespace {

/// An append that writes nothing and attends to nothing.
class Nothing final : public DeviceAppend {
 public:
  using DeviceAppend::DeviceAppend;

 private:
  kernels::RopeWriteArgs write_part(std::uint32_t, const PromptChunk&) override { return {}; }
  void attend_part(std::uint32_t, const PromptChunk&, const LayerOutputs&) override {}
};

}  // namespace

TEST_CASE("An append is written layer by layer and chunk by chunk; other orders are refused") {
  const PromptChunk first{.first = 0, .rows = 4}, last{.first = 4, .rows = 1};
  Nothing append(2, 5);
  CHECK_THROWS_AS(append.attend(0, first, {}), std::logic_error);
  CHECK_THROWS_AS(append.write(0, last), std::logic_error);
  for (const std::uint32_t layer : {0u, 1u})
    for (const PromptChunk& part : {first, last}) {
      CHECK_THROWS_AS(append.finish(), std::logic_error);
      CHECK_THROWS_AS(append.write(1 - layer, part), std::logic_error);
      CHECK_NOTHROW(append.write(layer, part));
      CHECK_THROWS_AS(append.write(layer, part), std::logic_error);
      CHECK_NOTHROW(append.attend(layer, part, {}));
    }
  CHECK_NOTHROW(append.finish());
  CHECK_THROWS_AS(append.write(2, first), std::logic_error);
}

TEST_CASE("Placing a layout takes as many bytes as measuring it returns") {
  struct Parts {
    Parts(cuda::Arena& arena, std::size_t count)
        : bytes(arena.take<std::byte>(count)),
          none(arena.take<double>(0)),
          doubles(arena.take<double>(count)) {}
    std::byte* bytes;
    double *none, *doubles;
  };
  CHECK(cuda::Placed<Parts>::bytes(std::size_t{3}) == 512);
  CHECK(cuda::Placed<Parts>::bytes(std::size_t{257}) == 512 + 2304);
  alignas(256) std::byte memory[512];
  cuda::Arena arena(memory);
  const Parts parts(arena, 3);
  CHECK(parts.bytes == memory);
  CHECK(parts.none == nullptr);
  CHECK(static_cast<void*>(parts.doubles) == memory + 256);
  CHECK(arena.bytes() == sizeof memory);
}

TEST_CASE("Logits of a prompt equal the CPU decoder's, for every dtype and chunk size", "[gpu]") {
  if (no_device()) return;
  const Ids ids = some_ids(300);
  const std::vector<float> expected = all_logits_on_cpu(cpu_tiny(), ids);
  for (const auto& [dtype, tolerance] : {std::pair{Dtype::f32, kFloatTolerance},
                                         {Dtype::bf16, kBf16Tolerance},
                                         {Dtype::f16, kF16Tolerance}})
    for (const std::uint32_t chunk : {512u, 64u, 7u, 1u}) {
      CudaSequence sequence(tiny(dtype), {.tokens = 300, .prefill_chunk = chunk});
      std::vector<float> logits;
      const auto last = sequence.feed(ids, SegmentKind::prompt, &logits);
      CAPTURE(torch_name(dtype), chunk);
      CHECK(relative_error(logits, expected) < tolerance);
      CHECK(relative_error(last, row(expected, 299, 8192)) < tolerance);
    }
}

TEST_CASE("Decoding token by token gives the logits of a prompt", "[gpu]") {
  if (no_device()) return;
  const Ids ids = some_ids(140);
  const std::vector<float> expected = all_logits_on_cpu(cpu_tiny(), ids);
  for (const auto& [dtype, tolerance] :
       {std::pair{Dtype::f32, kFloatTolerance}, {Dtype::bf16, kBf16Tolerance}}) {
    CudaDecoder decoder(tiny(dtype), {.sequences = 1, .slots = 140, .prefill_tokens = 64});
    decoder.prefill(0, std::span(ids).first(1));
    double worst = relative_error(decoder.logits(0), row(expected, 0, 8192));
    for (std::size_t i = 1; i < ids.size(); ++i) {
      decoder.set_next(0, ids[i]);
      decoder.feed_next(1);
      worst = std::max(worst, relative_error(decoder.logits(0), row(expected, i, 8192)));
    }
    CAPTURE(torch_name(dtype));
    CHECK(worst < 2 * tolerance);  // twice, because `worst` is the error of a single token
    CHECK(decoder.tokens(0) == 140);
  }
}

TEST_CASE("A sequence gives the same results in a batch of unequal lengths as alone", "[gpu]") {
  if (no_device()) return;
  const std::vector<std::size_t> lengths{1, 17, 64, 65, 0, 300, 128, 2, 33, 90, 7, 200};
  // 12 rows use cuBLASLt, and fewer rows use kvlab's kernels.
  for (const std::size_t rows : {std::size_t{3}, std::size_t{8}, std::size_t{12}}) {
    const std::vector<std::size_t> batch(lengths.begin(),
                                         lengths.begin() + static_cast<std::ptrdiff_t>(rows));
    const auto together = run_batch(tiny(Dtype::f32), batch, 6, true);
    for (std::size_t r = 0; r < rows; ++r) {
      if (lengths[r] == 0) continue;
      CudaDecoder alone(tiny(Dtype::f32), {.sequences = 1, .slots = 400, .prefill_tokens = 64});
      alone.prefill(0, some_ids(lengths[r], 8192, static_cast<std::int32_t>(r)));
      alone.choose(1);
      for (const Sampled& step : together) {
        alone.step(1);
        CAPTURE(rows, r);
        CHECK(relative_error(step.logits[r], alone.logits(0)) < kFloatTolerance);
        CHECK(step.ids[r] == alone.ids(alone.published() - 1)[0]);
      }
    }
  }
}

TEST_CASE("A replayed graph gives the same bits as single launches", "[gpu]") {
  if (no_device()) return;
  for (const std::vector<std::size_t>& lengths :
       {std::vector<std::size_t>{40}, {3, 50, 0, 300}, {1, 2, 3, 4, 5, 6, 7, 8, 9}}) {
    const auto plain = run_batch(tiny(Dtype::bf16), lengths, 20, false);
    const auto replayed = run_batch(tiny(Dtype::bf16), lengths, 20, true);
    CAPTURE(lengths.size());
    for (std::size_t r = 0; r < lengths.size(); ++r) {
      if (lengths[r] == 0) continue;
      for (std::size_t step = 0; step < plain.size(); ++step) {
        CHECK(plain[step].ids[r] == replayed[step].ids[r]);
        CHECK((plain[step].logits[r] == replayed[step].logits[r]));
      }
    }
  }
}

TEST_CASE("A batch small enough for a race checker, plain and as a graph", "[gpu][small]") {
  if (no_device()) return;
  const std::vector<std::size_t> lengths{3, 0, 9};
  CHECK((run_batch(tiny(Dtype::bf16), lengths, 2, false, 4)[1].ids[2] ==
         run_batch(tiny(Dtype::bf16), lengths, 2, true, 4)[1].ids[2]));
}

TEST_CASE("Texts equal the CPU decoder's, greedy and sampled", "[gpu]") {
  if (no_device()) return;
  for (const SamplingOptions& sampling :
       {SamplingOptions{},
        SamplingOptions{.temperature = 0.8, .top_k = 40, .top_p = 0.95, .seed = 5}}) {
    Decoder cpu(cpu_tiny(), {}, 2);
    CudaSequence cuda(tiny(Dtype::f32), {.tokens = 200});
    const Ids prompt = some_ids(50);
    CAPTURE(sampling.temperature);
    CHECK(generate(cuda, prompt, 100, sampling) == generate(cpu, prompt, 100, sampling));
    CHECK(cuda.tokens() == cpu.tokens());
  }
}

TEST_CASE("Sampling stops on request, and drops tokens that were decoded ahead", "[gpu]") {
  if (no_device()) return;
  const Ids prompt = some_ids(30), turn = some_ids(9, 8192, 77);
  const auto talk = [&](SequenceDecoder& decoder, Sampler& sampler) {
    Ids ids;
    const auto stop_at = [&](std::size_t count) {
      return [&ids, count](std::int32_t id) {
        ids.push_back(id);
        return ids.size() < count;
      };
    };
    decoder.feed(prompt, SegmentKind::prompt);
    decoder.extend(sampler, 50, stop_at(7));
    decoder.feed({&ids.back(), 1}, SegmentKind::decode);
    decoder.feed(turn, SegmentKind::prompt);
    decoder.extend(sampler, 1, stop_at(100));
    decoder.feed({&ids.back(), 1}, SegmentKind::decode);
    decoder.extend(sampler, 20, stop_at(100));
    ids.push_back(static_cast<std::int32_t>(decoder.tokens()));
    return ids;
  };
  Decoder cpu(cpu_tiny(), {}, 2);
  CudaSequence cuda(tiny(Dtype::f32), {.tokens = 100});
  Sampler one({.temperature = 0.7, .seed = 3}), other({.temperature = 0.7, .seed = 3});
  CHECK(talk(cuda, one) == talk(cpu, other));
  CHECK(one.counter() == other.counter());
}

TEST_CASE("The CUDA decoder supports biases, q/k norms, untied heads, all head sizes and groups",
          "[gpu]") {
  if (no_device()) return;
  auto biased = small_config("LlamaForCausalLM", "llama", 4, 4, 64);
  biased["attention_bias"] = biased["mlp_bias"] = true;
  auto scaled = small_config("LlamaForCausalLM", "llama", 8, 1, 128);
  scaled["rope_scaling"] = {
      {"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32}};
  auto tied = small_config("Qwen2ForCausalLM", "qwen2", 7, 1, 64);
  tied["tie_word_embeddings"] = true;
  for (const nlohmann::json& json :
       {small_config("LlamaForCausalLM", "llama", 6, 2, 96), biased, scaled, tied,
        small_config("Qwen3ForCausalLM", "qwen3", 4, 2, 128)}) {
    const test::TemporaryFolder folder;
    write_checkpoint(folder / "model", json);
    const Model model = Model::load(folder / "model", 2);
    const DeviceModel device = DeviceModel::load(folder / "model");
    const Ids ids = some_ids(90, 301);
    const std::vector<float> expected = all_logits_on_cpu(model, ids);
    for (const std::uint32_t chunk : {90u, 5u}) {  // 90 uses cuBLASLt, and 5 kvlab's kernels
      CudaSequence sequence(device, {.tokens = 90, .prefill_chunk = chunk});
      std::vector<float> logits;
      sequence.feed(std::span(ids).first(60), SegmentKind::prompt);
      sequence.feed(std::span(ids).subspan(60), SegmentKind::decode, &logits);
      CAPTURE(json.dump(), chunk);
      CHECK(relative_error(logits, std::span(expected).subspan(60 * 301)) < kFloatTolerance);
    }
    ResolvedConfig cache_positions;
    cache_positions.policy = parse_policy("sink");
    cache_positions.budget_tokens = 30;
    cache_positions.positions = Positions::cache;
    const auto cache_position_logits = [&](SequenceDecoder&& decoder) {
      std::vector<float> logits, turn_logits;
      decoder.feed(std::span(ids).first(60), SegmentKind::prompt);
      decoder.feed(std::span(ids).subspan(60, 20), SegmentKind::decode, &logits);
      decoder.feed(std::span(ids).subspan(80), SegmentKind::prompt, &turn_logits);
      logits.insert(logits.end(), turn_logits.begin(), turn_logits.end());
      return logits;
    };
    CAPTURE(json.dump());
    CHECK(relative_error(
              cache_position_logits(CudaSequence(device, {.tokens = 90, .cache = cache_positions})),
              cache_position_logits(Decoder(model, cache_positions, 2))) < 1e-3);
  }
}

TEST_CASE("A trace captured on the device verifies, and equals the CPU's", "[gpu]") {
  if (no_device()) return;
  const test::TemporaryFolder folder;
  const Ids prompt = some_ids(1010), turn = some_ids(70, 8192, 5);
  const auto capture = [&](Backend& backend, const std::filesystem::path& path, const Ids& answer) {
    TraceWriter writer(path, backend.trace_header({{"test", true}}));
    std::uint32_t written = 0;
    const auto decoder =
        backend.capturing_decoder({}, 1200, writer, [&](std::uint32_t n) { written = n; });
    decoder->feed(prompt, SegmentKind::prompt);
    Ids ids = answer;
    if (answer.empty()) {
      Sampler sampler({});
      decoder->extend(sampler, 41, [&](std::int32_t id) {
        ids.push_back(id);
        return ids.size() < 31;  // stops while later tokens have already been decoded
      });
      decoder->feed({&ids.back(), 1}, SegmentKind::decode);
    } else {
      decoder->feed(ids, SegmentKind::decode);
    }
    decoder->feed(turn, SegmentKind::prompt);
    decoder->flush();
    writer.finish();
    CHECK(written == 1010 + 31 + 70);
    return ids;
  };
  const auto cuda = load_backend(Device::cuda, kTiny, 2), cpu = load_backend(Device::cpu, kTiny, 2);
  const Ids answer = capture(*cuda, folder / "cuda", {});
  capture(*cpu, folder / "cpu", answer);

  const TraceReader trace = TraceReader::open(folder / "cuda"),
                    other = TraceReader::open(folder / "cpu");
  const TraceCheck check = verify_trace(trace, 2);
  CAPTURE(check.problems);
  CHECK(check.ok);
  CHECK(check.worst_out < 1e-2);
  CHECK(check.worst_lse < 1e-2);
  CHECK(trace.header().shape.dtype == Dtype::bf16);
  CHECK(trace.header().rounding == Rounding::model_dtype);
  CHECK(trace.ids() == other.ids());
  CHECK(trace.segments() == other.segments());
  CHECK(trace.shards().size() == 2);
  for (const Part part : {Part::q, Part::k, Part::v})
    for (std::uint32_t layer = 0; layer < trace.shape().layers; ++layer) {
      std::vector<float> a(trace.tokens() * 64), b(a.size());
      trace.read(part, layer, 1, 0, trace.tokens(), a.data());
      other.read(part, layer, 1, 0, trace.tokens(), b.data());
      CHECK(relative_error(a, b) < kBf16Tolerance);
    }

  const CacheConfig config{.policy = parse_policy("h2o"), .budget = parse_budget("64")};
  const ReplayResult a = replay(trace, 0, {&config, 1}, {}), b = replay(other, 0, {&config, 1}, {});
  REQUIRE(a.measurements.size() == b.measurements.size());
  for (std::size_t i = 0; i < a.measurements.size(); ++i)
    if (a.measurements[i].metric == "recall" && a.measurements[i].layer == -1)
      CHECK(std::fabs(a.measurements[i].value - b.measurements[i].value) < 2e-3);
}

TEST_CASE("The next chunk does not overwrite data that a capture copies", "[gpu]") {
  if (no_device()) return;
  LayerOutputMemory memory(capture_shape(tiny(Dtype::bf16).config(), Dtype::bf16),
                           {.chunk = 4, .step = 1}, true, nullptr);
  // These are the six layers of two chunks, for a model with three layers. The number of layers is
  // odd, so that alternating buffers would collide if each chunk began with the same one.
  std::vector<const void*> places;
  for (int chunk = 0; chunk < 6; ++chunk) places.push_back(memory.next_chunk(4).qkv);
  for (std::size_t i = 1; i < places.size(); ++i) CHECK(places[i] != places[i - 1]);
}

TEST_CASE("A trace that cannot be written fails the capture, and does not look complete", "[gpu]") {
  if (no_device()) return;
  const test::TemporaryFolder folder;
  const DeviceModel& model = tiny(Dtype::bf16);
  TraceWriter writer(folder / "trace", cuda_trace_header(model, {}));
  CudaSequence sequence(model, {.tokens = 2100, .writer = &writer});
  std::filesystem::remove_all(folder / "trace");
  CHECK_THROWS_AS(
      [&] {
        for (int i = 0; i < 2; ++i) sequence.feed(some_ids(1050), SegmentKind::prompt);
        sequence.flush();
      }(),
      std::runtime_error);
  CHECK_FALSE(std::filesystem::exists(folder / "trace" / "manifest.json"));
}

TEST_CASE("Logits that are not finite end the text with an error", "[gpu]") {
  if (no_device()) return;
  const test::TemporaryFolder folder;
  write_checkpoint(folder / "model", small_config("LlamaForCausalLM", "llama", 2, 2, 64), 3e37f);
  const DeviceModel model = DeviceModel::load(folder / "model");
  CudaSequence sequence(model, {.tokens = 40});
  CHECK_THROWS_AS(generate(sequence, some_ids(9, 301), 20, {}), std::runtime_error);
  CHECK_NOTHROW(sequence.flush());
}

TEST_CASE("A request that does not fit is refused", "[gpu]") {
  if (no_device()) return;
  const auto refusal = [](auto action) { return error_of<std::exception>(action); };
  const DeviceModel& model = tiny(Dtype::bf16);
  CHECK_THAT(refusal([&] { CudaDecoder(model, {.sequences = 64, .slots = 1u << 26}); }),
             ContainsSubstring("tokens would fit"));
  CHECK_THAT(
      refusal([&] { CudaSequence(model, {.tokens = 10}).feed(some_ids(11), SegmentKind::prompt); }),
      ContainsSubstring("11 tokens"));
  CHECK_THAT(
      refusal([&] { CudaSequence(model, {.tokens = 10}).feed(Ids{8192}, SegmentKind::prompt); }),
      ContainsSubstring("outside the vocabulary"));
  CHECK_THAT(refusal([&] { DeviceModel::load(KVLAB_SOURCE_DIR "/tests/data/models/qwen2"); }),
             ContainsSubstring("head size 16"));
}
