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

/// Rows [query_head, dim] of W_o in a checkpoint, in float32.
class OutputRows {
 public:
  explicit OutputRows(const std::filesystem::path& directory)
      : config_(load_model_config(directory)), checkpoint_(Checkpoint::open(directory)) {}

  const ModelConfig& config() const { return config_; }
  std::string weights_xxh3() const { return checkpoint_.xxh3(); }
  std::size_t inputs() const { return std::size_t{config_.query_heads} * config_.head_size; }

  void read(std::size_t layer, std::size_t output, float* row) const {
    const std::size_t shape[] = {config_.hidden, inputs()};
    const TensorView& weight =
        checkpoint_.at(fmt::format("model.layers.{}.self_attn.o_proj.weight", layer), shape);
    to_float(weight.dtype, weight.data.data() + output * inputs() * bytes_of(weight.dtype),
             inputs(), row);
  }

 private:
  ModelConfig config_;
  Checkpoint checkpoint_;
};

}  // namespace

void add_layer_sketch(std::uint64_t seed, std::size_t layer, std::size_t hidden,
                      const std::function<void(std::size_t, float*)>& read_row,
                      std::span<float> sketch) {
  const double deviation = 1 / std::sqrt(static_cast<double>(kSketchColumns));
  std::vector<float> row(sketch.size() / kSketchColumns), r(kSketchColumns);
  for (std::size_t h = 0; h < hidden; ++h) {
    read_row(h, row.data());
    for (std::size_t c = 0; c < kSketchColumns; ++c)
      r[c] = static_cast<float>(deviation *
                                sketch_normal(seed, (layer * hidden + h) * kSketchColumns + c));
    add_row(row, r.data(), sketch.data());
  }
}

OutputSketch output_sketch(const std::filesystem::path& directory, std::uint64_t seed,
                           unsigned threads) {
  const OutputRows rows(directory);
  const ModelConfig& config = rows.config();
  const std::size_t of_layer = rows.inputs() * kSketchColumns;
  OutputSketch sketch{seed, std::vector<float>(config.layers * of_layer)};
  parallel_for(config.layers, threads, [&](std::size_t layer) {
    add_layer_sketch(
        seed, layer, config.hidden,
        [&](std::size_t output, float* row) { rows.read(layer, output, row); },
        std::span(sketch.values).subspan(layer * of_layer, of_layer));
  });
  return sketch;
}

OutputProjections read_output_projections(const std::filesystem::path& directory) {
  const OutputRows rows(directory);
  const ModelConfig& config = rows.config();
  OutputProjections all{config.hidden,
                        config.query_heads / config.kv_heads,
                        config.head_size,
                        {},
                        rows.weights_xxh3()};
  for (std::uint32_t layer = 0; layer < config.layers; ++layer)
    all.add_layer(config.query_heads,
                  [&](std::size_t output, float* row) { rows.read(layer, output, row); });
  return all;
}

}  // namespace kvlab
