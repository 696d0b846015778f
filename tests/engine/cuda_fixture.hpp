// The bundled model on the CPU and on the device, and checkpoints of random weights, for tests of
// the CUDA decoder.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "engine/backend.hpp"
#include "engine/checkpoint/model.hpp"
#include "engine/cuda/model/weight_plan.hpp"
#include "tests/skip.hpp"
#include "traces/base/safetensors.hpp"

namespace kvlab {

using Ids = std::vector<std::int32_t>;

inline const std::string kTiny = KVLAB_SOURCE_DIR "/engine/models/tiny";

inline bool no_device() {
  if (has_cuda_device()) return false;
  skip("no CUDA device");
  return true;
}

inline const Model& cpu_tiny() {
  static const Model model = Model::load(kTiny, 2);
  return model;
}

inline const DeviceModel& tiny(Dtype dtype) {
  static std::map<Dtype, DeviceModel> models;
  auto found = models.find(dtype);
  if (found == models.end()) found = models.emplace(dtype, DeviceModel::load(kTiny, dtype)).first;
  return found->second;
}

inline Ids some_ids(std::size_t count, std::int32_t vocab = 8192, std::int64_t first = 0) {
  Ids ids{0};
  while (ids.size() < count)
    ids.push_back(
        static_cast<std::int32_t>((static_cast<std::int64_t>(ids.size()) + first) * 7919 % vocab));
  return ids;
}

/// Writes a checkpoint of the given config with random weights, biases and norms. `head_deviation`:
/// the standard deviation of the weights of the language model's head.
inline void write_checkpoint(const std::filesystem::path& directory, const nlohmann::json& json,
                             float head_deviation = 0.1f) {
  std::filesystem::create_directories(directory);
  std::ofstream(directory / "config.json") << json;
  const ModelConfig config = load_model_config(directory);
  const WeightPlan plan = plan_weights(config, Dtype::f32, nullptr);
  std::mt19937 generator(7);
  std::vector<std::vector<float>> values;
  std::vector<TensorToWrite> tensors;
  for (const WeightPart& part : plan.parts) {
    const bool norm = part.initial == Initial::ones;
    const float deviation = norm                                 ? 0.2f
                            : part.name == "lm_head.weight"      ? head_deviation
                            : part.name.ends_with("sinks")       ? 2.0f
                            : part.name.ends_with("router.bias") ? 1.0f
                                                                 : 0.1f;
    std::normal_distribution<float> rng(norm ? 1.0f : 0.0f, deviation);
    values.emplace_back(part.elements());
    for (float& value : values.back()) value = rng(generator);
  }
  for (std::size_t i = 0; i < values.size(); ++i)
    tensors.push_back(
        {plan.parts[i].name, Dtype::f32, plan.parts[i].shape, std::as_bytes(std::span(values[i]))});
  write_safetensors(directory / "model.safetensors", tensors, {});
}

inline nlohmann::json small_config(const char* architecture, const char* type, int heads,
                                   int kv_heads, int head_size) {
  return {{"architectures", {architecture}},
          {"model_type", type},
          {"hidden_act", "silu"},
          {"hidden_size", 96},
          {"intermediate_size", 136},
          {"num_hidden_layers", 2},
          {"num_attention_heads", heads},
          {"num_key_value_heads", kv_heads},
          {"head_dim", head_size},
          {"max_position_embeddings", 512},
          {"rms_norm_eps", 1e-6},
          {"rope_theta", 10000.0},
          {"tie_word_embeddings", false},
          {"vocab_size", 301},
          {"torch_dtype", "float32"}};
}

}  // namespace kvlab
