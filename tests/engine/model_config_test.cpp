#include <cmath>

#include "engine/checkpoint/model.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;

using nlohmann::json;

json llama() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"hidden_size", 96},
          {"intermediate_size", 160},
          {"num_hidden_layers", 3},
          {"num_attention_heads", 6},
          {"num_key_value_heads", 2},
          {"max_position_embeddings", 1024},
          {"rms_norm_eps", 1e-5},
          {"vocab_size", 500},
          {"torch_dtype", "float16"}};
}

/// Returns Llama's config with the changes that make it a config of another family.
json family(const std::string& name, const std::string& type, const json& more = json::object()) {
  json config = llama();
  config.update({{"architectures", {name + "ForCausalLM"}}, {"model_type", type}});
  config.update(more);
  return config;
}

json mistral() { return family("Mistral", "mistral", {{"sliding_window", nullptr}}); }
json qwen2() { return family("Qwen2", "qwen2"); }
json qwen3() { return family("Qwen3", "qwen3", {{"head_dim", 32}}); }

json with(json config, const json& changes) {
  config.merge_patch(changes);  // null removes a key
  return config;
}

ModelConfig read(const json& config) {
  const test::TemporaryFolder folder;
  test::write_bytes(folder / "config.json", config.dump());
  return load_model_config(folder.path());
}

/// The error of a config. Checks that it is one line that names the file.
std::string error_of(const json& config) {
  const test::TemporaryFolder folder;
  test::write_bytes(folder / "config.json", config.dump());
  const std::string error = test::error_of([&] { load_model_config(folder.path()); });
  CAPTURE(error);
  CHECK(error.starts_with((folder / "config.json").string()));
  CHECK(error.find('\n') == std::string::npos);
  return error;
}

void refused(const json& config, const std::string& key) {
  CAPTURE(config.dump(), key);
  CHECK_THAT(error_of(config), ContainsSubstring("\"" + key + "\""));
}

TEST_CASE("a config's numbers are read") {
  const ModelConfig c = read(with(llama(), {{"bos_token_id", 7},
                                            {"eos_token_id", {8, 9}},
                                            {"tie_word_embeddings", true},
                                            {"rope_theta", 500000.0}}));
  CHECK(c.architecture == "LlamaForCausalLM");
  CHECK(c.layers == 3);
  CHECK(c.hidden == 96);
  CHECK(c.mlp == 160);
  CHECK(c.query_heads == 6);
  CHECK(c.kv_heads == 2);
  CHECK(c.head_size == 16);
  CHECK(c.vocab == 500);
  CHECK(c.trained_context == 1024);
  CHECK(c.norm_epsilon == 1e-5f);
  CHECK(c.weights_dtype == Dtype::f16);
  CHECK(c.tied_head);
  CHECK(c.bos == 7);
  CHECK(c.eos == std::vector<std::int32_t>{8, 9});
  CHECK(c.softmax_scale() == 0.25f);
  CHECK(c.rope().inv_freq.size() == 8);
  CHECK(c.rope().inv_freq[0] == 1.0f);
  CHECK(c.rope().inv_freq[4] == static_cast<float>(std::pow(500000.0, -0.5)));
  CHECK(c.rope().factor == 1.0f);
  CHECK(c.rope_config->at("rope_type") == "default");
}

TEST_CASE("a key that is left out takes the architecture's default") {
  const ModelConfig c =
      read(with(llama(), {{"num_key_value_heads", nullptr}, {"torch_dtype", nullptr}}));
  CHECK(c.kv_heads == 6);
  CHECK_FALSE(c.tied_head);
  CHECK(c.bos == -1);
  CHECK(c.eos.empty());
  CHECK(c.rope().inv_freq[4] == 0.01f);  // theta 10000
  CHECK(read(with(llama(), {{"eos_token_id", 3}})).eos == std::vector<std::int32_t>{3});
  CHECK(read(with(llama(), {{"head_dim", 20}})).head_size == 20);
}

TEST_CASE("each architecture sets its biases and norms") {
  CHECK_FALSE(read(llama()).qkv_bias);
  const ModelConfig biased = read(with(llama(), {{"attention_bias", true}, {"mlp_bias", true}}));
  CHECK((biased.qkv_bias && biased.output_bias && biased.mlp_bias && !biased.qk_norm));
  const ModelConfig m = read(mistral());
  CHECK_FALSE((m.qkv_bias || m.output_bias || m.mlp_bias || m.qk_norm));
  const ModelConfig q2 = read(qwen2());
  CHECK((q2.qkv_bias && !q2.output_bias && !q2.mlp_bias && !q2.qk_norm));
  const ModelConfig q3 = read(qwen3());
  CHECK((q3.qk_norm && !q3.qkv_bias && q3.head_size == 32));
}

TEST_CASE("each required key of a config is named if it is missing") {
  for (const char* key :
       {"architectures", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "max_position_embeddings", "rms_norm_eps", "vocab_size"})
    refused(with(llama(), {{key, nullptr}}), key);
  refused(with(mistral(), {{"num_key_value_heads", nullptr}}), "num_key_value_heads");
  refused(with(qwen3(), {{"head_dim", nullptr}}), "head_dim");
  refused(family("Mistral", "mistral"), "sliding_window");
}

TEST_CASE("negative, huge and fractional numbers are refused by name") {
  for (const char* key :
       {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "vocab_size", "head_dim"})
    for (const json& value : {json(-1), json(0), json(1e30), json(std::uint64_t{1} << 63),
                              json(std::int64_t{1} << 32), json(2.5), json("8"), json::array({8})})
      refused(with(llama(), {{key, value}}), key);
  for (const json& value : {json(-1e-5), json(0), json(2.0), json("small")})
    refused(with(llama(), {{"rms_norm_eps", value}}), "rms_norm_eps");
  for (const json& value : {json(-1), json(500), json(1e30), json("x")}) {
    refused(with(llama(), {{"bos_token_id", value}}), "bos_token_id");
    refused(with(llama(), {{"eos_token_id", value}}), "eos_token_id");
    refused(with(llama(), {{"eos_token_id", {1, value}}}), "eos_token_id");
  }
}

TEST_CASE("heads that do not divide and odd head sizes are refused") {
  refused(with(llama(), {{"num_key_value_heads", 4}}), "num_key_value_heads");
  refused(with(llama(), {{"num_key_value_heads", 12}}), "num_key_value_heads");
  refused(with(llama(), {{"hidden_size", 100}}), "num_attention_heads");
  refused(with(llama(), {{"hidden_size", 90}}), "num_attention_heads");  // head size 15
  refused(with(llama(), {{"head_dim", 15}}), "head_dim");
}

TEST_CASE("unsupported architectures are refused by name") {
  for (const json& value :
       {json{"GPT2LMHeadModel"}, json{"MixtralForCausalLM"}, json::array(),
        json{"LlamaForCausalLM", "MistralForCausalLM"}, json("LlamaForCausalLM"), json{3}})
    refused(with(llama(), {{"architectures", value}}), "architectures");
  CHECK_THAT(error_of(with(llama(), {{"architectures", {"GemmaForCausalLM"}}})),
             ContainsSubstring("GemmaForCausalLM"));
  refused(with(llama(), {{"model_type", "qwen2"}}), "model_type");
}

TEST_CASE("options that would change the computation are refused by name") {
  refused(with(llama(), {{"hidden_act", "gelu"}}), "hidden_act");
  refused(with(llama(), {{"pretraining_tp", 2}}), "pretraining_tp");
  refused(with(llama(), {{"quantization_config", {{"bits", 4}}}}), "quantization_config");
  for (const json& value : {json("x"), json(5), json(true), json{1}, json{{"quant_method", 5}},
                            json{{"quant_method", {{"a", 1}}}}})
    refused(with(llama(), {{"quantization_config", value}}), "quantization_config");
  refused(with(llama(), {{"final_logit_softcapping", 30.0}}), "final_logit_softcapping");
  refused(with(llama(), {{"torch_dtype", "float8_e4m3fn"}}), "torch_dtype");
  refused(with(llama(), {{"tie_word_embeddings", "yes"}}), "tie_word_embeddings");
  refused(with(mistral(), {{"attention_bias", true}}), "attention_bias");
  refused(with(mistral(), {{"mlp_bias", true}}), "mlp_bias");
  refused(with(qwen2(), {{"attention_bias", false}}), "attention_bias");
  refused(with(qwen3(), {{"mlp_bias", true}}), "mlp_bias");
  CHECK_NOTHROW(read(with(llama(), {{"hidden_act", "silu"}, {"pretraining_tp", 1}})));
}

TEST_CASE("keys of related models are refused if they are on, and ignored if they are off") {
  const std::vector<std::pair<std::string, json>> on{
      {"attn_output_gate", true},
      {"clip_qkv", 8.0},
      {"qk_layernorm", true},
      {"rope_interleaved", true},
      {"use_qk_norm", true},
      {"logit_scale", 0.0625},
      {"num_local_experts", 8},
      {"kv_lora_rank", 512},
      {"embedding_multiplier", 12},
      {"pruned_heads", {{"1", {0}}}},
      {"auto_map", {{"AutoModelForCausalLM", "own.Model"}}}};
  for (const auto& [key, value] : on) refused(with(llama(), {{key, value}}), key);
  const std::vector<std::pair<std::string, json>> off{
      {"attn_output_gate", false},
      {"clip_qkv", nullptr},
      {"qk_layernorm", false},
      {"rope_interleaved", false},
      {"logit_scale", 1.0},
      {"num_local_experts", 0},
      {"embedding_multiplier", 1},
      {"pruned_heads", json::object()},
      {"auto_map", {{"AutoTokenizer", "own.Tokenizer"}}}};
  for (const auto& [key, value] : off) {
    json config = llama();
    config[key] = value;
    CAPTURE(key);
    CHECK(read(config).unknown_keys.empty());
  }
}

TEST_CASE("unknown keys are named, unless they change nothing") {
  CHECK(read(with(llama(),
                  {{"use_cache", true}, {"attention_dropout", 0.1}, {"id2label", {{"0", "a"}}}}))
            .unknown_keys.empty());
  json config = with(llama(), {{"novel_gate", 1}, {"attention_magic", "yes"}});
  config["unset"] = nullptr;
  CHECK(read(config).unknown_keys == std::vector<std::string>{"attention_magic", "novel_gate"});
}

TEST_CASE("layers whose attention kvlab does not support are refused with that reason") {
  for (const char* type : {"linear_attention", "sparse_attention", "mamba"}) {
    const json config =
        with(llama(), {{"layer_types", {"full_attention", type}}, {"sliding_window", 512}});
    const std::string error = error_of(config);
    CHECK_THAT(error, ContainsSubstring(std::string("layer 1 is \"") + type + "\""));
    CHECK(error.find("sliding") == std::string::npos);
  }
}

TEST_CASE("a folder with another program's model is refused with that reason") {
  const auto error_beside = [](const char* name, bool has_config) {
    const test::TemporaryFolder folder;
    if (has_config) test::write_bytes(folder / "config.json", llama().dump());
    test::write_bytes(folder / name, "x");
    return test::error_of([&] { Model::load(folder.path(), 1); });
  };
  CHECK_THAT(error_beside("pytorch_model.bin", true),
             ContainsSubstring("has \"pytorch_model.bin\", but kvlab needs model.safetensors"));
  CHECK_THAT(error_beside("model.Q4.gguf", true), ContainsSubstring("gguf_to_checkpoint.py"));
  CHECK_THAT(error_beside("model.Q4.gguf", false),
             ContainsSubstring("but kvlab needs config.json"));
  CHECK_THAT(error_beside("adapter_model.safetensors", true),
             ContainsSubstring("merge the adapter"));
  CHECK_THAT(error_beside("notes.txt", true), ContainsSubstring("model.safetensors: cannot open"));
  const test::TemporaryFolder folder;
  test::write_bytes(folder / "own.gguf", "x");
  CHECK_THAT(test::error_of([&] { load_model_config(folder / "own.gguf"); }),
             ContainsSubstring("gguf_to_checkpoint.py"));
}

json gemma3() {
  return family("Gemma3", "gemma3_text",
                {{"hidden_activation", "gelu_pytorch_tanh"},
                 {"head_dim", 32},
                 {"query_pre_attn_scalar", 64},
                 {"sliding_window", 12},
                 {"rope_theta", 1e6},
                 {"rope_local_base_freq", 1e4}});
}

std::vector<std::uint32_t> windows(const json& config) { return read(config).heads().windows; }

const json kFull = "full_attention", kSliding = "sliding_attention";

TEST_CASE("each layer has its family's sliding window") {
  using Windows = std::vector<std::uint32_t>;
  CHECK(windows(mistral()) == Windows{0, 0, 0});
  CHECK(windows(with(mistral(), {{"sliding_window", 512}})) == Windows{512, 512, 512});
  const json late = with(qwen2(), {{"use_sliding_window", true}, {"sliding_window", 512}});
  CHECK(windows(late) == Windows{0, 0, 0});
  CHECK(windows(with(late, {{"max_window_layers", 1}})) == Windows{0, 512, 512});
  CHECK(windows(with(late, {{"layer_types", {kSliding, kFull, kSliding}}})) ==
        Windows{512, 0, 512});
  CHECK(windows(with(late, {{"use_sliding_window", false}})) == Windows{0, 0, 0});
  CHECK(windows(gemma3()) == Windows{12, 12, 12});
  CHECK(windows(with(gemma3(), {{"sliding_window_pattern", 2}})) == Windows{12, 0, 12});
  CHECK(windows(with(gemma3(), {{"layer_types", {kFull, kFull, kSliding}}})) == Windows{0, 0, 12});
  CHECK_NOTHROW(read(with(qwen3(), {{"layer_types", {kFull, kFull, kFull}}})));
}

TEST_CASE("sliding windows that a family does not have, or contradictory ones, are refused") {
  refused(with(llama(), {{"sliding_window", 4096}}), "sliding_window");
  refused(with(llama(), {{"use_sliding_window", true}}), "use_sliding_window");
  refused(with(mistral(), {{"use_sliding_window", true}}), "use_sliding_window");
  refused(with(qwen3(), {{"layer_types", {kFull, kSliding, kFull}}}), "layer_types");
  refused(with(mistral(), {{"sliding_window", 8}, {"layer_types", {kSliding, kFull, kFull}}}),
          "layer_types");
  refused(with(gemma3(), {{"layer_types", {kFull, kSliding}}}), "layer_types");
  refused(with(gemma3(), {{"sliding_window", 0}}), "sliding_window");
}

TEST_CASE("Gemma 3's scales, norms and two RoPE tables are read in both layouts") {
  const ModelConfig c =
      read(with(gemma3(), {{"layer_types", {kSliding, kFull, kSliding}},
                           {"rope_scaling", {{"rope_type", "linear"}, {"factor", 8.0}}}}));
  CHECK((c.tied_head && c.qk_norm && c.gelu && c.norm_offset == 1 && c.unknown_keys.empty()));
  CHECK(c.embedding_scale == std::sqrt(96.0f));
  CHECK(c.softmax_scale() == 0.125f);
  CHECK(read(with(gemma3(), {{"query_pre_attn_scalar", nullptr}})).softmax_scale() == 0.0625f);
  CHECK(c.norms.post_mlp == "post_feedforward_layernorm");
  CHECK(c.has_windows());
  for (std::size_t layer = 0; layer < 3; ++layer) {
    const RowSpec& row = c.rows[layer];
    CHECK(row.scale == 0.125f);
    CHECK(row.table == layer % 2);
    const double theta = layer == 1 ? 1e6 : 1e4, factor = layer == 1 ? 8 : 1;
    CHECK(row.rope.inv_freq[1] == Approx(std::pow(theta, -2.0 / 32) / factor).epsilon(1e-6));
  }
  json newer = gemma3();
  for (const char* key : {"rope_theta", "rope_local_base_freq"}) newer.erase(key);
  newer.update({{"layer_types", {kSliding, kFull, kSliding}},
                {"rope_parameters",
                 {{kFull, {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 1e6}}},
                  {kSliding, {{"rope_type", "default"}}}}}});
  for (std::size_t layer = 0; layer < 3; ++layer)
    CHECK(read(newer).rows[layer].rope == c.rows[layer].rope);
  refused(with(newer, {{"rope_parameters", {{"linear_attention", kFull}}}}), "linear_attention");
}

TEST_CASE("OLMo 2 and 3 have norms only after blocks, and norms over all heads together") {
  const json olmo3 = family("Olmo3", "olmo3", {{"num_hidden_layers", 4}, {"sliding_window", 12}});
  const ModelConfig c = read(olmo3);
  CHECK((c.qk_norm && c.whole_qk_norm && c.norms.pre_attention.empty() && !c.gelu));
  CHECK(c.heads().windows == std::vector<std::uint32_t>{12, 12, 12, 0});
  CHECK(c.rope().inv_freq[1] == Approx(std::pow(5e5, -2.0 / 16)).epsilon(1e-6));
  const ModelConfig olmo2 = read(with(olmo3, {{"architectures", {"Olmo2ForCausalLM"}},
                                              {"model_type", "olmo2"},
                                              {"sliding_window", nullptr}}));
  CHECK(!olmo2.norms_each_head());
}

TEST_CASE("options of Gemma 3 that kvlab does not support are refused") {
  refused(with(gemma3(), {{"hidden_activation", "silu"}}), "hidden_activation");
  refused(with(gemma3(), {{"attn_logit_softcapping", 50.0}}), "attn_logit_softcapping");
  refused(with(gemma3(), {{"final_logit_softcapping", 30.0}}), "final_logit_softcapping");
  refused(with(gemma3(), {{"use_bidirectional_attention", true}}), "use_bidirectional_attention");
  refused(with(llama(), {{"query_pre_attn_scalar", 64}}), "query_pre_attn_scalar");
}

json moe() {
  return family("Qwen3Moe", "qwen3_moe",
                {{"head_dim", 32},
                 {"num_experts", 8},
                 {"num_experts_per_tok", 2},
                 {"moe_intermediate_size", 40},
                 {"norm_topk_prob", true}});
}

TEST_CASE("Qwen3-MoE has experts in the layers that its keys name") {
  const ModelConfig all = read(moe());
  CHECK((all.experts.count == 8 && all.experts.chosen == 2 && all.experts.mlp == 40));
  CHECK((all.experts.among_chosen && all.unknown_keys.empty()));
  CHECK(all.experts.layers == std::vector<bool>{true, true, true});
  CHECK_FALSE(read(with(moe(), {{"norm_topk_prob", nullptr}})).experts.among_chosen);
  CHECK(read(with(moe(), {{"decoder_sparse_step", 2}})).experts.layers ==
        std::vector<bool>{false, true, false});
  CHECK(read(with(moe(), {{"mlp_only_layers", {1}}})).experts.layers ==
        std::vector<bool>{true, false, true});
  refused(with(moe(), {{"num_experts_per_tok", 9}}), "num_experts_per_tok");
  refused(with(moe(), {{"mlp_only_layers", {3}}}), "mlp_only_layers");
  refused(with(moe(), {{"num_local_experts", 9}}), "num_experts");
  refused(with(moe(), {{"moe_intermediate_size", nullptr}}), "moe_intermediate_size");
  refused(with(qwen3(), {{"num_experts", 8}}), "num_experts");
}

TEST_CASE("Qwen3-MoE has windows in all layers or in none") {
  using Windows = std::vector<std::uint32_t>;
  const json on = with(moe(), {{"use_sliding_window", true}, {"sliding_window", 9}});
  CHECK(windows(on) == Windows{9, 9, 9});
  CHECK(windows(with(on, {{"max_window_layers", 2}})) == Windows{9, 9, 9});
  CHECK(windows(with(on, {{"use_sliding_window", false}})) == Windows{0, 0, 0});
  CHECK(windows(with(moe(), {{"layer_types", {kFull, kFull, kFull}}})) == Windows{0, 0, 0});
  refused(with(on, {{"layer_types", {kFull, kSliding, kSliding}}}), "layer_types");
}

TEST_CASE("gpt-oss has alternating sliding windows, sinks, biases and a clamp; MXFP4 is refused") {
  const json oss = family("GptOss", "gpt_oss",
                          {{"head_dim", 32},
                           {"sliding_window", 12},
                           {"num_local_experts", 8},
                           {"num_experts_per_tok", 4},
                           {"rope_parameters", {{"rope_type", "default"}}},
                           {"swiglu_limit", 6.0}});
  const ModelConfig c = read(oss);
  CHECK(c.heads().windows == std::vector<std::uint32_t>{12, 0, 12});
  CHECK((c.sinks && c.qkv_bias && c.output_bias && c.clamp == 6 && c.experts.among_chosen));
  CHECK((c.experts.mlp == 160 && c.rope().inv_freq[1] == Approx(std::pow(15e4, -2.0 / 32))));
  refused(with(oss, {{"swiglu_alpha", 1.5}}), "swiglu_alpha");
  refused(with(oss, {{"rope_parameters", nullptr}}), "rope_parameters");
  CHECK_THAT(error_of(with(oss, {{"quantization_config", {{"quant_method", "mxfp4"}}}})),
             ContainsSubstring("Mxfp4Config"));
}

TEST_CASE("Phi-3's heads may be partly rotated; longrope is refused") {
  const json phi = family("Phi3", "phi3");
  CHECK(read(phi).heads().windows == std::vector<std::uint32_t>{0, 0, 0});
  CHECK(windows(with(phi, {{"sliding_window", 9}})) == std::vector<std::uint32_t>{9, 9, 9});
  const ModelConfig c = read(with(phi, {{"partial_rotary_factor", 0.75}}));
  CHECK((c.fused && c.rotated == 12 && c.rope().inv_freq.size() == 8));
  CHECK(c.rope().inv_freq[5] == Approx(std::pow(1e4, -10.0 / 12)).epsilon(1e-6));
  CHECK((c.rope().inv_freq[6] == 0 && c.rope().inv_freq[7] == 0));
  refused(with(phi, {{"partial_rotary_factor", 0.2}}), "partial_rotary_factor");
  refused(with(phi, {{"rope_scaling", {{"type", "longrope"}}}}), "type");
  refused(with(llama(), {{"partial_rotary_factor", 0.75}}), "partial_rotary_factor");
}

// --- RoPE ---------------------------------------------------------------------------------------

json scaled(const json& parameters) { return with(llama(), {{"rope_scaling", parameters}}); }

const json kLlama3{{"rope_type", "llama3"},
                   {"factor", 8.0},
                   {"low_freq_factor", 1.0},
                   {"high_freq_factor", 4.0},
                   {"original_max_position_embeddings", 256}};
const json kYarn{{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 256}};

TEST_CASE("both layouts of the RoPE parameters give the same result") {
  const ModelConfig older = read(with(scaled(kLlama3), {{"rope_theta", 5000.0}}));
  const ModelConfig newer =
      read(with(llama(), {{"rope_parameters", with(kLlama3, {{"rope_theta", 5000.0}})}}));
  CHECK(older.rope().inv_freq == newer.rope().inv_freq);
  CHECK(older.rope_config == newer.rope_config);
  const json by_type = with(kLlama3, {{"rope_type", nullptr}, {"type", "llama3"}});
  CHECK(read(with(scaled(by_type), {{"rope_theta", 5000.0}})).rope().inv_freq ==
        older.rope().inv_freq);
}

TEST_CASE("linear scaling divides every frequency") {
  const ModelConfig plain = read(llama());
  const ModelConfig linear = read(scaled({{"type", "linear"}, {"factor", 4.0}}));
  for (std::size_t i = 0; i < 8; ++i)
    CHECK(linear.rope().inv_freq[i] == Approx(plain.rope().inv_freq[i] / 4).epsilon(1e-7));
}

TEST_CASE("llama3 scaling keeps short wavelengths and stretches long ones") {
  const ModelConfig plain = read(llama()), llama3 = read(scaled(kLlama3));
  CHECK(llama3.rope().inv_freq[0] == plain.rope().inv_freq[0]);
  CHECK(llama3.rope().inv_freq[7] == Approx(plain.rope().inv_freq[7] / 8).epsilon(1e-7));
}

TEST_CASE("YaRN's factor follows attention_factor, mscale or the scaling factor") {
  CHECK(read(scaled(kYarn)).rope().factor == static_cast<float>(0.1 * std::log(4.0) + 1));
  CHECK(read(scaled(with(kYarn, {{"attention_factor", 1.5}}))).rope().factor == 1.5f);
  const ModelConfig both = read(scaled(with(kYarn, {{"mscale", 2.0}, {"mscale_all_dim", 1.0}})));
  CHECK(both.rope().factor ==
        static_cast<float>((0.2 * std::log(4.0) + 1) / (0.1 * std::log(4.0) + 1)));
}

TEST_CASE("by default, YaRN's ramp goes from 32 rotations to 1") {
  const json fractional = with(kYarn, {{"truncate", false}});
  const auto frequencies = [&](const json& changes) {
    return read(scaled(with(fractional, changes))).rope().inv_freq;
  };
  CHECK(frequencies({{"beta_fast", 32}, {"beta_slow", 1}}) == frequencies(json::object()));
  CHECK(frequencies({{"beta_fast", 16}}) != frequencies(json::object()));
  CHECK(frequencies({{"beta_slow", 2}}) != frequencies(json::object()));
}

TEST_CASE("RoPE types that are not supported are refused by name") {
  for (const char* type : {"dynamic", "longrope", "su", "mrope", "proportional"}) {
    CHECK_THAT(error_of(scaled({{"rope_type", type}, {"factor", 2.0}})),
               ContainsSubstring("\"rope_type\"") && ContainsSubstring(type));
    CHECK_THAT(error_of(scaled({{"type", type}, {"factor", 2.0}})), ContainsSubstring(type));
  }
}

TEST_CASE("RoPE parameters that are missing, extra, contradictory or out of range are refused") {
  for (const char* key :
       {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
    refused(scaled(with(kLlama3, {{key, nullptr}})), key);
  for (const char* key : {"factor", "original_max_position_embeddings"})
    refused(scaled(with(kYarn, {{key, nullptr}})), key);
  refused(scaled({{"rope_type", "linear"}}), "factor");

  refused(scaled(with(kLlama3, {{"beta_fast", 32}})), "beta_fast");
  refused(scaled({{"rope_type", "default"}, {"factor", 2.0}}), "factor");
  refused(scaled({{"rope_type", "linear"}, {"factor", 2.0}, {"short_factor", {1.0}}}),
          "short_factor");

  refused(scaled(with(kYarn, {{"type", "linear"}})), "type");
  refused(with(scaled(kYarn), {{"rope_parameters", kLlama3}}), "rope_scaling");
  refused(with(scaled(with(kYarn, {{"rope_theta", 1e4}})), {{"rope_theta", 1e6}}), "rope_theta");
  refused(with(scaled(kYarn), {{"original_max_position_embeddings", 512}}),
          "original_max_position_embeddings");

  for (const json& value : {json(-1), json(0.5), json(1e30), json("4"), json(true)}) {
    refused(scaled({{"rope_type", "linear"}, {"factor", value}}), "factor");
    refused(scaled(with(kLlama3, {{"factor", value}})), "factor");
    refused(scaled(with(kYarn, {{"factor", value}})), "factor");
  }
  refused(scaled(with(kLlama3, {{"high_freq_factor", 1.0}})), "high_freq_factor");
  refused(scaled(with(kYarn, {{"beta_fast", 1}, {"beta_slow", 2}})), "beta_fast");
  refused(scaled(with(kYarn, {{"attention_factor", 0.0}})), "attention_factor");
  refused(scaled(with(kYarn, {{"truncate", 1}})), "truncate");
  for (const json& value : {json(1.0), json(-5), json(1e300), json("10000")})
    refused(with(llama(), {{"rope_theta", value}}), "rope_theta");
  refused(with(llama(), {{"partial_rotary_factor", 0.5}}), "partial_rotary_factor");
  refused(scaled({{"rope_type", "default"}, {"partial_rotary_factor", 0.5}}),
          "partial_rotary_factor");
  CHECK_NOTHROW(read(with(llama(), {{"partial_rotary_factor", 1.0}})));
}

// --- broken files -------------------------------------------------------------------------------

TEST_CASE("a config that is missing, truncated or not an object is refused by name") {
  const test::TemporaryFolder folder;
  const std::string file = (folder / "config.json").string();
  const auto error = [&] { return test::error_of([&] { load_model_config(folder.path()); }); };
  CHECK_THAT(error(), ContainsSubstring(file));
  const std::string whole = llama().dump();
  for (const std::string& text :
       {whole.substr(0, whole.size() / 2), std::string(), std::string("[]"), std::string("3"),
        std::string("{\"architectures\": \"\xff\"}"), std::string(100000, '[')}) {
    test::write_bytes(file, text);
    CHECK_THAT(error(), StartsWith(file));
    CHECK(error().find('\n') == std::string::npos);
  }
}

}  // namespace
}  // namespace kvlab
