// Compares the plan of a model's weights in device memory with the size computed from its config.
#include "engine/cuda/model/weight_plan.hpp"

#include "engine/checkpoint/weight_bytes.hpp"
#include "tests/catch.hpp"

namespace kvlab {
namespace {

TEST_CASE("weights are planned with the bytes that the config gives") {
  for (const std::string name : {"gemma-3-1b", "gpt-oss-20b", "llama-2-7b", "llama-3.2-1b",
                                 "qwen2.5", "qwen3-8b", "smollm2"}) {
    CAPTURE(name);
    const ModelConfig config =
        read_model_config(KVLAB_SOURCE_DIR "/engine/models/configs/" + name + ".json", name);
    double elements = 0;
    for (const WeightPart& part : plan_weights(config, Dtype::bf16, nullptr).parts)
      elements += static_cast<double>(part.elements());
    CHECK(weight_bytes(config, 1) == elements);
  }
}

}  // namespace
}  // namespace kvlab
