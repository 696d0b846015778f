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
  OutputRows(const std::filesystem::path& directory, const ModelShape& shape)
      : checkpoint_(Checkpoint::open(directory)),
        inputs_(std::size_t{shape.query_heads} * shape.head_size),
        hidden_(checkpoint_.rows(name_of(0))) {
    std::vector<float> row(inputs_);
    read(0, 0, row.data());  // refuses a layer that is not there
  }

  std::string weights_xxh3() const { return checkpoint_.xxh3(); }
  std::size_t inputs() const { return inputs_; }
  std::size_t hidden() const { return hidden_; }

  void read(std::size_t layer, std::size_t output, float* row) const {
    const std::size_t shape[] = {hidden_, inputs_};
    const TensorView& weight = checkpoint_.at(name_of(layer), shape);
    to_float(weight.dtype, weight.data.data() + output * inputs_ * bytes_of(weight.dtype), inputs_,
             row);
  }

 private:
  static std::string name_of(std::size_t layer) {
    return fmt::format("model.layers.{}.self_attn.o_proj.weight", layer);
  }

  Checkpoint checkpoint_;
  std::size_t inputs_, hidden_;
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
  const ModelShape shape = load_model_config(directory).shape();
  const OutputRows rows(directory, shape);
  const std::size_t of_layer = rows.inputs() * kSketchColumns;
  OutputSketch sketch{seed, std::vector<float>(shape.layers * of_layer)};
  parallel_for(shape.layers, threads, [&](std::size_t layer) {
    add_layer_sketch(
        seed, layer, rows.hidden(),
        [&](std::size_t output, float* row) { rows.read(layer, output, row); },
        std::span(sketch.values).subspan(layer * of_layer, of_layer));
  });
  return sketch;
}

OutputProjections read_output_projections(const std::filesystem::path& directory) {
  return read_output_projections(directory, load_model_config(directory).shape());
}

OutputProjections read_output_projections(const std::filesystem::path& directory,
                                          const ModelShape& shape) {
  const OutputRows rows(directory, shape);
  OutputProjections all{static_cast<std::uint32_t>(rows.hidden()),
                        shape.group(),
                        shape.head_size,
                        {},
                        rows.weights_xxh3()};
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
    all.add_layer(shape.query_heads,
                  [&](std::size_t output, float* row) { rows.read(layer, output, row); });
  return all;
}

}  // namespace kvlab
