#include "engine/capture.hpp"

#include <utility>
#include "traces/base/json.hpp"

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
                                  {"version", KVLAB_VERSION},
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

void Capture::admission(std::span<const std::int32_t> ids, std::uint32_t, SegmentKind kind,
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

void Capture::admitted() {
  writer_.end();
  if (progress_) progress_(writer_.tokens());
}

}  // namespace kvlab
