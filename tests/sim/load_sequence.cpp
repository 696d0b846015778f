// The only file access of the brute force.
#include "tests/sim/brute_force.hpp"

namespace kvlab::brute {
namespace {

Matrix read_all(const TraceReader& trace, Part part, std::uint32_t layer, std::uint32_t head) {
  const std::uint32_t size = trace.shape().head_size;
  std::vector<float> floats(std::size_t{trace.tokens()} * size);
  trace.read(part, layer, head, 0, trace.tokens(), floats.data());
  Matrix rows;
  for (std::size_t t = 0; t < trace.tokens(); ++t)
    rows.emplace_back(floats.begin() + static_cast<std::ptrdiff_t>(t * size),
                      floats.begin() + static_cast<std::ptrdiff_t>((t + 1) * size));
  return rows;
}

int significant_bits(const TraceHeader& header) {
  if (header.rounding == Rounding::none || header.shape.dtype == Dtype::f32) return 0;
  return header.shape.dtype == Dtype::bf16 ? 8 : 11;
}

/// Reads the first 32 of the file's 64 directions. They are multiplied by √2, because there are
/// half as many.
void read_residuals(const TraceReader& trace, std::uint32_t layer, Sequence& s) {
  std::vector<float> norms(s.tokens);
  trace.residual_norm2(layer, norms.data());
  s.norm2.emplace_back(norms.begin(), norms.end());
  const auto bytes = trace.sketch_file()->at("layers." + std::to_string(layer) + ".sketch").data;
  s.sketch.emplace_back();
  for (std::size_t h = 0; h < s.query_heads; ++h) {
    Matrix& rows = s.sketch[layer].emplace_back();
    for (std::size_t d = 0; d < s.head_size; ++d) {
      std::vector<float> row(64);
      to_float(Dtype::bf16, bytes.data() + (h * s.head_size + d) * 64 * 2, 64, row.data());
      rows.emplace_back(row.begin(), row.begin() + 32);
      for (double& x : rows.back()) x *= std::sqrt(2.0);
    }
  }
}

/// Reads the gradients, [gradient sample, query head, token, dim] in the files, times their scales.
void read_gradients(const TraceReader& trace, std::uint32_t layer, Sequence& s) {
  const std::uint32_t gradient_samples = trace.gradient_samples();
  s.gradient.emplace_back(s.query_heads, std::vector<Matrix>(gradient_samples));
  for (std::size_t i = 0; i < trace.gradient_files().size(); ++i) {
    const SafetensorsFile& file = trace.gradient_files()[i];
    const std::size_t tokens = trace.shards()[i].tokens;
    float scale = 0;
    to_float(Dtype::f32, file.at("grad_scale").data.data(), 1, &scale);
    std::vector<float> all(std::size_t{gradient_samples} * s.query_heads * tokens * s.head_size);
    to_float(trace.shape().dtype, file.at("layers." + std::to_string(layer) + ".grad").data.data(),
             all.size(), all.data());
    auto next = all.begin();
    for (std::uint32_t gradient_sample = 0; gradient_sample < gradient_samples; ++gradient_sample)
      for (std::uint32_t h = 0; h < s.query_heads; ++h)
        for (std::size_t t = 0; t < tokens; ++t) {
          Vector& row = s.gradient[layer][h][gradient_sample].emplace_back();
          for (std::uint32_t d = 0; d < s.head_size; ++d)
            row.push_back(static_cast<double>(*next++) * static_cast<double>(scale));
        }
  }
}

}  // namespace

Sequence load(const TraceReader& trace) {
  const ModelShape& shape = trace.shape();
  Sequence s;
  s.layers = shape.layers;
  s.query_heads = shape.query_heads;
  s.kv_heads = shape.kv_heads;
  s.head_size = shape.head_size;
  s.tokens = trace.tokens();
  s.rounding_bits = significant_bits(trace.header());
  s.scale = static_cast<double>(trace.row(0).scale);
  s.inv_freq = trace.row(0).rope.inv_freq;
  s.rope_factor = trace.row(0).rope.factor;
  s.rows = trace.header().rows;
  s.segments = trace.segments();
  s.passages = trace.header().passages;
  s.q.resize(s.layers), s.k.resize(s.layers), s.v.resize(s.layers);
  for (std::uint32_t layer = 0; layer < s.layers; ++layer) {
    for (std::uint32_t h = 0; h < s.query_heads; ++h)
      s.q[layer].push_back(read_all(trace, Part::q, layer, h));
    for (std::uint32_t h = 0; h < s.kv_heads; ++h) {
      s.k[layer].push_back(read_all(trace, Part::k, layer, h));
      s.v[layer].push_back(read_all(trace, Part::v, layer, h));
    }
    if (trace.has_residuals()) read_residuals(trace, layer, s);
    if (trace.gradient_samples()) read_gradients(trace, layer, s);
  }
  return s;
}

}  // namespace kvlab::brute
