// A model's blocks with the simplest attention: float64, over all keys.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/checkpoint/model.hpp"
#include "traces/layer_ropes.hpp"

namespace kvlab::test {

/// Returns the attention outputs [n, query_heads, head_size] of rotated q [n, query_heads,
/// head_size] and k, and of v, both [n, kv_heads, head_size].
inline std::vector<float> plain_attention(const ModelConfig& c, const RowSpec& row, std::size_t n,
                                          const float* q, const float* k, const float* v) {
  const std::size_t dim = c.head_size, group = c.query_heads / c.kv_heads;
  std::vector<float> out(n * c.query_heads * dim);
  for (std::size_t t = 0; t < n; ++t)
    for (std::size_t h = 0; h < c.query_heads; ++h) {
      std::vector<double> p(t + 1), sum(dim);
      const float* query = q + (t * c.query_heads + h) * dim;
      const std::size_t first = row.window > 0 && t >= row.window ? t + 1 - row.window : 0;
      for (std::size_t j = first; j <= t; ++j) {
        const float* key = k + (j * c.kv_heads + h / group) * dim;
        for (std::size_t d = 0; d < dim; ++d) p[j] += double{query[d]} * double{key[d]};
        p[j] *= double{row.scale};
      }
      double max_score = *std::max_element(p.begin() + static_cast<std::ptrdiff_t>(first), p.end());
      if (!row.sinks.empty()) max_score = std::max(max_score, double{row.sinks[h]});
      double total = row.sinks.empty() ? 0 : std::exp(double{row.sinks[h]} - max_score);
      for (std::size_t j = first; j <= t; ++j) total += p[j] = std::exp(p[j] - max_score);
      for (std::size_t j = first; j <= t; ++j)
        for (std::size_t d = 0; d < dim; ++d)
          sum[d] += p[j] / total * double{v[(j * c.kv_heads + h / group) * dim + d]};
      std::copy(sum.begin(), sum.end(), out.begin() + (t * c.query_heads + h) * dim);
    }
  return out;
}

/// Logits [n, vocab] of a prompt at positions 0 … n-1.
inline std::vector<float> plain_forward(const Model& model, std::span<const std::int32_t> ids,
                                        unsigned threads) {
  const ModelConfig& c = model.config();
  const std::size_t n = ids.size(), dim = c.head_size;
  const LayerRopes ropes(c.rows, static_cast<std::uint32_t>(n));
  std::vector<float> x(n * c.hidden), q(n * c.query_heads * dim), k(n * c.kv_heads * dim),
      v(k.size());
  model.embed(ids, x.data());
  for (std::uint32_t layer = 0; layer < c.layers; ++layer) {
    model.attention_inputs(layer, x.data(), n, q.data(), k.data(), v.data(), threads);
    for (std::size_t t = 0; t < n; ++t) {
      const auto rotate = [&](float* head) {
        ropes[layer].rotate(head, dim, static_cast<std::uint32_t>(t), head);
      };
      for (std::size_t h = 0; h < c.query_heads; ++h)
        rotate(q.data() + (t * c.query_heads + h) * dim);
      for (std::size_t h = 0; h < c.kv_heads; ++h) rotate(k.data() + (t * c.kv_heads + h) * dim);
    }
    const std::vector<float> out =
        plain_attention(c, c.rows[layer], n, q.data(), k.data(), v.data());
    model.attention_output(layer, out.data(), n, x.data(), threads);
    model.mlp(layer, x.data(), n, threads);
  }
  std::vector<float> logits(n * c.vocab);
  model.logits(x.data(), n, logits.data(), threads);
  return logits;
}

}  // namespace kvlab::test
