#include "engine/checkpoint/model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>
#include <numeric>
#include <stdexcept>

#include "engine/checkpoint/checkpoint.hpp"
#include "engine/linear.hpp"
#include "traces/base/numeric/elementwise.hpp"
#include "traces/base/numeric/softmax.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kRowsAtOnce = 512;  // limits the memory that a long prompt needs

/// Where the rows of a weight are in a tensor. If `shape` is empty, the weight is the whole tensor.
struct Part {
  std::vector<std::size_t> shape = {};  ///< shape of the tensor
  std::size_t first = 0;                ///< first element
  std::size_t row_step = 0, column_step = 1;
};

/// Converts a checkpoint's tensors to vectors and panels.
class Loader {
 public:
  Loader(TensorReader& tensors, unsigned threads) : tensors_(tensors), threads_(threads) {}

  /// The factors of a norm; empty if the layer has none.
  std::vector<float> norm(const std::string& layer, std::string_view name, std::size_t size,
                          const ModelConfig& config) {
    if (name.empty()) return {};
    std::vector<float> values = vector(fmt::format("{}{}.weight", layer, name), size);
    for (float& value : values) value += config.norm_offset;
    return values;
  }

  std::vector<float> vector(const std::string& name, std::size_t size, Part part = {}) {
    if (part.shape.empty()) part.shape = {size};
    const TensorView& tensor = tensors_.take(name, part.shape);
    std::vector<float> values(size);
    read(tensor, part.first, part.column_step, values);
    check_finite(name, values);
    return values;
  }

  Panels matrix(const std::string& name, std::size_t rows, std::size_t columns, Part part = {},
                std::size_t head_size = 0, std::size_t rotated = 0) {
    if (part.shape.empty()) part.shape = {rows, columns};
    if (part.row_step == 0) part.row_step = columns;
    const TensorView& tensor = tensors_.take(name, part.shape);
    Panels panels(rows, columns, tensor.dtype);
    parallel_for(panels.panel_count(), threads_, [&](std::size_t panel) {
      std::vector<float> values(columns);
      for (std::size_t row = 16 * panel; row < std::min(rows, 16 * panel + 16); ++row) {
        const std::size_t from = rotated == head_size ? row : turned_row(row, head_size, rotated);
        read(tensor, part.first + from * part.row_step, part.column_step, values);
        check_finite(name, values);
        panels.set_row(row, values.data());
      }
    });
    return panels;
  }

  Linear linear(const std::string& name, std::size_t outputs, std::size_t inputs, bool bias) {
    Linear layer;
    layer.weight = matrix(name + ".weight", outputs, inputs);
    if (bias) layer.bias = vector(name + ".bias", outputs);
    return layer;
  }

  /// Reads outputs [first, first + outputs) of a tensor with `all` outputs.
  Linear load_fused(const std::string& name, std::size_t all, std::size_t first,
                    std::size_t outputs, std::size_t inputs, std::size_t head_size = 0,
                    std::size_t rotated = 0) {
    return {matrix(name, outputs, inputs, {.shape = {all, inputs}, .first = first * inputs},
                   head_size, rotated),
            {}};
  }

  /// Reads one expert's weight from a tensor [expert, inputs, all]: every step-th output from
  /// `first` on.
  Linear load_stacked(const std::string& name, std::size_t experts, std::size_t expert,
                      std::size_t inputs, std::size_t all, std::size_t first, std::size_t step) {
    const Part weight{{experts, inputs, all}, expert * inputs * all + first, step, all};
    const Part bias{{experts, all}, expert * all + first, 0, step};
    return {matrix(name, all / step, inputs, weight), vector(name + "_bias", all / step, bias)};
  }

 private:
  static void read(const TensorView& tensor, std::size_t first, std::size_t step,
                   std::span<float> to) {
    const std::size_t bytes = bytes_of(tensor.dtype);
    const auto* const from = tensor.data.data() + first * bytes;
    if (step == 1) return to_float(tensor.dtype, from, to.size(), to.data());
    for (std::size_t i = 0; i < to.size(); ++i)
      to_float(tensor.dtype, from + i * step * bytes, 1, &to[i]);
  }

  void check_finite(const std::string& name, std::span<const float> values) const {
    if (!std::ranges::all_of(values, [](float v) { return std::isfinite(v); }))
      tensors_.refuse_not_finite(name);
  }

  TensorReader& tensors_;
  unsigned threads_;
};

struct Mlp {
  Linear gate, up, down;
};

struct Layer {
  // [hidden], or empty
  std::vector<float> pre_attention, post_attention, pre_mlp, post_mlp;
  Linear q, k, v, output;
  std::vector<float> q_norm, k_norm;  // [head_size], or [heads * head_size], or empty
  Mlp mlp;
  Linear router;             // [experts, hidden], or empty
  std::vector<Mlp> experts;  // empty without experts
};

Mlp load_mlp(Loader& loader, const ModelConfig& c, const std::string& prefix, std::size_t width) {
  const std::string both = prefix + "gate_up_proj.weight";
  return {.gate = c.fused ? loader.load_fused(both, 2 * width, 0, width, c.hidden)
                          : loader.linear(prefix + "gate_proj", width, c.hidden, c.mlp_bias),
          .up = c.fused ? loader.load_fused(both, 2 * width, width, width, c.hidden)
                        : loader.linear(prefix + "up_proj", width, c.hidden, c.mlp_bias),
          .down = loader.linear(prefix + "down_proj", c.hidden, width, c.mlp_bias)};
}

void load_experts(Loader& loader, const ModelConfig& c, const std::string& prefix, Layer& layer) {
  const Experts& all = c.experts;
  const std::string both = prefix + "experts.gate_up_proj", down = prefix + "experts.down_proj";
  layer.router =
      loader.linear(prefix + (all.stacked ? "router" : "gate"), all.count, c.hidden, all.stacked);
  for (std::size_t e = 0; e < all.count; ++e)
    layer.experts.push_back(
        all.stacked
            ? Mlp{.gate = loader.load_stacked(both, all.count, e, c.hidden, 2 * all.mlp, 0, 2),
                  .up = loader.load_stacked(both, all.count, e, c.hidden, 2 * all.mlp, 1, 2),
                  .down = loader.load_stacked(down, all.count, e, all.mlp, c.hidden, 0, 1)}
            : load_mlp(loader, c, fmt::format("{}experts.{}.", prefix, e), all.mlp));
}

void load_fused_attention(Loader& loader, const ModelConfig& c, const std::string& prefix,
                          Layer& layer) {
  const std::string name = prefix + "qkv_proj.weight";
  const std::size_t q = std::size_t{c.query_heads} * c.head_size,
                    kv = std::size_t{c.kv_heads} * c.head_size, all = q + 2 * kv;
  layer.q = loader.load_fused(name, all, 0, q, c.hidden, c.head_size, c.rotated);
  layer.k = loader.load_fused(name, all, q, kv, c.hidden, c.head_size, c.rotated);
  layer.v = loader.load_fused(name, all, q + kv, kv, c.hidden);
}

Layer load_layer(Loader& loader, const ModelConfig& c, std::uint32_t index) {
  const std::string prefix = fmt::format("model.layers.{}.", index);
  const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
  const std::size_t q_size = std::size_t{c.query_heads} * c.head_size;
  const std::size_t kv_size = std::size_t{c.kv_heads} * c.head_size;
  Layer layer;
  layer.pre_attention = loader.norm(prefix, c.norms.pre_attention, c.hidden, c);
  layer.post_attention = loader.norm(prefix, c.norms.post_attention, c.hidden, c);
  layer.pre_mlp = loader.norm(prefix, c.norms.pre_mlp, c.hidden, c);
  layer.post_mlp = loader.norm(prefix, c.norms.post_mlp, c.hidden, c);
  if (c.fused) {
    load_fused_attention(loader, c, attention, layer);
  } else {
    layer.q = loader.linear(attention + "q_proj", q_size, c.hidden, c.qkv_bias);
    layer.k = loader.linear(attention + "k_proj", kv_size, c.hidden, c.qkv_bias);
    layer.v = loader.linear(attention + "v_proj", kv_size, c.hidden, c.qkv_bias);
  }
  layer.output = loader.linear(attention + "o_proj", c.hidden, q_size, c.output_bias);
  if (c.qk_norm) {
    layer.q_norm = loader.norm(attention, "q_norm", c.whole_qk_norm ? q_size : c.head_size, c);
    layer.k_norm = loader.norm(attention, "k_norm", c.whole_qk_norm ? kv_size : c.head_size, c);
  }
  if (c.has_experts(index))
    load_experts(loader, c, mlp, layer);
  else
    layer.mlp = load_mlp(loader, c, mlp, c.mlp);
  return layer;
}

/// Calls body(first, count) for consecutive blocks of n rows. A block has at most kRowsAtOnce rows.
template <class Body>
void for_each_block(std::size_t n, Body body) {
  for (std::size_t first = 0; first < n; first += kRowsAtOnce)
    body(first, std::min(kRowsAtOnce, n - first));
}

}  // namespace

class Model::Impl {
 public:
  Impl(const std::filesystem::path& directory, unsigned threads)
      : config_(load_model_config(directory)) {
    const Checkpoint checkpoint = Checkpoint::open(directory);
    TensorReader tensors(checkpoint);
    Loader loader(tensors, threads);
    const std::string embedding = "model.embed_tokens.weight", head = "lm_head";
    embedding_.weight = loader.matrix(embedding, config_.vocab, config_.hidden);
    if (config_.tied_head)
      tensors.take_copy(head + ".weight", embedding,
                        std::array<std::size_t, 2>{config_.vocab, config_.hidden});
    else
      head_ = loader.linear(head, config_.vocab, config_.hidden, false);
    norm_ = loader.norm("model.", "norm", config_.hidden, config_);
    for (std::uint32_t i = 0; i < config_.layers; ++i)
      layers_.push_back(load_layer(loader, config_, i));
    for (std::uint32_t i = 0; config_.sinks && i < config_.layers; ++i)
      config_.rows[i].sinks =
          loader.vector(fmt::format("model.layers.{}.self_attn.sinks", i), config_.query_heads);
    tensors.refuse_rest();

    weights_xxh3_ = checkpoint.xxh3();
    tokenizer_xxh3_ = kvlab::tokenizer_xxh3(directory);
  }

  const ModelConfig& config() const { return config_; }
  const std::string& weights_xxh3() const { return weights_xxh3_; }
  const std::string& tokenizer_xxh3() const { return tokenizer_xxh3_; }

  void embed(std::span<const std::int32_t> ids, float* x) const {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0 || static_cast<std::uint32_t>(ids[i]) >= config_.vocab)
        throw std::out_of_range(fmt::format("token id {} is outside the vocabulary of {} ({})",
                                            ids[i], config_.name, config_.vocab));
      embedding_.weight.get_row(static_cast<std::size_t>(ids[i]), x + i * config_.hidden);
    }
    if (config_.embedding_scale != 1)
      scale(x, ids.size() * config_.hidden, config_.embedding_scale);
  }

  void attention_inputs(std::uint32_t index, const float* x, std::size_t n, float* q, float* k,
                        float* v, unsigned threads) const {
    const Layer& layer = layers_.at(index);
    const std::size_t q_size = layer.q.weight.rows(), kv_size = layer.k.weight.rows();
    for_each_block(n, [&](std::size_t first, std::size_t count) {
      const std::vector<float> normed =
          norm_rows(x + first * config_.hidden, count, layer.pre_attention, threads);
      apply(layer.q, normed.data(), count, q + first * q_size, threads);
      apply(layer.k, normed.data(), count, k + first * kv_size, threads);
      apply(layer.v, normed.data(), count, v + first * kv_size, threads);
    });
    if (!config_.qk_norm) return;
    norm_parts(q, n * q_size, layer.q_norm, threads);
    norm_parts(k, n * kv_size, layer.k_norm, threads);
  }

  std::shared_ptr<const OutputProjections> output_projections() const {
    std::call_once(made_output_, [&] {
      auto made = std::make_shared<OutputProjections>(OutputProjections{
          config_.hidden, config_.query_heads / config_.kv_heads, config_.head_size, {}});
      for (const Layer& layer : layers_)
        made->add_layer(config_.query_heads, [&](std::size_t output, float* row) {
          layer.output.weight.get_row(output, row);
        });
      output_ = std::move(made);
    });
    return output_;
  }

  void attention_output(std::uint32_t index, const float* o, std::size_t n, float* x,
                        unsigned threads) const {
    const Layer& layer = layers_.at(index);
    for_each_block(n, [&](std::size_t first, std::size_t count) {
      add_output(layer.output, layer.post_attention, o + first * layer.output.weight.depth(), count,
                 x + first * config_.hidden, threads);
    });
  }

  void mlp(std::uint32_t index, float* x, std::size_t n, unsigned threads) const {
    const Layer& layer = layers_.at(index);
    std::vector<float> inner;
    const bool has_experts = config_.has_experts(index);
    for_each_block(n, [&](std::size_t first, std::size_t count) {
      float* rows = x + first * config_.hidden;
      const std::vector<float> normed = norm_rows(rows, count, layer.pre_mlp, threads);
      if (has_experts) return add_experts(layer, normed, count, rows, threads);
      inner.resize(count * config_.mlp);
      gate_up(layer.mlp, normed.data(), count, inner.data(), threads);
      add_output(layer.mlp.down, layer.post_mlp, inner.data(), count, rows, threads);
    });
  }

  void logits(const float* x, std::size_t n, float* out, unsigned threads) const {
    for_each_block(n, [&](std::size_t first, std::size_t count) {
      const std::vector<float> normed =
          norm_rows(x + first * config_.hidden, count, norm_, threads);
      apply(config_.tied_head ? embedding_ : head_, normed.data(), count,
            out + first * config_.vocab, threads);
    });
  }

 private:
  /// x += last(y), where `last` is a block's last product. If there is a norm, last(y) is
  /// normalized first.
  void add_output(const Linear& last, const std::vector<float>& norm, const float* y, std::size_t n,
                  float* x, unsigned threads) const {
    if (norm.empty()) return apply_and_add(last, y, n, x, threads);
    std::vector<float> out(n * config_.hidden);
    apply(last, y, n, out.data(), threads);
    out = norm_rows(out.data(), n, norm, threads);
    add(out.data(), out.size(), x);
  }

  /// Returns the norm of x, or x itself if there is no norm.
  std::vector<float> norm_rows(const float* x, std::size_t n, const std::vector<float>& weight,
                               unsigned threads) const {
    if (weight.empty()) return {x, x + n * config_.hidden};
    std::vector<float> y(n * config_.hidden);
    for_rows(n, config_.hidden, threads, [&](std::size_t first, std::size_t count) {
      for (std::size_t i = first * config_.hidden; i < (first + count) * config_.hidden;
           i += config_.hidden)
        rms_norm(x + i, weight.data(), config_.hidden, config_.norm_epsilon, y.data() + i);
    });
    return y;
  }

  /// Normalizes x in place, one part after another. Each part is as long as the norm's weight.
  void norm_parts(float* x, std::size_t numbers, const std::vector<float>& weight,
                  unsigned threads) const {
    const std::size_t size = weight.size();
    for_rows(numbers / size, size, threads, [&](std::size_t first, std::size_t count) {
      for (float* part = x + first * size; part < x + (first + count) * size; part += size)
        rms_norm(part, weight.data(), size, config_.norm_epsilon, part);
    });
  }

  /// Returns each row's weight for each expert [n, experts], which is 0 if the expert is not
  /// chosen. Of experts with equal logits, the first one is chosen.
  std::vector<float> expert_shares(const Layer& layer, const std::vector<float>& x, std::size_t n,
                                   unsigned threads) const {
    const Experts& experts = config_.experts;
    std::vector<float> logits(n * experts.count), shares(logits.size());
    apply(layer.router, x.data(), n, logits.data(), threads);
    std::vector<std::size_t> order(experts.count);
    for (std::size_t row = 0; row < n; ++row) {
      const float* const own = &logits[row * experts.count];
      std::iota(order.begin(), order.end(), 0);
      std::ranges::stable_sort(order,
                               [&](std::size_t a, std::size_t b) { return own[a] > own[b]; });
      const auto among = experts.among_chosen ? experts.chosen : experts.count;
      double sum = 0;
      for (std::size_t i = 0; i < among; ++i)
        sum += std::exp(double{own[order[i]]} - own[order[0]]);
      for (std::size_t i = 0; i < experts.chosen; ++i)
        shares[row * experts.count + order[i]] =
            static_cast<float>(std::exp(double{own[order[i]]} - own[order[0]]) / sum);
    }
    return shares;
  }

  /// x += the weighted outputs that the chosen experts compute from y, added in the order of
  /// experts. Each expert processes all rows for which it was chosen at once.
  void add_experts(const Layer& layer, const std::vector<float>& y, std::size_t n, float* x,
                   unsigned threads) const {
    const std::size_t hidden = config_.hidden, count = config_.experts.count;
    const std::vector<float> shares = expert_shares(layer, y, n, threads);
    for (std::size_t e = 0; e < count; ++e) {
      std::vector<std::size_t> rows;
      std::vector<float> own;
      for (std::size_t row = 0; row < n; ++row) {
        if (shares[row * count + e] == 0) continue;
        rows.push_back(row);
        own.insert(own.end(), &y[row * hidden], &y[row * hidden] + hidden);
      }
      if (rows.empty()) continue;
      std::vector<float> inner(rows.size() * config_.experts.mlp);
      gate_up(layer.experts[e], own.data(), rows.size(), inner.data(), threads);
      apply(layer.experts[e].down, inner.data(), rows.size(), own.data(), threads);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        scale(&own[i * hidden], hidden, shares[rows[i] * count + e]);
        add(&own[i * hidden], hidden, x + rows[i] * hidden);
      }
    }
  }

  /// gate = act(gate) * up or, if there is a clamp, gate = gate * sigmoid(1.702 * gate) * (up + 1),
  /// where gate is at most `clamp` and up is between -clamp and clamp.
  void activate(float* gate, const float* up, std::size_t count) const {
    if (config_.clamp == 0) return (config_.gelu ? gelu_times : silu_times)(gate, up, count);
    for (std::size_t i = 0; i < count; ++i) {
      const double g = std::min(gate[i], config_.clamp);
      const double u = std::clamp(up[i], -config_.clamp, config_.clamp);
      gate[i] = static_cast<float>((u + 1) * g / (1 + std::exp(-1.702 * g)));
    }
  }

  /// inner = act(gate(x)) * up(x); inner [n, width].
  void gate_up(const Mlp& layer, const float* x, std::size_t n, float* inner,
               unsigned threads) const {
    const std::size_t width = layer.gate.weight.rows();
    for_tiles(n, layer.gate.weight, threads, [&](const Tile& tile) {
      alignas(64) float gate[kTileRows * kTileColumns], up[kTileRows * kTileColumns];
      tile_product(layer.gate, x, tile, gate);
      tile_product(layer.up, x, tile, up);
      const std::size_t columns = std::min<std::size_t>(kTileColumns, width - tile.first_output());
      for (std::size_t r = 0; r < tile.rows; ++r) {
        activate(gate + r * kTileColumns, up + r * kTileColumns, columns);
        std::copy_n(gate + r * kTileColumns, columns,
                    inner + (tile.first_row + r) * width + tile.first_output());
      }
    });
  }

  ModelConfig config_;
  std::string weights_xxh3_, tokenizer_xxh3_;
  Linear embedding_, head_;  // [vocab, hidden]; head_ is empty if it is tied
  std::vector<float> norm_;  // [hidden]
  std::vector<Layer> layers_;
  mutable std::once_flag made_output_;
  mutable std::shared_ptr<const OutputProjections> output_;
};

std::size_t turned_row(std::size_t row, std::size_t head_size, std::size_t rotated) {
  const std::size_t d = row % head_size, half = head_size / 2, turns = rotated / 2;
  const std::size_t side = d / half, i = d % half;
  const std::size_t from =
      i < turns ? side * turns + i : rotated + side * (half - turns) + i - turns;
  return row - d + from;
}

Model Model::load(const std::filesystem::path& directory, unsigned threads) {
  Model model;
  model.impl_ = std::make_shared<const Impl>(directory, threads);
  return model;
}

const ModelConfig& Model::config() const { return impl_->config(); }
const std::string& Model::weights_xxh3() const { return impl_->weights_xxh3(); }
const std::string& Model::tokenizer_xxh3() const { return impl_->tokenizer_xxh3(); }

void Model::embed(std::span<const std::int32_t> ids, float* x) const { impl_->embed(ids, x); }

void Model::attention_inputs(std::uint32_t layer, const float* x, std::size_t n, float* q, float* k,
                             float* v, unsigned threads) const {
  impl_->attention_inputs(layer, x, n, q, k, v, threads);
}

std::shared_ptr<const OutputProjections> Model::output_projections() const {
  return impl_->output_projections();
}
void Model::attention_output(std::uint32_t layer, const float* o, std::size_t n, float* x,
                             unsigned threads) const {
  impl_->attention_output(layer, o, n, x, threads);
}

void Model::mlp(std::uint32_t layer, float* x, std::size_t n, unsigned threads) const {
  impl_->mlp(layer, x, n, threads);
}

void Model::logits(const float* x, std::size_t n, float* out, unsigned threads) const {
  impl_->logits(x, n, out, threads);
}

}  // namespace kvlab
