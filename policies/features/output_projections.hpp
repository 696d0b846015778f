// The output projections W_o of a model's attention, for the feature value_out_norm1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvlab {

/// W_o of the query heads that share a KV head.
struct OutputWeights {
  const float* by_input = nullptr;  // [query_head of the group, dim, hidden]; null: unknown
  std::uint32_t group = 0, hidden = 0;
};

/// W_o of all layers, float32.
struct OutputProjections {
  std::uint32_t hidden = 0, group = 0, head_size = 0;
  std::vector<std::vector<float>> layers;  // one array [query_head, dim, hidden] per layer
  std::string weights_xxh3 = "";  ///< hash of the checkpoint that they come from; may be empty

  /// Appends a layer. read_row(output, row) must write row `output` of W_o, [query_head, dim], to
  /// `row`.
  template <class ReadRow>
  void add_layer(std::uint32_t query_heads, ReadRow read_row) {
    const std::size_t inputs = std::size_t{query_heads} * head_size;
    std::vector<float>& by_input = layers.emplace_back(inputs * hidden);
    std::vector<float> row(inputs);
    for (std::size_t output = 0; output < hidden; ++output) {
      read_row(output, row.data());
      for (std::size_t i = 0; i < inputs; ++i) by_input[i * hidden + output] = row[i];
    }
  }

  OutputWeights weights(std::uint32_t layer, std::uint32_t kv_head) const {
    const std::size_t first = std::size_t{kv_head} * group * head_size * hidden;
    return {layers.at(layer).data() + first, group, hidden};
  }
};

/// W_o of a KV head, if known; `output` may be null.
inline OutputWeights weights_of(const OutputProjections* output, std::uint32_t layer,
                                std::uint32_t kv_head) {
  return output ? output->weights(layer, kv_head) : OutputWeights{};
}

}  // namespace kvlab
