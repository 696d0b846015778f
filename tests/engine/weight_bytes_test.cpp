// Tests the size of weights that is computed from a config alone.
#include "engine/checkpoint/weight_bytes.hpp"

#include "tests/catch.hpp"

namespace kvlab {
namespace {

ModelConfig config_of(const std::string& name) {
  return read_model_config(KVLAB_SOURCE_DIR "/engine/models/configs/" + name + ".json", name);
}

TEST_CASE("models have the published numbers of parameters") {
  CHECK(weight_bytes(config_of("llama-2-7b"), 1) == 6'738'415'616.0);
  CHECK(weight_bytes(config_of("llama-3.1-8b"), 1) == 8'030'261'248.0);
  CHECK(weight_bytes(config_of("llama-3.2-1b"), 1) == 1'235'814'400.0);
  CHECK(weight_bytes(config_of("qwen3-8b"), 1) == 8'190'735'360.0);
  CHECK(weight_bytes(config_of("gemma-3-1b"), 1) == 999'885'952.0);
  CHECK(weight_bytes(config_of("gpt-oss-20b"), 1) == 20'914'757'184.0);
  CHECK(weight_bytes(config_of("smollm2"), 1) == 134'515'008.0);
  // The GGUF file has the output matrix a second time, apart from the embedding.
  CHECK(weight_bytes(config_of("qwen2.5"), 1) == 494'032'768.0 + 151936 * 896);
}

TEST_CASE("a step reads no embedding unless it is the head") {
  const ModelConfig separate = config_of("llama-3.1-8b"), tied = config_of("llama-3.2-1b");
  CHECK(weight_bytes(separate, 2) - step_weight_bytes(separate, 2, 1) == 2.0 * 128256 * 4096);
  CHECK(weight_bytes(tied, 2) == step_weight_bytes(tied, 2, 1));
}

TEST_CASE("a step reads the chosen experts, and a large batch reads all") {
  const ModelConfig config = config_of("gpt-oss-20b");
  const double embedding = 201088.0 * 2880, expert = 3.0 * 2880 * 2880;
  const auto read_experts = [&](std::uint32_t batch) {
    const double unread = weight_bytes(config, 1) - embedding - step_weight_bytes(config, 1, batch);
    return 32 - unread / (24 * expert);
  };
  CHECK(read_experts(1) == Approx(4));
  CHECK(read_experts(2) == Approx(4 + 28 * 4 / 32.0));
  CHECK(read_experts(1000) == Approx(32));
}

}  // namespace
}  // namespace kvlab
