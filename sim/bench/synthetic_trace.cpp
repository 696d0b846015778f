#include "sim/bench/synthetic_trace.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <thread>

#include "policies/catalogue.hpp"
#include "policies/columns/columns.hpp"
#include "traces/base/json.hpp"
#include "traces/base/parallel.hpp"
#include "traces/extras_writer.hpp"

namespace kvlab {
namespace {

TraceHeader header_of(const SyntheticShape& shape) {
  TraceHeader header;
  header.model = "synthetic";
  header.shape = {shape.layers, shape.query_heads, shape.kv_heads, shape.head_size, Dtype::bf16};
  for (std::uint32_t i = 0; i < shape.head_size / 2; ++i)
    header.rope.inv_freq.push_back(static_cast<float>(std::pow(5e5, -2.0 * i / shape.head_size)));
  header.softmax_scale = 1 / std::sqrt(static_cast<float>(shape.head_size));
  header.rounding = Rounding::model_dtype;
  header.capture = nlohmann::json{{"engine", "synthetic"},
                                  {"version", "1"},
                                  {"device", "cpu"},
                                  {"options", nlohmann::json::object()}};
  return header;
}

/// Tokens [count, heads, dim]: noise, a topic of their own that drifts over some hundred tokens,
/// and along the dimension that rotates slowest the queries' pull at the heavy keys.
class Source {
 public:
  Source(std::uint32_t heads, std::uint32_t dim, bool keys, std::uint64_t seed)
      : heads_(heads), dim_(dim), keys_(keys), noise_(seed), topic_(heads * dim) {}

  std::vector<float> draw(std::uint32_t first, std::uint32_t count) {
    std::vector<float> all(std::size_t{count} * heads_ * dim_);
    std::normal_distribution<float> normal;
    for (std::uint32_t t = 0; t < count; ++t) {
      const float heavy = first + t == 0 ? 1.6f : noise_() % 12 == 0 ? 1.0f : 0.0f;
      for (std::size_t i = 0; i < topic_.size(); ++i) {
        topic_[i] = 0.99f * topic_[i] + 0.14f * normal(noise_);
        float x = 0.8f * normal(noise_) + 0.6f * topic_[i];
        if (i % dim_ == dim_ / 2 - 1) x += keys_ ? 4 * heavy : std::sqrt(float(dim_));
        all[std::size_t{t} * topic_.size() + i] = x;
      }
    }
    return all;
  }

 private:
  std::uint32_t heads_, dim_;
  bool keys_;
  std::mt19937 noise_;
  std::vector<float> topic_;
};

/// Uniform, quickly.
class Uniform {
 public:
  explicit Uniform(std::uint64_t seed) : engine_(static_cast<std::uint32_t>(seed)) {}
  float operator()() { return static_cast<float>(engine_() >> 8) * 0x1p-24f; }

 private:
  std::minstd_rand engine_;
};

OutputSketch sketch_of(const SyntheticShape& shape, Uniform& draw) {
  OutputSketch sketch{1, {}};
  sketch.values.resize(std::size_t{shape.layers} * shape.query_heads * shape.head_size *
                       kSketchColumns);
  for (float& x : sketch.values) x = (draw() - 0.5f) / 8;
  return sketch;
}

void add_columns(const std::filesystem::path& directory, Uniform& draw) {
  std::set<std::string> names;
  for (const PolicyEntry& entry : policy_catalogue())
    for (const std::string& name : parse_policy(entry.info.name).columns)
      if (!is_computed(name, false)) names.insert(name);
  for (const std::string& name : names)
    write_column(directory, name, [&](auto, auto, auto) { return draw(); });
}

}  // namespace

TraceReader write_synthetic_trace(const std::filesystem::path& directory,
                                  const SyntheticShape& shape, std::uint64_t seed) {
  constexpr std::uint32_t kAtOnce = 256;
  TraceWriter writer(directory, header_of(shape));
  std::vector<Source> q, k, v;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    q.emplace_back(shape.query_heads, shape.head_size, false, seed + 3 * layer);
    k.emplace_back(shape.kv_heads, shape.head_size, true, seed + 3 * layer + 1);
    v.emplace_back(shape.kv_heads, shape.head_size, true, seed + 3 * layer + 2);
  }
  Uniform draw(seed + 1000);
  if (shape.draws) writer.sketch(sketch_of(shape, draw));
  const std::vector<float> norms(kAtOnce, 100.0f);
  for (std::uint32_t first = 0; first < shape.tokens;) {
    const bool prompt = first < shape.prompt_tokens;
    const std::uint32_t end = prompt ? shape.prompt_tokens : shape.tokens;
    const std::uint32_t count = std::min(kAtOnce, end - first);
    writer.begin(std::vector<std::int32_t>(count, 1),
                 prompt ? SegmentKind::prompt : SegmentKind::decode);
    const std::vector<float> out(std::size_t{count} * shape.query_heads * shape.head_size);
    std::vector<std::vector<float>> drawn(std::size_t{3} * shape.layers);
    parallel_for(drawn.size(), std::max(1u, std::thread::hardware_concurrency()),
                 [&](std::size_t i) {
                   Source& source = (i % 3 == 0 ? q : i % 3 == 1 ? k : v)[i / 3];
                   drawn[i] = source.draw(first, count);
                 });
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
      writer.layer(layer, drawn[3 * layer], drawn[3 * layer + 1], drawn[3 * layer + 2], out, {});
      if (shape.draws) writer.residual(layer, std::span(norms).first(count));
    }
    writer.end();
    first += count;
  }
  writer.finish();
  add_columns(directory, draw);
  if (shape.draws) write_gradients(directory, shape.draws, [&] { return draw() - 0.5f; });
  return TraceReader::open(directory);
}

}  // namespace kvlab
