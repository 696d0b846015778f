// Compares the CUDA decoder in bfloat16 with transformers in float32. Its error may be at most
// twice that of transformers in bfloat16. See tests/fixtures/make_model_fixtures.py.
#include <cstdlib>

#include "engine/backend.hpp"
#include "engine/cuda/cuda_decoder.hpp"
#include "engine/cuda/cuda_sequence.hpp"
#include "tests/catch.hpp"
#include "tests/engine/expected_logits.hpp"
#include "tests/skip.hpp"

namespace kvlab {
namespace {

constexpr double kMaxOfTheirs = 2;  // the largest allowed ratio of kvlab's error to transformers'

struct Expected {
  std::vector<std::int32_t> ids, rows, columns;
  std::vector<float> logits, bf16_logits;  // [rows, columns]

  /// The chosen rows and columns of logits [ids, vocab].
  std::vector<float> chosen(const std::vector<float>& all, std::size_t vocab) const {
    std::vector<float> result;
    for (const std::int32_t row : rows)
      for (const std::int32_t column : columns)
        result.push_back(
            all.at(static_cast<std::size_t>(row) * vocab + static_cast<std::size_t>(column)));
    return result;
  }
};

Expected expected(const std::string& name) {
  const SafetensorsFile file = test::expected_file(name, "bf16.safetensors");
  const TensorView& narrow = file.at("bf16_logits");
  std::vector<float> wide(narrow.elements());
  to_float(narrow.dtype, narrow.data.data(), wide.size(), wide.data());
  return {test::values<std::int32_t>(file, "ids"), test::values<std::int32_t>(file, "rows"),
          test::values<std::int32_t>(file, "columns"), test::values<float>(file, "logits"),
          std::move(wide)};
}

/// Logits [ids, vocab] of a prompt that is read `chunk` tokens at a time.
std::vector<float> run_prompt(const DeviceModel& model, std::span<const std::int32_t> ids,
                              std::uint32_t chunk) {
  CudaSequence sequence(model,
                        {.tokens = static_cast<std::uint32_t>(ids.size()), .prefill_chunk = chunk});
  std::vector<float> logits;
  sequence.feed(ids, SegmentKind::prompt, &logits);
  return logits;
}

/// Logits [ids, vocab] of a text; each token except the first is a decode step.
std::vector<float> run_steps(const DeviceModel& model, std::span<const std::int32_t> ids) {
  CudaDecoder decoder(
      model,
      {.sequences = 1, .slots = static_cast<std::uint32_t>(ids.size()), .prefill_tokens = 1});
  decoder.prefill(0, ids.first(1));
  std::vector<float> logits = decoder.logits(0);
  for (const std::int32_t id : ids.subspan(1)) {
    decoder.set_next(0, id);
    decoder.feed_next(1);
    const std::vector<float> row = decoder.logits(0);
    logits.insert(logits.end(), row.begin(), row.end());
  }
  return logits;
}

/// Compares kvlab's error with that of transformers in bf16. `ctest -V`, or the test program with
/// -s, shows both errors.
void compare(const std::string& name, const std::filesystem::path& directory) {
  const Expected wanted = expected(name);
  const DeviceModel model = DeviceModel::load(directory);
  REQUIRE(model.dtype() == Dtype::bf16);
  const auto length = static_cast<std::uint32_t>(wanted.ids.size());
  const double theirs = test::relative_error(wanted.bf16_logits, wanted.logits);
  const auto check = [&](const char* way, const std::vector<float>& logits) {
    const double ours =
        test::relative_error(wanted.chosen(logits, model.config().vocab), wanted.logits);
    CAPTURE(name, way, theirs, ours, ours / theirs);
    CHECK(ours <= kMaxOfTheirs * theirs);
  };
  check("prompt at once", run_prompt(model, wanted.ids, length));
  // These two use kvlab's kernels instead of cuBLASLt.
  check("prompt in chunks of 7", run_prompt(model, wanted.ids, 7));
  check("token by token", run_steps(model, wanted.ids));
}

bool no_device() {
  if (has_cuda_device()) return false;
  skip("no CUDA device");
  return true;
}

TEST_CASE("bf16 logits of every family are as close to float32 as transformers' logits", "[gpu]") {
  if (no_device()) return;
  for (const char* name : {"llama3_64", "llama_biases_96", "mistral_128", "qwen2_64", "qwen3_128",
                           "phi3_64", "olmo3_64", "gpt_oss_64", "qwen3_moe_64"})
    compare(name, test::source_path("tests/data/models") / name);
}

TEST_CASE("bf16 logits of the bundled model are as close to float32 as transformers' logits",
          "[gpu]") {
  if (no_device()) return;
  compare("tiny", test::source_path("engine/models/tiny"));
}

TEST_CASE("bf16 logits of the small model are as close to float32 as transformers' logits",
          "[gpu]") {
  if (no_device()) return;
  const char* directory = std::getenv("KVLAB_SMALL_MODEL");
  if (!directory) return skip("KVLAB_SMALL_MODEL is not set");
  compare("small", directory);
}

}  // namespace
}  // namespace kvlab
