// A decoder-only transformer on the CPU, as building blocks: weights in bf16 or float32 panels,
// arithmetic in float32. A row's result does not depend on how many rows are computed with it.
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

/// Where a block has RMS norms: the tensors' names in its layer; empty: none there.
struct BlockNorms {
  std::string_view before_attention = "input_layernorm", behind_attention = {},
                   before_mlp = "post_attention_layernorm", behind_mlp = {};
};

/// Layers whose MLP is of experts, of which a router chooses some for each token.
struct Experts {
  std::uint32_t count = 0, chosen = 0;  ///< 0: none
  std::uint32_t mlp = 0;                ///< width of each
  bool among_chosen = false;            ///< the router's softmax is over the chosen, not over all
  bool stacked = false;  ///< in one tensor [expert, input, output], gate and up in turns; biases
  std::vector<bool> layers = {};  ///< which ones
};

/// What config.json says.
struct ModelConfig {
  std::string name;          ///< the directory's name
  std::string architecture;  ///< LlamaForCausalLM, …
  std::uint32_t layers = 0, hidden = 0, query_heads = 0, kv_heads = 0, head_size = 0, mlp = 0,
                vocab = 0;
  std::uint32_t trained_context = 0;  ///< max_position_embeddings
  float norm_epsilon = 0;
  float norm_offset = 0;      ///< norms multiply by this and their weight
  float embedding_scale = 1;  ///< of a token's embedding, not of the output matrix
  BlockNorms norms;
  bool tied_head = false, qkv_bias = false, output_bias = false, mlp_bias = false, qk_norm = false,
       whole_qk_norm = false,  ///< of all heads together
      gelu = false,            ///< by tanh; otherwise silu
      fused = false,           ///< one tensor has q, k and v, one the gate and up
      sinks = false;           ///< layers have sink logits; in `rows` once weights are loaded
  float clamp = 0;             ///< of experts' gates and ups (gate * sigmoid(1.702 gate)); 0: none
  Experts experts;
  std::uint32_t rotated = 0;  ///< dimensions that turn, first in a checkpoint's heads
  Dtype weights_dtype = Dtype::bf16;
  std::int32_t bos = -1;          ///< as config.json says; the tokenizer has the say; -1: none
  std::vector<std::int32_t> eos;  ///< may be empty
  std::vector<RowSpec> rows;      ///< by layer: how its queries attend
  JsonValue rope_config;          ///< of the layers without a window, for people
  std::vector<std::string> unknown_keys;  ///< of config.json, which may change what is computed

  /// The shape of this model's traces; the CPU decoder's q, k and v are float32.
  ModelShape shape() const { return {layers, query_heads, kv_heads, head_size, Dtype::f32}; }
  CacheShape heads() const;
  bool has_experts(std::uint32_t layer) const { return experts.count > 0 && experts.layers[layer]; }
  bool has_windows() const;                                           ///< some layer has one
  bool norms_each_head() const { return qk_norm && !whole_qk_norm; }  ///< of q and k
  /// Of the layers without a window, which attend alike; of the first, where all have one.
  const RowSpec& full_attention_row() const;
  const Rope& rope() const { return full_attention_row().rope; }
  /// Rotation tables of the rows, numbered from 0.
  std::uint32_t rope_tables() const;
  const Rope& rope_of_table(std::uint32_t table) const;
  float softmax_scale() const { return full_attention_row().scale; }
};

/// The architectures that are supported, and each one's model_type.
std::vector<std::pair<std::string, std::string>> supported_architectures();
/// Throws std::runtime_error that names the file and key: missing, out of range, or an architecture
/// or option that is not supported (other activations, other RoPE types, …).
ModelConfig load_model_config(const std::filesystem::path& directory);
/// Reads one config.json, wherever it lies; `name` is the model's. Throws as load_model_config().
ModelConfig read_model_config(const std::filesystem::path& path, std::string name);

/// The row of a checkpoint's q or k that stands at `row` here: dimensions that turn together are
/// half a head apart, those that do not turn (the last ones of a checkpoint's head) come after
/// either half.
std::size_t turned_row(std::size_t row, std::size_t head_size, std::size_t rotated);

class Model {
 public:
  /// Reads config.json and model.safetensors, or the files of model.safetensors.index.json. Checks
  /// every tensor's name, dtype and shape. Throws std::runtime_error.
  static Model load(const std::filesystem::path& directory, unsigned threads);

  const ModelConfig& config() const;
  /// XXH3-64 of the weight files and of tokenizer.json (empty if there is none).
  const std::string& weights_xxh3() const;
  const std::string& tokenizer_xxh3() const;

  // Rows are tokens; all matrices are row-major float32. `n` rows each; work is spread over
  // `threads` in fixed tiles. Throws std::out_of_range for an id outside the vocabulary.
  void embed(std::span<const std::int32_t> ids, float* x) const;  // x [n, hidden]
  /// norm, projections, biases, q/k norm; before RoPE. q [n, query_heads, head_size], k and v
  /// [n, kv_heads, head_size].
  void attention_inputs(std::uint32_t layer, const float* x, std::size_t n, float* q, float* k,
                        float* v, unsigned threads) const;
  /// x += output projection of o [n, query_heads, head_size], with a norm behind it likewise.
  void attention_output(std::uint32_t layer, const float* o, std::size_t n, float* x,
                        unsigned threads) const;
  /// Weights of attention_output(), made at the first call.
  std::shared_ptr<const OutputProjections> output_projections() const;
  /// x += down(act(gate(norm(x))) * up(norm(x))), with a norm behind where there is one.
  void mlp(std::uint32_t layer, float* x, std::size_t n, unsigned threads) const;
  /// logits [n, vocab] of the final norm of x.
  void logits(const float* x, std::size_t n, float* out, unsigned threads) const;

 private:
  class Impl;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace kvlab
