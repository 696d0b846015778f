#include "engine/capture.hpp"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "engine/checkpoint/checkpoint.hpp"
#include "engine/checkpoint/model.hpp"
#include "traces/base/json.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
TraceHeader trace_header(const ModelConfig& config, const std::string& device,
                         nlohmann::json options) {
  TraceHeader header;
  header.model = config.name;
  header.shape = config.shape();
  header.rows = config.rows;
  header.simplify();
  header.rope_config = config.rope_config;
  header.rounding = Rounding::none;
  header.capture = nlohmann::json{{"engine", "kvlab"},
                                  {"version", KVLAB_RELEASE},
                                  {"device", device},
                                  {"options", std::move(options)}};
  return header;
}

TraceHeader trace_header(const Model& model, nlohmann::json options) {
  TraceHeader header = trace_header(model.config(), "cpu", std::move(options));
  header.weights_xxh3 = model.weights_xxh3();
  header.tokenizer_xxh3 = model.tokenizer_xxh3();
  return header;
}

void Capture::begin_append(std::span<const std::int32_t> ids, std::uint32_t, SegmentKind kind,
                           bool new_segment) {
  writer_.begin(ids, kind, new_segment);
  tokens_ = ids.size();
}

void Capture::layer(std::uint32_t layer, std::span<const float> q, std::span<const float> k,
                    std::span<const float> v, std::span<const float> out,
                    std::span<const float> lse) {
  writer_.layer(layer, q, k, v, out, lse);
}

void Capture::residual(std::uint32_t layer, std::span<const float> x) {
  const std::size_t hidden = x.size() / tokens_;
  std::vector<float> norm2(tokens_);
  for (std::size_t i = 0; i < tokens_; ++i)
    for (const float value : x.subspan(i * hidden, hidden)) norm2[i] += value * value;
  writer_.residual(layer, norm2);
}

void Capture::end_append() {
  writer_.end();
  if (progress_) progress_(writer_.tokens());
}

namespace {

/// Adds the outer product of a row of W_o (`weights` [inputs]) and that row's 64 random numbers `r`
/// to sketch [inputs, 64].
void add_row(std::span<const float> weights, const float* r, float* sketch) {
  for (std::size_t input = 0; input < weights.size(); ++input)
    for (std::size_t c = 0; c < kSketchColumns; ++c)
      sketch[input * kSketchColumns + c] += weights[input] * r[c];
}

/// Reads rows [query_head, dim] of W_o from a checkpoint, in float32.
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
  const std::size_t layer_values = rows.inputs() * kSketchColumns;
  OutputSketch sketch{seed, std::vector<float>(config.layers * layer_values)};
  parallel_for(config.layers, threads, [&](std::size_t layer) {
    add_layer_sketch(
        seed, layer, config.hidden,
        [&](std::size_t output, float* row) { rows.read(layer, output, row); },
        std::span(sketch.values).subspan(layer * layer_values, layer_values));
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
