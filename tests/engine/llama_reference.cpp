#include "tests/engine/llama_reference.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "traces/base/safetensors.hpp"

namespace kvlab {
namespace {

using Doubles = std::vector<double>;

struct Matrix {
  std::size_t rows, columns;
  Doubles values;
};

Matrix read(const SafetensorsFile& file, const std::string& name) {
  const TensorView& tensor = file.at(name);
  std::vector<float> floats(tensor.elements());
  to_float(tensor.dtype, tensor.data.data(), floats.size(), floats.data());
  const std::size_t columns = tensor.shape.back();
  return {floats.size() / columns, columns, Doubles(floats.begin(), floats.end())};
}

/// y = W x
Doubles product(const Matrix& w, const double* x) {
  Doubles y(w.rows);
  for (std::size_t r = 0; r < w.rows; ++r)
    for (std::size_t c = 0; c < w.columns; ++c) y[r] += w.values[r * w.columns + c] * x[c];
  return y;
}

Doubles normalize(const Doubles& x, const Matrix& weight, double epsilon) {
  double squares = 0;
  for (const double value : x) squares += value * value;
  const double factor = 1 / std::sqrt(squares / static_cast<double>(x.size()) + epsilon);
  Doubles y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = x[i] * factor * weight.values[i];
  return y;
}

void rotate(double* x, std::size_t size, const Rope& rope, std::size_t position) {
  for (std::size_t i = 0; i < size / 2; ++i) {
    const double angle = static_cast<double>(position) * double{rope.inv_freq[i]};
    const double a = x[i], b = x[i + size / 2];
    x[i] = a * std::cos(angle) - b * std::sin(angle);
    x[i + size / 2] = b * std::cos(angle) + a * std::sin(angle);
  }
}

void add(Doubles& x, const Doubles& more) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] += more[i];
}

struct Layer {
  Layer(const SafetensorsFile& file, std::uint32_t index) {
    const auto part = [&](const char* name) {
      return read(file, fmt::format("model.layers.{}.{}.weight", index, name));
    };
    norm = part("input_layernorm"), q = part("self_attn.q_proj"), k = part("self_attn.k_proj");
    v = part("self_attn.v_proj"), o = part("self_attn.o_proj");
    mlp_norm = part("post_attention_layernorm"), gate = part("mlp.gate_proj");
    up = part("mlp.up_proj"), down = part("mlp.down_proj");
  }
  Matrix norm, q, k, v, o, mlp_norm, gate, up, down;
};

/// Attention of a query to `keys`, [token][kv_head * dim].
Doubles attention(const ModelConfig& config, const Doubles& q, const std::vector<Doubles>& keys,
                  const std::vector<Doubles>& values) {
  const std::size_t dim = config.head_size, group = config.query_heads / config.kv_heads;
  Doubles out(q.size());
  for (std::size_t head = 0; head < config.query_heads; ++head) {
    const std::size_t kv = head / group * dim;
    Doubles p;
    double sum = 0;
    for (const Doubles& key : keys) {
      double logit = 0;
      for (std::size_t d = 0; d < dim; ++d) logit += q[head * dim + d] * key[kv + d];
      p.push_back(std::exp(logit / std::sqrt(static_cast<double>(dim))));
      sum += p.back();
    }
    for (std::size_t j = 0; j < p.size(); ++j)
      for (std::size_t d = 0; d < dim; ++d) out[head * dim + d] += p[j] / sum * values[j][kv + d];
  }
  return out;
}

void run_layer(const Layer& layer, const ModelConfig& config, std::vector<Doubles>& x) {
  std::vector<Doubles> keys, values;
  for (std::size_t t = 0; t < x.size(); ++t) {
    const Doubles input = normalize(x[t], layer.norm, double{config.norm_epsilon});
    Doubles q = product(layer.q, input.data());
    keys.push_back(product(layer.k, input.data()));
    values.push_back(product(layer.v, input.data()));
    for (std::size_t h = 0; h < config.query_heads; ++h)
      rotate(&q[h * config.head_size], config.head_size, config.rope(), t);
    for (std::size_t h = 0; h < config.kv_heads; ++h)
      rotate(&keys[t][h * config.head_size], config.head_size, config.rope(), t);
    add(x[t], product(layer.o, attention(config, q, keys, values).data()));

    const Doubles mlp_input = normalize(x[t], layer.mlp_norm, double{config.norm_epsilon});
    Doubles gate = product(layer.gate, mlp_input.data());
    const Doubles up = product(layer.up, mlp_input.data());
    for (std::size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
    add(x[t], product(layer.down, gate.data()));
  }
}

}  // namespace

std::vector<double> llama_logits(const std::filesystem::path& directory, const ModelConfig& config,
                                 std::span<const std::int32_t> ids) {
  const auto file = SafetensorsFile::open(directory / "model.safetensors");
  const Matrix embedding = read(file, "model.embed_tokens.weight");
  std::vector<Doubles> x;
  for (const std::int32_t id : ids) {
    const auto row = embedding.values.begin() + id * static_cast<std::ptrdiff_t>(config.hidden);
    x.emplace_back(row, row + config.hidden);
  }
  for (std::uint32_t layer = 0; layer < config.layers; ++layer)
    run_layer(Layer(file, layer), config, x);
  const Matrix norm = read(file, "model.norm.weight");
  Doubles logits;
  for (const Doubles& row : x) {
    const Doubles one =
        product(embedding, normalize(row, norm, double{config.norm_epsilon}).data());
    logits.insert(logits.end(), one.begin(), one.end());
  }
  return logits;
}

}  // namespace kvlab
