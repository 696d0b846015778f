// A decoder-only transformer on the CPU, as building blocks: weights in bf16 or float32 panels,
// arithmetic in float32. The result of a row does not depend on how many rows are computed
// together.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "policies/budgets/budget.hpp"
#include "policies/features/output_projections.hpp"
#include "traces/trace.hpp"

namespace kvlab {

/// The RMS norms of a block, by the names of their tensors. If the model lacks a norm, its name is
/// empty.
struct BlockNorms {
  std::string_view pre_attention = "input_layernorm", post_attention = {},
                   pre_mlp = "post_attention_layernorm", post_mlp = {};
};

/// Layers with a mixture of experts. A router chooses some of the experts for each token.
struct Experts {
  std::uint32_t count = 0, chosen = 0;  ///< experts of a layer, and how many a token uses; 0: none
  std::uint32_t mlp = 0;                ///< MLP width of each expert
  bool among_chosen = false;  ///< the router's softmax is over the chosen experts, not over all
  bool stacked = false;       ///< the experts of a layer share one tensor [expert, input, output],
                              ///< in which gate and up outputs alternate; experts have biases
  std::vector<bool> layers = {};  ///< [layer]: whether the layer has experts
};

/// The contents of config.json.
struct ModelConfig {
  std::string name;          ///< name of the directory
  std::string architecture;  ///< LlamaForCausalLM, …
  std::uint32_t layers = 0, hidden = 0, query_heads = 0, kv_heads = 0, head_size = 0, mlp = 0,
                vocab = 0;
  std::uint32_t trained_context = 0;  ///< max_position_embeddings
  float norm_epsilon = 0;
  float norm_offset = 0;      ///< norms multiply by (norm_offset + weight)
  float embedding_scale = 1;  ///< factor on a token's embedding, but not on the output matrix
  BlockNorms norms;
  bool tied_head = false, qkv_bias = false, output_bias = false, mlp_bias = false, qk_norm = false,
       whole_qk_norm = false,  ///< qk_norm is one norm over all heads
      gelu = false,            ///< activation: GELU by its tanh approximation; otherwise SiLU
      fused = false,           ///< one tensor contains q, k and v, and one contains gate and up
      sinks = false;  ///< layers have sink logits, which are in `rows` once the weights are loaded
  /// Limit of the experts' gate and up values; 0: none. With a limit, the experts' activation is
  /// gate * sigmoid(1.702 gate), multiplied by (up + 1).
  float clamp = 0;
  Experts experts;
  std::uint32_t rotated = 0;  ///< number of dimensions that RoPE rotates, which are the first ones
                              ///< of a head in the checkpoint
  Dtype weights_dtype = Dtype::bf16;
  std::int32_t bos = -1;  ///< from config.json; -1: none; the tokenizer's value takes precedence
  std::vector<std::int32_t> eos;  ///< may be empty
  std::vector<RowSpec> rows;      ///< [layer]: how its queries attend
  JsonValue rope_config;          ///< RoPE of the layers without a window, for people to read
  std::vector<std::string> unknown_keys;  ///< keys of config.json that kvlab does not know and that
                                          ///< may change the model

  /// The shape of this model's traces. The CPU decoder's q, k and v are float32.
  ModelShape shape() const { return {layers, query_heads, kv_heads, head_size, Dtype::f32}; }
  CacheShape heads() const;
  bool has_experts(std::uint32_t layer) const { return experts.count > 0 && experts.layers[layer]; }
  bool has_windows() const;  ///< whether some layer has a sliding window
  /// Whether q and k are normalized separately in each head.
  bool norms_each_head() const { return qk_norm && !whole_qk_norm; }
  /// The row of the layers without a window, which all attend in the same way. If all layers have a
  /// window, the row of the first layer.
  const RowSpec& full_attention_row() const;
  const Rope& rope() const { return full_attention_row().rope; }
  /// Number of RoPE tables that the rows use; they are numbered from 0.
  std::uint32_t rope_tables() const;
  const Rope& rope_of_table(std::uint32_t table) const;
  float softmax_scale() const { return full_attention_row().scale; }
};

/// The supported architectures, each with its model_type.
std::vector<std::pair<std::string, std::string>> supported_architectures();
/// Reads config.json. Throws std::runtime_error that names the file and the key if a key is missing
/// or out of range, or if an architecture or option is not supported (other activations, other RoPE
/// types, …).
ModelConfig load_model_config(const std::filesystem::path& directory);
/// Reads a config.json at any path. `name` is the model's name. Throws as load_model_config() does.
ModelConfig read_model_config(const std::filesystem::path& path, std::string name);

/// Returns which row of the checkpoint's q or k becomes row `row` in kvlab's layout. In that layout
/// the two dimensions that RoPE rotates as a pair are half a head apart. In each half of a head,
/// dimensions that RoPE does not rotate (the last ones of a head in the checkpoint) follow the
/// rotated ones.
std::size_t turned_row(std::size_t row, std::size_t head_size, std::size_t rotated);

class Model {
 public:
  /// Reads config.json and the weights: model.safetensors, or the files of
  /// model.safetensors.index.json. Checks every tensor's name, dtype and shape. Throws
  /// std::runtime_error if one is wrong.
  static Model load(const std::filesystem::path& directory, unsigned threads);

  const ModelConfig& config() const;
  /// XXH3-64 of the weight files, and of tokenizer.json (empty if there is none).
  const std::string& weights_xxh3() const;
  const std::string& tokenizer_xxh3() const;

  // Rows are tokens. All matrices are row-major float32 with `n` rows. Work is spread over
  // `threads` in fixed tiles.
  // Writes embeddings to x [n, hidden]. Throws std::out_of_range for an id outside the vocabulary.
  void embed(std::span<const std::int32_t> ids, float* x) const;
  /// Computes q, k and v before RoPE: norm, projections, biases, and the norms of q and k. q is [n,
  /// query_heads, head_size]; k and v are [n, kv_heads, head_size].
  void attention_inputs(std::uint32_t layer, const float* x, std::size_t n, float* q, float* k,
                        float* v, unsigned threads) const;
  /// x += output projection of o [n, query_heads, head_size], followed by a norm if the model has
  /// one there.
  void attention_output(std::uint32_t layer, const float* o, std::size_t n, float* x,
                        unsigned threads) const;
  /// The weights of attention_output(), converted on the first call.
  std::shared_ptr<const OutputProjections> output_projections() const;
  /// x += down(act(gate(norm(x))) * up(norm(x))), followed by a norm if the model has one there.
  void mlp(std::uint32_t layer, float* x, std::size_t n, unsigned threads) const;
  /// Computes the logits [n, vocab] of x, after the final norm.
  void logits(const float* x, std::size_t n, float* out, unsigned threads) const;

 private:
  class Impl;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace kvlab
