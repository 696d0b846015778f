#include "engine/cuda/model/weight_plan.hpp"

#include <fmt/format.h>

namespace kvlab {
namespace {

constexpr std::size_t kWeightAlignment = 256;  // in bytes; cuBLASLt's fastest kernels need it

class Planner {
 public:
  Planner(const ModelConfig& config, Dtype dtype, std::byte* base)
      : config_(config), element_bytes_(bytes_of(dtype)), base_(base) {}

  WeightPlan run() {
    const std::size_t hidden = config_.hidden, vocab = config_.vocab;
    plan_.weights.embedding = tensor("model.embed_tokens.weight", {vocab, hidden});
    plan_.weights.head = {.n = static_cast<int>(vocab),
                          .k = static_cast<int>(hidden),
                          .weight = plan_.weights.embedding,
                          .bias = nullptr};
    if (!config_.tied_head) plan_.weights.head.weight = tensor("lm_head.weight", {vocab, hidden});
    plan_.weights.norm = norm("model.norm.weight", hidden);
    for (std::uint32_t i = 0; i < config_.layers; ++i) plan_.weights.layers.push_back(layer(i));
    align();
    return std::move(plan_);
  }

 private:
  DeviceLayer layer(std::uint32_t index) {
    const std::string prefix = fmt::format("model.layers.{}.", index);
    const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
    const std::size_t q = std::size_t{config_.query_heads} * config_.head_size;
    const std::size_t kv = std::size_t{config_.kv_heads} * config_.head_size;
    DeviceLayer layer;
    const auto block_norm = [&](std::string_view name) -> void* {
      return name.empty() ? nullptr
                          : norm(fmt::format("{}{}.weight", prefix, name), config_.hidden);
    };
    layer.input_norm = block_norm(config_.norms.pre_attention);
    layer.post_attention = block_norm(config_.norms.post_attention);
    layer.mlp_norm = block_norm(config_.norms.pre_mlp);
    layer.post_mlp = block_norm(config_.norms.post_mlp);
    if (config_.qk_norm) {
      const bool whole = config_.whole_qk_norm;
      layer.q_norm = norm(attention + "q_norm.weight", whole ? q : config_.head_size);
      layer.k_norm = norm(attention + "k_norm.weight", whole ? kv : config_.head_size);
    }
    layer.qkv = config_.fused
                    ? plan_fused({{attention + "qkv_proj", q + 2 * kv}}, config_.hidden, false)
                    : plan_fused({{attention + "q_proj", q},
                                  {attention + "k_proj", kv},
                                  {attention + "v_proj", kv}},
                                 config_.hidden, config_.qkv_bias);
    if (config_.fused) turn(plan_.parts.back(), q + kv);
    if (config_.sinks) layer.sinks = tensor(attention + "sinks", {config_.query_heads});
    layer.output = plan_fused({{attention + "o_proj", config_.hidden}}, q, config_.output_bias);
    if (config_.has_experts(index))
      config_.experts.stacked ? stacked_experts(mlp, layer) : listed_experts(mlp, layer);
    else
      dense_mlp(mlp, layer);
    return layer;
  }

  void dense_mlp(const std::string& mlp, DeviceLayer& layer) {
    const std::size_t width = config_.mlp;
    layer.gate_up = config_.fused
                        ? plan_fused({{mlp + "gate_up_proj", 2 * width}}, config_.hidden, false)
                        : plan_fused({{mlp + "gate_proj", width}, {mlp + "up_proj", width}},
                                     config_.hidden, config_.mlp_bias);
    layer.down = plan_fused({{mlp + "down_proj", config_.hidden}}, width, config_.mlp_bias);
  }

  void listed_experts(const std::string& mlp, DeviceLayer& layer) {
    const Experts& all = config_.experts;
    std::vector<Rows> gate_up, down;
    for (std::uint32_t e = 0; e < all.count; ++e) {
      const std::string prefix = fmt::format("{}experts.{}.", mlp, e);
      gate_up.push_back({prefix + "gate_proj", all.mlp});
      gate_up.push_back({prefix + "up_proj", all.mlp});
      down.push_back({prefix + "down_proj", config_.hidden});
    }
    layer.router = plan_fused({{mlp + "gate", all.count}}, config_.hidden, false);
    layer.gate_up = split_experts(plan_fused(gate_up, config_.hidden, false));
    layer.down = split_experts(plan_fused(down, all.mlp, false));
  }
  DeviceMatrix split_experts(DeviceMatrix matrix) const {
    matrix.experts = static_cast<int>(config_.experts.count);
    matrix.n /= matrix.experts;
    return matrix;
  }

  void stacked_experts(const std::string& mlp, DeviceLayer& layer) {
    const std::size_t width = config_.experts.mlp, hidden = config_.hidden;
    layer.router = plan_fused({{mlp + "router", config_.experts.count}}, hidden, true);
    layer.gate_up = plan_stacked(mlp + "experts.gate_up_proj", hidden, 2 * width, true);
    layer.down = plan_stacked(mlp + "experts.down_proj", width, hidden, false);
  }

  /// Plans a tensor [expert, input, output] and its biases. `interleaves`: the outputs of gate and
  /// up alternate.
  DeviceMatrix plan_stacked(const std::string& name, std::size_t inputs, std::size_t outputs,
                            bool interleaves) {
    const std::size_t count = config_.experts.count;
    const auto place = [=](std::size_t row, std::size_t expert_stride) {
      const std::size_t o = row % outputs, half = outputs / 2;
      return row / outputs * expert_stride + (!interleaves ? o
                                              : o < half   ? 2 * o
                                                           : 2 * (o - half) + 1);
    };
    DeviceMatrix matrix{.n = static_cast<int>(count * outputs), .k = static_cast<int>(inputs)};
    matrix.weight = tensor(name, {count, inputs, outputs});
    plan_.parts.back().columns = inputs;
    plan_.parts.back().source = [=](std::size_t row) -> RowSource {
      return {place(row, inputs * outputs), outputs};
    };
    matrix.bias = tensor(name + "_bias", {count, outputs}, Initial::zeros);
    plan_.parts.back().columns = 1;
    plan_.parts.back().source = [=](std::size_t row) -> RowSource {
      return {place(row, outputs), 1};
    };
    return split_experts(matrix);
  }

  /// Reorders the first `rows` rows of a tensor of queries or keys for RoPE; see turned_row().
  void turn(WeightPart& part, std::size_t rows) const {
    if (config_.rotated == config_.head_size) return;
    part.columns = config_.hidden;
    part.source = [rows, columns = part.columns, head_size = config_.head_size,
                   rotated = config_.rotated](std::size_t row) -> RowSource {
      return {(row < rows ? turned_row(row, head_size, rotated) : row) * columns, 1};
    };
  }

  struct Rows {
    std::string name;
    std::size_t count;
  };

  /// Makes one matrix from several matrices that have the same input, by stacking their rows.
  DeviceMatrix plan_fused(const std::vector<Rows>& parts, std::size_t inputs, bool bias) {
    DeviceMatrix matrix;
    matrix.k = static_cast<int>(inputs);
    align();
    matrix.weight = here();
    for (const Rows& part : parts) {
      add(part.name + ".weight", {part.count, inputs}, Initial::normal);
      matrix.n += static_cast<int>(part.count);
    }
    if (!bias) return matrix;
    align();
    matrix.bias = here();
    for (const Rows& part : parts) add(part.name + ".bias", {part.count}, Initial::zeros);
    return matrix;
  }

  void* tensor(const std::string& name, std::vector<std::size_t> shape,
               Initial initial = Initial::normal) {
    align();
    void* const at = here();
    add(name, std::move(shape), initial);
    return at;
  }
  void* norm(const std::string& name, std::size_t size) {
    return tensor(name, {size}, config_.norm_offset > 0 ? Initial::zeros : Initial::ones);
  }

  void add(std::string name, std::vector<std::size_t> shape, Initial initial) {
    plan_.parts.push_back({.name = std::move(name),
                           .shape = std::move(shape),
                           .initial = initial,
                           .offset = plan_.bytes});
    plan_.bytes += plan_.parts.back().elements() * element_bytes_;
  }

  void align() {
    plan_.bytes = (plan_.bytes + kWeightAlignment - 1) / kWeightAlignment * kWeightAlignment;
  }
  std::byte* here() const { return base_ ? base_ + plan_.bytes : nullptr; }

  const ModelConfig& config_;
  std::size_t element_bytes_;
  std::byte* base_;
  WeightPlan plan_;
};

}  // namespace

std::size_t WeightPart::elements() const {
  std::size_t count = 1;
  for (const std::size_t size : shape) count *= size;
  return count;
}

WeightPlan plan_weights(const ModelConfig& config, Dtype dtype, std::byte* base) {
  return Planner(config, dtype, base).run();
}

}  // namespace kvlab
