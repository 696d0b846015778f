#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <string>
#include <string_view>

#include "engine/checkpoint/model.hpp"
#include "engine/checkpoint/rope_scaling.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kMaxConfigBytes = 1 << 20;
constexpr std::uint32_t kMaxLayers = 4096, kMaxWidth = 1 << 20, kMaxHeads = 1 << 14,
                        kMaxHeadSize = 1024, kMaxVocab = 1 << 24;

/// What an architecture fixes, and which of its keys mean something.
struct Architecture {
  std::string_view name, model_type;
  bool qkv_bias = false;              ///< always
  bool attention_bias_key = false;    ///< attention_bias adds biases to q, k, v and the output
  bool mlp_bias_key = false;          ///< mlp_bias adds biases to the MLP
  bool qk_norm = false;               ///< always
  bool sliding_by_default = false;    ///< sliding_window is in use unless it is null
  bool head_size_from_width = false;  ///< head_dim may be left out: hidden_size / heads
  bool kv_heads_from_heads = false;   ///< num_key_value_heads may be left out: the query heads
};

constexpr std::array<Architecture, 4> kArchitectures{{
    {.name = "LlamaForCausalLM",
     .model_type = "llama",
     .attention_bias_key = true,
     .mlp_bias_key = true,
     .head_size_from_width = true,
     .kv_heads_from_heads = true},
    {.name = "MistralForCausalLM",
     .model_type = "mistral",
     .sliding_by_default = true,
     .head_size_from_width = true},
    {.name = "Qwen2ForCausalLM",
     .model_type = "qwen2",
     .qkv_bias = true,
     .head_size_from_width = true},
    {.name = "Qwen3ForCausalLM",
     .model_type = "qwen3",
     .attention_bias_key = true,
     .qk_norm = true},
}};

/// Keys of related models that change what is computed. Transformers ignores them for the
/// architectures above; a file that has one describes something else.
constexpr std::array<std::string_view, 16> kForeignKeys{"quantization_config",
                                                        "compression_config",
                                                        "attn_logit_softcapping",
                                                        "final_logit_softcapping",
                                                        "query_pre_attn_scalar",
                                                        "logit_scale",
                                                        "logits_scaling",
                                                        "embedding_multiplier",
                                                        "residual_multiplier",
                                                        "attention_multiplier",
                                                        "num_experts",
                                                        "num_local_experts",
                                                        "attention_chunk_size",
                                                        "no_rope_layers",
                                                        "attention_sinks",
                                                        "use_qk_norm"};

const Architecture& architecture_of(const JsonFields& config) {
  constexpr std::string_view right =
      "supported are LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM, "
      "one of them in a list";
  const nlohmann::json& list = config.value("architectures");
  if (!list.is_array() || list.size() != 1 || !list[0].is_string())
    config.refuse("architectures", right);
  const auto name = list[0].get<std::string>();
  for (const Architecture& known : kArchitectures)
    if (known.name == name) {
      if (config.has("model_type") && config.text("model_type") != known.model_type)
        config.refuse("model_type", fmt::format("{} has {}", name, known.model_type));
      return known;
    }
  config.refuse("architectures", right);
}

void refuse_sliding(const JsonFields& config, const Architecture& architecture) {
  constexpr std::string_view right = "sliding windows are not supported";
  if (config.flag("use_sliding_window", false)) config.refuse("use_sliding_window", right);
  const bool switched = architecture.model_type.starts_with("qwen");  // by use_sliding_window
  if (!switched && config.has("sliding_window")) config.refuse("sliding_window", right);
  if (architecture.sliding_by_default && !config.json().contains("sliding_window"))
    config.refuse("sliding_window", "it must be null: without the key a window of 4096 is in use");
  if (!config.has("layer_types")) return;
  const nlohmann::json& types = config.value("layer_types");
  const auto is_full = [](const nlohmann::json& type) {
    return type.is_string() && type.get_ref<const std::string&>() == "full_attention";
  };
  const bool full = types.is_array() && std::all_of(types.begin(), types.end(), is_full);
  if (!full) config.refuse("layer_types", "only full_attention is supported");
}

void refuse_unsupported(const JsonFields& config, const Architecture& architecture) {
  for (const std::string_view key : kForeignKeys)
    if (config.has(key) && config.value(key) != false) config.refuse(key, "this is not supported");
  if (config.has("hidden_act") && config.text("hidden_act") != "silu")
    config.refuse("hidden_act", "only silu is supported");
  if (config.has("pretraining_tp") && config.integer("pretraining_tp", 1, 1 << 20) != 1)
    config.refuse("pretraining_tp", "only 1 is supported");
  if (architecture.qkv_bias && !config.flag("attention_bias", true))
    config.refuse("attention_bias", fmt::format("{} has q, k and v biases", architecture.name));
  if (!architecture.qkv_bias && !architecture.attention_bias_key &&
      config.flag("attention_bias", false))
    config.refuse("attention_bias", fmt::format("{} has no such biases", architecture.name));
  if (!architecture.mlp_bias_key && config.flag("mlp_bias", false))
    config.refuse("mlp_bias", fmt::format("{} has no such biases", architecture.name));
  refuse_sliding(config, architecture);
}

void read_sizes(const JsonFields& config, const Architecture& architecture, ModelConfig& model) {
  model.layers = config.size("num_hidden_layers", kMaxLayers);
  model.hidden = config.size("hidden_size", kMaxWidth);
  model.mlp = config.size("intermediate_size", kMaxWidth);
  model.vocab = config.size("vocab_size", kMaxVocab);
  model.trained_context = config.size("max_position_embeddings", kMaxContext);
  model.query_heads = config.size("num_attention_heads", kMaxHeads);

  const bool all_heads = architecture.kv_heads_from_heads && !config.has("num_key_value_heads");
  model.kv_heads = all_heads ? model.query_heads : config.size("num_key_value_heads", kMaxHeads);
  if (model.query_heads % model.kv_heads != 0)
    config.refuse("num_key_value_heads",
                  fmt::format("it must divide num_attention_heads ({})", model.query_heads));

  if (config.has("head_dim") || !architecture.head_size_from_width) {
    model.head_size = config.size("head_dim", kMaxHeadSize);
    if (model.head_size % 2 != 0) config.refuse("head_dim", "it must be even");
  } else {
    if (model.hidden % model.query_heads != 0)
      config.refuse("num_attention_heads",
                    fmt::format("it must divide hidden_size ({})", model.hidden));
    model.head_size = model.hidden / model.query_heads;
    if (model.head_size % 2 != 0 || model.head_size > kMaxHeadSize)
      config.refuse(
          "num_attention_heads",
          fmt::format("hidden_size / num_attention_heads ({}) must be even and at most {}",
                      model.head_size, kMaxHeadSize));
  }
}

Dtype weights_dtype(const JsonFields& config) {
  const std::string_view key = config.has("dtype") ? "dtype" : "torch_dtype";
  if (!config.has(key)) return Dtype::f32;
  const auto dtype = dtype_from_torch(config.text(key));
  if (!dtype || *dtype == Dtype::i32)
    config.refuse(key, "supported are bfloat16, float16 and float32");
  return *dtype;
}

void read_special_tokens(const JsonFields& config, ModelConfig& model) {
  const std::int64_t last = std::int64_t{model.vocab} - 1;
  if (config.has("bos_token_id"))
    model.bos = static_cast<std::int32_t>(config.integer("bos_token_id", 0, last));
  if (!config.has("eos_token_id")) return;
  const nlohmann::json& eos = config.value("eos_token_id");
  if (!eos.is_array()) {
    model.eos.push_back(static_cast<std::int32_t>(config.integer("eos_token_id", 0, last)));
    return;
  }
  for (const nlohmann::json& id : eos) {
    const bool fits = id.is_number_integer() && id >= 0 && id <= last;
    if (!fits)
      config.refuse("eos_token_id", fmt::format("its ids must be integers from 0 to {}", last));
    model.eos.push_back(id.get<std::int32_t>());
  }
}

}  // namespace

float ModelConfig::softmax_scale() const {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_size)));
}

ModelConfig load_model_config(const std::filesystem::path& directory) {
  return read_model_config(
      directory / "config.json",
      printable(std::filesystem::weakly_canonical(directory).filename().string()));
}

ModelConfig read_model_config(const std::filesystem::path& path, std::string name) {
  const nlohmann::json json = parse_json(read_text_file(path, kMaxConfigBytes), path.string());
  const JsonFields config(json, path.string());
  const Architecture& architecture = architecture_of(config);
  refuse_unsupported(config, architecture);

  ModelConfig model;
  model.name = std::move(name);
  model.architecture = architecture.name;
  read_sizes(config, architecture, model);
  constexpr double kSmallest = 1e-12;
  model.norm_epsilon = static_cast<float>(config.number("rms_norm_eps", kSmallest, 1));
  model.tied_head = config.flag("tie_word_embeddings", false);
  model.output_bias = architecture.attention_bias_key && config.flag("attention_bias", false);
  model.qkv_bias = architecture.qkv_bias || model.output_bias;
  model.mlp_bias = architecture.mlp_bias_key && config.flag("mlp_bias", false);
  model.qk_norm = architecture.qk_norm;
  model.weights_dtype = weights_dtype(config);
  read_special_tokens(config, model);
  ScaledRope rope = read_rope(config, model.head_size);
  model.rope = std::move(rope.rope);
  model.rope_config = std::move(rope.config);
  return model;
}

}  // namespace kvlab
