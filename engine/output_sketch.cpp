#include "engine/output_sketch.hpp"

#include <fmt/format.h>

#include <cmath>

#include "engine/checkpoint/checkpoint.hpp"
#include "engine/checkpoint/model.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

/// sketch [inputs, 64] += column of W_o^T by a row of R.
void add_row(std::span<const float> weights, const float* r, float* sketch) {
  for (std::size_t input = 0; input < weights.size(); ++input)
    for (std::size_t c = 0; c < kSketchColumns; ++c)
      sketch[input * kSketchColumns + c] += weights[input] * r[c];
}

}  // namespace

OutputSketch output_sketch(const std::filesystem::path& directory, std::uint64_t seed,
                           unsigned threads) {
  const ModelConfig config = load_model_config(directory);
  const Checkpoint checkpoint = Checkpoint::open(directory);
  const std::size_t inputs = std::size_t{config.query_heads} * config.head_size,
                    of_layer = inputs * kSketchColumns;
  const double deviation = 1 / std::sqrt(static_cast<double>(kSketchColumns));
  OutputSketch sketch{seed, std::vector<float>(config.layers * of_layer)};
  parallel_for(config.layers, threads, [&](std::size_t layer) {
    const std::size_t shape[] = {config.hidden, inputs};
    const TensorView& weight =
        checkpoint.at(fmt::format("model.layers.{}.self_attn.o_proj.weight", layer), shape);
    std::vector<float> row(inputs), r(kSketchColumns);
    for (std::size_t h = 0; h < config.hidden; ++h) {
      to_float(weight.dtype, weight.data.data() + h * inputs * bytes_of(weight.dtype), inputs,
               row.data());
      for (std::size_t c = 0; c < kSketchColumns; ++c)
        r[c] = static_cast<float>(
            deviation * sketch_normal(seed, (layer * config.hidden + h) * kSketchColumns + c));
      add_row(row, r.data(), sketch.values.data() + layer * of_layer);
    }
  });
  return sketch;
}

}  // namespace kvlab
