#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>

#include "engine/checkpoint/checkpoint.hpp"
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
                        kMaxHeadSize = 1024, kMaxVocab = 1 << 24, kMaxExperts = 1 << 12;

/// Which layers have a sliding window if config.json has no `layer_types`.
enum class Windows {
  none,
  all,      ///< all layers, unless sliding_window is null
  enabled,  ///< all layers if use_sliding_window is true
  last,     ///< layers from max_window_layers on, if use_sliding_window is true
  between,  ///< all layers except every sliding_window_pattern-th
};

/// Properties of an architecture, and which keys of config.json have a meaning for it.
struct Architecture {
  std::string_view name, model_type;
  std::string_view own_keys =
      {};  ///< keys that are read for this architecture; for others they are ignored or refused
  Windows windows = Windows::none;
  std::uint32_t pattern = 6;  ///< Windows::between: every pattern-th layer sees all tokens
  RopeKeys rope = {};
  std::optional<RopeKeys> rope_of_windows = {};  ///< RoPE of layers with a window, if it differs
  BlockNorms norms = {};
  float norm_offset = 0;
  double default_scalar = 0;      ///< default of query_pre_attn_scalar; 0: the head size
  bool scaled_embedding = false;  ///< embeddings are multiplied by sqrt(hidden)
  bool gelu = false;
  bool tied_by_default = false;
  bool qkv_bias = false;            ///< q, k and v always have biases
  bool attention_bias_key = false;  ///< attention_bias adds biases to q, k, v and the output
  bool mlp_bias_key = false;        ///< mlp_bias adds biases to the MLP
  bool fused = false;
  bool sinks = false;
  Experts experts = {};               ///< count is not 0 if the architecture has experts
  bool qk_norm = false;               ///< q and k always have a norm
  bool whole_qk_norm = false;         ///< one norm over all heads
  bool head_size_from_width = false;  ///< head_dim defaults to hidden_size / query heads
  bool kv_heads_from_heads = false;   ///< num_key_value_heads defaults to query heads
};

constexpr BlockNorms kPostNorms{.pre_attention = {},
                                .post_attention = "post_attention_layernorm",
                                .pre_mlp = {},
                                .post_mlp = "post_feedforward_layernorm"};

// const instead of constexpr, because the standard library of GCC 11 has no constexpr std::vector.
const std::array<Architecture, 10> kArchitectures{{
    {.name = "LlamaForCausalLM",
     .model_type = "llama",
     .attention_bias_key = true,
     .mlp_bias_key = true,
     .head_size_from_width = true,
     .kv_heads_from_heads = true},
    {.name = "MistralForCausalLM",
     .model_type = "mistral",
     .windows = Windows::all,
     .head_size_from_width = true},
    {.name = "Qwen2ForCausalLM",
     .model_type = "qwen2",
     .windows = Windows::last,
     .qkv_bias = true,
     .head_size_from_width = true},
    {.name = "Qwen3ForCausalLM",
     .model_type = "qwen3",
     .windows = Windows::last,
     .attention_bias_key = true,
     .qk_norm = true},
    {.name = "Qwen3MoeForCausalLM",
     .model_type = "qwen3_moe",
     .own_keys = "num_experts num_local_experts num_experts_per_tok moe_intermediate_size "
                 "norm_topk_prob decoder_sparse_step mlp_only_layers router_aux_loss_coef "
                 "output_router_logits",
     .windows = Windows::enabled,
     .attention_bias_key = true,
     .experts = {.count = 1},
     .qk_norm = true},
    {.name = "Phi3ForCausalLM",
     .model_type = "phi3",
     .windows = Windows::all,
     .rope = {.partial = true},
     .fused = true,
     .head_size_from_width = true,
     .kv_heads_from_heads = true},
    {.name = "GptOssForCausalLM",
     .model_type = "gpt_oss",
     .own_keys = "num_local_experts num_experts_per_tok experts_per_token swiglu_limit "
                 "swiglu_alpha router_aux_loss_coef output_router_logits initial_context_length",
     .windows = Windows::between,
     .pattern = 2,
     .rope = {.default_theta = 150000},
     .attention_bias_key = true,
     .sinks = true,
     .experts = {.count = 1, .among_chosen = true, .stacked = true}},
    {.name = "Olmo2ForCausalLM",
     .model_type = "olmo2",
     .norms = kPostNorms,
     .attention_bias_key = true,
     .qk_norm = true,
     .whole_qk_norm = true,
     .head_size_from_width = true,
     .kv_heads_from_heads = true},
    {.name = "Olmo3ForCausalLM",
     .model_type = "olmo3",
     .windows = Windows::between,
     .pattern = 4,
     .rope = {.kind = "full_attention", .default_theta = 5e5},
     .rope_of_windows = RopeKeys{.scaling = {}, .kind = "sliding_attention", .default_theta = 5e5},
     .norms = kPostNorms,
     .attention_bias_key = true,
     .qk_norm = true,
     .whole_qk_norm = true,
     .head_size_from_width = true,
     .kv_heads_from_heads = true},
    {.name = "Gemma3ForCausalLM",
     .model_type = "gemma3_text",
     .own_keys =
         "query_pre_attn_scalar hidden_activation rope_local_base_freq cache_implementation "
         "sliding_window_pattern _sliding_window_pattern",
     .windows = Windows::between,
     .rope = {.kind = "full_attention", .default_theta = 1e6},
     .rope_of_windows =
         RopeKeys{.theta = "rope_local_base_freq", .scaling = {}, .kind = "sliding_attention"},
     .norms = {.post_attention = "post_attention_layernorm",
               .pre_mlp = "pre_feedforward_layernorm",
               .post_mlp = "post_feedforward_layernorm"},
     .norm_offset = 1,
     .default_scalar = 256,
     .scaled_embedding = true,
     .gelu = true,
     .tied_by_default = true,
     .attention_bias_key = true,
     .qk_norm = true},
}};

/// Keys of related models that change the result unless they are off, that is null, false, 0 or
/// empty. Transformers ignores these keys for the architectures above. A file that sets one of them
/// therefore describes another model, and is refused.
constexpr std::string_view kForeignKeys =
    "quantization_config compression_config sparsity_config attn_logit_softcapping "
    "final_logit_softcapping query_pre_attn_scalar attention_multiplier scale_depth dim_model_base "
    "attn_output_gate use_gated_attention clip_qkv qkv_clip qk_layernorm use_qk_norm qk_norm "
    "rope_interleaved rope_interleave attention_sinks attention_chunk_size attn_temperature_tuning "
    "llama_4_scaling_beta no_rope_layers no_rope_layer_interval sparse_attention_config index_topk "
    "kv_lora_rank num_kv_shared_layers num_experts num_local_experts n_routed_experts "
    "moe_intermediate_size pruned_heads alibi use_alibi parallel_attn use_parallel_residual bias "
    "use_bias lm_head_bias use_bidirectional_attention";
/// The same for keys that are factors. A factor has no effect if it is 1.
constexpr std::string_view kForeignFactors =
    "logit_scale logits_scaling embedding_multiplier residual_multiplier scale_emb rotary_pct";

/// Keys that are read, and keys that do not change the logits of a text. Other keys cause a
/// warning.
constexpr std::string_view kKnownKeys =
    "architectures model_type hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim vocab_size max_position_embeddings rms_norm_eps hidden_act "
    "attention_bias mlp_bias tie_word_embeddings pretraining_tp sliding_window use_sliding_window "
    "max_window_layers layer_types rope_theta rope_scaling rope_parameters partial_rotary_factor "
    "original_max_position_embeddings dtype torch_dtype bos_token_id eos_token_id pad_token_id "
    "sep_token_id decoder_start_token_id auto_map transformers_version use_cache initializer_range "
    "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop _name_or_path "
    "_attn_implementation _attn_implementation_autoset attn_implementation unsloth_version "
    "unsloth_fixed model_name tokenizer_class prefix task_specific_params finetuning_task "
    "problem_type id2label label2id num_labels return_dict return_dict_in_generate "
    "output_attentions output_hidden_states output_scores torchscript use_bfloat16 tf_legacy_loss "
    "chunk_size_feed_forward is_decoder is_encoder_decoder add_cross_attention "
    "cross_attention_hidden_size tie_encoder_decoder gradient_checkpointing max_length min_length "
    "max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens keys_to_ignore_at_inference transformers.js_config";

const Architecture& architecture_of(const JsonFields& config) {
  std::vector<std::string_view> names;
  for (const Architecture& known : kArchitectures) names.push_back(known.name);
  const std::string right =
      fmt::format("it must be a list with one of these names: {}", fmt::join(names, ", "));
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

/// Number of tokens that a query of a layer with a window sees; 0: there is no window.
std::uint32_t read_window(const JsonFields& config, const Architecture& architecture) {
  constexpr std::string_view key = "sliding_window", on = "use_sliding_window";
  const Windows windows = architecture.windows;
  const bool switched_on = config.flag(on, false);
  const bool has_switch = windows == Windows::last || windows == Windows::enabled;
  if (has_switch && !switched_on) return 0;
  if (!has_switch && switched_on)
    config.refuse(on, fmt::format("{} does not have this key", architecture.name));
  if (windows == Windows::none && config.has(key))
    config.refuse(key, fmt::format("{} has no sliding windows", architecture.name));
  const bool is_null = (config.json().contains(key) || architecture.fused) && !config.has(key);
  if (windows == Windows::none || (windows == Windows::all && is_null)) return 0;
  return config.size(key, kMaxContext);
}

/// Whether a layer has a window if config.json has no `layer_types`.
bool is_windowed(const JsonFields& config, const Architecture& architecture, std::uint32_t layer) {
  const Windows windows = architecture.windows;
  const auto number = [&](std::string_view key, std::uint32_t if_absent) {
    return config.has(key) ? config.whole32(key, kMaxContext) : if_absent;
  };
  if (windows == Windows::last) return layer >= number("max_window_layers", 28);
  if (windows != Windows::between) return windows != Windows::none;
  return (layer + 1) % std::max(1u, number("sliding_window_pattern", architecture.pattern)) != 0;
}

/// Reads from `layer_types` whether each layer has a window. Refuses layers with other kinds of
/// attention, such as sparse or linear attention.
std::vector<bool> read_types(const JsonFields& config, Windows windows, std::uint32_t layers) {
  constexpr std::string_view key = "layer_types";
  const nlohmann::json& types = config.list(key);
  std::vector<bool> windowed;
  for (const nlohmann::json& type : types) {
    windowed.push_back(windows != Windows::none && type == "sliding_attention");
    if (!windowed.back() && type != "full_attention")
      config.refuse(key, fmt::format("layer {} is {}; {}", windowed.size() - 1, type.dump(),
                                     "this kind of layer is not supported; full_attention is"));
  }
  if (types.size() != layers)
    config.refuse(key, fmt::format("it must have one for each of {} layers", layers));
  return windowed;
}

/// Number of tokens that a query of each layer sees; 0: all.
std::vector<std::uint32_t> read_layer_windows(const JsonFields& config,
                                              const Architecture& architecture,
                                              std::uint32_t layers) {
  constexpr std::string_view key = "layer_types";
  const Windows windows = architecture.windows;
  std::vector<bool> windowed;
  if (config.has(key)) windowed = read_types(config, windows, layers);
  const std::uint32_t window = read_window(config, architecture);
  std::vector<std::uint32_t> by_layer(layers);
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    const bool by_rule = window > 0 && is_windowed(config, architecture, layer);
    const bool own = windowed.empty() ? by_rule : windowed[layer];
    const bool by_rule_only = windows == Windows::all || windows == Windows::enabled;
    if ((own && window == 0) || (by_rule_only && own != by_rule))
      config.refuse(
          key, fmt::format("layer {} contradicts the windows that other keys describe", layer));
    by_layer[layer] = own ? window : 0;
  }
  return by_layer;
}

void read_rows(const JsonFields& config, const Architecture& architecture, ModelConfig& model) {
  constexpr std::string_view scalar = "query_pre_attn_scalar";
  const std::vector<std::uint32_t> by_layer =
      read_layer_windows(config, architecture, model.layers);
  if (architecture.sinks && !config.has("rope_parameters") && !config.has("rope_scaling"))
    config.refuse("rope_parameters",
                  "it or rope_scaling must be given, because readers differ in what a missing one "
                  "means (transformers: YaRN with factor 32)");
  const ScaledRope rope = read_rope(config, model.head_size, architecture.rope);
  const ScaledRope window_rope =
      architecture.rope_of_windows
          ? read_rope(config, model.head_size, *architecture.rope_of_windows)
          : rope;
  const double if_absent =
      architecture.default_scalar > 0 ? architecture.default_scalar : model.head_size;
  const double size = config.has(scalar) ? config.number(scalar, 1e-6, 1e6) : if_absent;
  for (const std::uint32_t window : by_layer) {
    model.rows.push_back({.window = window,
                          .scale = static_cast<float>(1.0 / std::sqrt(size)),
                          .rope = (window > 0 ? window_rope : rope).rope});
    model.rows.back().table = model.rows.back().rope == model.rows.front().rope ? 0 : 1;
  }
  model.rope_config = rope.config;
  model.rotated = rope.rotated;
}

/// Reads which layers have experts: every decoder_sparse_step-th, except those of mlp_only_layers.
void read_experts(const JsonFields& config, const Architecture& architecture, ModelConfig& model) {
  constexpr std::string_view newer = "num_local_experts", older = "num_experts",
                             only = "mlp_only_layers", step = "decoder_sparse_step",
                             chosen = "num_experts_per_tok", alpha = "swiglu_alpha";
  if (architecture.experts.count == 0) return;
  Experts& experts = model.experts = architecture.experts;
  if (config.has(newer) && config.has(older) && config.value(newer) != config.value(older))
    config.refuse(older, "it must equal num_local_experts, or be left out");
  experts.count = config.size(config.has(newer) ? newer : older, kMaxExperts);
  experts.chosen = config.size(chosen, experts.count);
  experts.layers.assign(model.layers, true);
  if (experts.stacked) {
    experts.mlp = model.mlp;
    model.clamp = static_cast<float>(
        config.has("swiglu_limit") ? config.number("swiglu_limit", 1e-6, 1e6) : 7.0);
    if (config.has(alpha) && config.number(alpha, 0, 10) != 1.702)
      config.refuse(alpha, "only 1.702 is supported");
    return;
  }
  experts.mlp = config.size("moe_intermediate_size", kMaxWidth);
  experts.among_chosen = config.flag("norm_topk_prob", false);
  const std::uint32_t every = config.has(step) ? config.size(step, kMaxLayers) : 1;
  for (std::uint32_t layer = 0; layer < model.layers; ++layer)
    experts.layers[layer] = (layer + 1) % every == 0;
  if (!config.has(only)) return;
  for (const nlohmann::json& layer : config.list(only)) {
    const bool fits = layer.is_number_integer() && layer >= 0 && layer < model.layers;
    if (!fits) config.refuse(only, fmt::format("its layer numbers must be below {}", model.layers));
    experts.layers[layer.get<std::size_t>()] = false;
  }
}

bool lists(std::string_view keys, const std::string& key) {
  const auto all = split_list(std::string(keys), ' ');
  return std::ranges::find(all, key) != all.end();
}

/// Whether the quantization is MXFP4. `quantization` may be any JSON, not just an object.
bool is_mxfp4(const nlohmann::json& quantization) {
  const nlohmann::json* method =
      quantization.is_object() ? json_find(quantization, "quant_method") : nullptr;
  return method && *method == "mxfp4";
}

void refuse_foreign(const JsonFields& config, const Architecture& architecture) {
  for (const std::string& key : split_list(kForeignKeys, ' ')) {
    if (lists(architecture.own_keys, key)) continue;
    const nlohmann::json& value = config.value(key);
    const bool off = value.empty() || value == false || value == 0;  // null counts as empty
    if (off) continue;
    if (key == "quantization_config" && is_mxfp4(value))
      config.refuse(
          key,
          "weights in MXFP4 are not supported; convert them with: python -c \"from transformers "
          "import AutoModelForCausalLM as A, Mxfp4Config as C; A.from_pretrained('MODEL', "
          "quantization_config=C(dequantize=True), dtype='bfloat16').save_pretrained('OUT')\"");
    config.refuse(key, "this is not supported");
  }
  for (const std::string& key : split_list(kForeignFactors, ' '))
    if (config.has(key) && config.value(key) != 1 && config.value(key) != false)
      config.refuse(key, "this is not supported");
  if (!config.has("auto_map")) return;
  for (const auto& [name, code] : config.value("auto_map").items())
    if (name.starts_with("AutoModel"))
      config.refuse("auto_map", "a model with custom code is not supported");
}

std::vector<std::string> unknown_keys(const nlohmann::json& config,
                                      const Architecture& architecture) {
  std::vector<std::string> unknown;
  for (const auto& [key, value] : config.items())
    if (!value.is_null() && !lists(kKnownKeys, key) && !lists(kForeignKeys, key) &&
        !lists(kForeignFactors, key) && !lists(architecture.own_keys, key))
      unknown.push_back(key);
  return unknown;
}

void refuse_unsupported(const JsonFields& config, const Architecture& architecture) {
  refuse_foreign(config, architecture);
  const std::string_view act = architecture.gelu ? "hidden_activation" : "hidden_act",
                         right = architecture.gelu ? "gelu_pytorch_tanh" : "silu";
  if (config.has(act) && config.text(act) != right)
    config.refuse(act, fmt::format("only {} is supported", right));
  if (config.has("pretraining_tp") && config.integer("pretraining_tp", 1, 1 << 20) != 1)
    config.refuse("pretraining_tp", "only 1 is supported");
  if (architecture.qkv_bias && !config.flag("attention_bias", true))
    config.refuse("attention_bias", fmt::format("{} has q, k and v biases", architecture.name));
  if (!architecture.qkv_bias && !architecture.attention_bias_key &&
      config.flag("attention_bias", false))
    config.refuse("attention_bias", fmt::format("{} has no such biases", architecture.name));
  if (!architecture.mlp_bias_key && config.flag("mlp_bias", false))
    config.refuse("mlp_bias", fmt::format("{} has no such biases", architecture.name));
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

std::vector<std::pair<std::string, std::string>> supported_architectures() {
  std::vector<std::pair<std::string, std::string>> all;
  for (const Architecture& one : kArchitectures) all.emplace_back(one.name, one.model_type);
  return all;
}

CacheShape ModelConfig::heads() const {
  CacheShape shape{layers, kv_heads, head_size};
  for (const RowSpec& row : rows) shape.windows.push_back(row.window);
  return shape;
}

const RowSpec& ModelConfig::full_attention_row() const {
  const auto row = std::ranges::find(rows, 0u, &RowSpec::window);
  return row == rows.end() ? rows.front() : *row;
}

bool ModelConfig::has_windows() const {
  return std::ranges::any_of(rows, [](const RowSpec& row) { return row.window > 0; });
}

std::uint32_t ModelConfig::rope_tables() const {
  return std::ranges::max(rows, {}, &RowSpec::table).table + 1;
}

const Rope& ModelConfig::rope_of_table(std::uint32_t table) const {
  return std::ranges::find(rows, table, &RowSpec::table)->rope;
}

ModelConfig load_model_config(const std::filesystem::path& directory) {
  if (directory.extension() == ".gguf" && std::filesystem::is_regular_file(directory))
    throw std::runtime_error(
        fmt::format("{}: is a GGUF file, but a directory with safetensors files is needed; "
                    "tools/scripts/gguf_to_checkpoint.py FILE DIR converts it",
                    directory.string()));
  if (!std::filesystem::exists(directory / "config.json"))
    refuse_other_files(directory, "config.json", kOtherWeights);
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
  model.unknown_keys = unknown_keys(json, architecture);
  model.name = std::move(name);
  model.architecture = architecture.name;
  read_sizes(config, architecture, model);
  constexpr double kSmallest = 1e-12;
  model.norm_epsilon = static_cast<float>(config.number("rms_norm_eps", kSmallest, 1));
  model.tied_head = config.flag("tie_word_embeddings", architecture.tied_by_default);
  model.output_bias =
      architecture.attention_bias_key && config.flag("attention_bias", architecture.sinks);
  model.qkv_bias = architecture.qkv_bias || model.output_bias;
  model.mlp_bias = architecture.mlp_bias_key && config.flag("mlp_bias", false);
  model.qk_norm = architecture.qk_norm;
  model.whole_qk_norm = architecture.whole_qk_norm;
  model.norms = architecture.norms;
  model.norm_offset = architecture.norm_offset;
  if (architecture.scaled_embedding)
    model.embedding_scale = std::sqrt(static_cast<float>(model.hidden));
  model.gelu = architecture.gelu;
  model.fused = architecture.fused;
  model.sinks = architecture.sinks;
  model.weights_dtype = weights_dtype(config);
  read_special_tokens(config, model);
  read_rows(config, architecture, model);
  read_experts(config, architecture, model);
  return model;
}

}  // namespace kvlab
