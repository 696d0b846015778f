// Compares the CUDA decoder with the CPU decoder and the simulator, for a model with sliding
// windows. The model has heads of size 256, two RoPE tables, norms after blocks and with an offset
// of one, and GELU.
#include "tests/engine/windows/both_sides.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr std::uint32_t kWindow = 100;  // larger than a tile of slots

/// A model in which layers 1 and 3 of 5 have no sliding window.
BothSides& windowed() {
  static BothSides model = [] {
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
    return BothSides(json);
  }();
  return model;
}

}  // namespace

TEST_CASE(
    "Logits of layers with sliding windows equal the CPU decoder's, for every dtype and "
    "chunk size",
    "[gpu]") {
  if (no_device()) return;
  check_logits(windowed(), [](const CudaSequence& sequence, Dtype dtype) {
    const CacheShape heads = windowed().cpu().config().heads();
    const std::uint64_t token_bytes = 2 * heads.kv_heads * heads.head_size * bytes_of(dtype);
    CHECK(sequence.kv_bytes_peak() == (2 * kConversation + 3 * kWindow) * token_bytes);
  });
}

TEST_CASE(
    "Sequences with sliding windows give the same results in a batch as alone, with a graph and "
    "without",
    "[gpu]") {
  if (no_device()) return;
  constexpr int kRows = 9;  // more rows than the kernels for few rows support
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
  const auto together = run(windowed().device(Dtype::f32), true);
  CHECK(run(windowed().device(Dtype::bf16), true) == run(windowed().device(Dtype::bf16), false));
  for (int r = 0; r < kRows; ++r) {
    if (lengths[r] == 0) continue;
    CudaDecoder alone(windowed().device(Dtype::f32),
                      {.sequences = 1, .slots = 400, .prefill_tokens = 64});
    alone.prefill(0, some_ids(lengths[r], kVocab, r));
    alone.choose(1);
    for (int i = 0; i < 8; ++i) alone.step(1);
    CAPTURE(r);
    CHECK(relative_error(together[static_cast<std::size_t>(r)], alone.logits(0)) < kFloatTolerance);
  }
}

TEST_CASE("Layers without a sliding window keep the same tokens as on the CPU, in every mode",
          "[gpu]") {
  if (no_device()) return;
  check_policies(windowed(), {"window", "sink", "lru", "h2o", "random", "h2o:every=16"});
}

TEST_CASE("A batch with sliding windows and a budget per sequence passes verify's three checks",
          "[gpu]") {
  if (no_device()) return;
  for (const char* policy : {"h2o", "lru", "streaming_h2o", "knorm", "h2o:scope=layer"})
    verify_batch(windowed(), policy);
}

TEST_CASE("A trace of layers with sliding windows captured on the device verifies", "[gpu]") {
  if (no_device()) return;
  const TemporaryFolder folder;
  const TraceReader trace = capture_on_device(windowed(), folder.path());
  CHECK(trace.layers_with_window(false) == std::vector<std::uint32_t>{1, 3});
  CHECK_FALSE(trace.has_residuals());
}

TEST_CASE("A sequence with sliding windows cannot be rewound to a position, but can be cleared",
          "[gpu]") {
  if (no_device()) return;
  CudaDecoder decoder(windowed().device(Dtype::f32),
                      {.sequences = 1, .slots = 400, .prefill_tokens = 64});
  CHECK_FALSE(decoder.can_forget());
  decoder.prefill(0, some_ids(150, kVocab));
  const std::vector<float> first = decoder.logits(0);
  CHECK_THROWS_AS(decoder.rewind(0, 149), std::logic_error);
  decoder.rewind(0, 0);
  decoder.prefill(0, some_ids(150, kVocab));
  CHECK(decoder.logits(0) == first);
}

TEST_CASE("Sliding windows and cache positions may share one RoPE table", "[gpu]") {
  if (no_device()) return;
  nlohmann::json json = small_config("Qwen3ForCausalLM", "qwen3", 4, 2, 64);
  json.update(
      {{"use_sliding_window", true}, {"sliding_window", kWindow}, {"max_window_layers", 1}});
  BothSides model(json);
  const ModelConfig& config = model.cpu().config();
  REQUIRE((config.has_windows() && config.rope_tables() == 1));
  const ResolvedConfig options = model.cache("h2o", 48, Prefill{0}, Positions::cache);
  CudaSequence cuda(model.device(Dtype::f32), {.tokens = 400, .cache = options});
  Decoder cpu(model.cpu(), options, 2);
  CHECK(relative_error(conversation(cuda), conversation(cpu)) < 1e-3);
}
