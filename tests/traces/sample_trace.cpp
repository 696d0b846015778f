#include "tests/traces/sample_trace.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include "traces/base/json.hpp"

namespace kvlab::test {
namespace {

constexpr std::uint32_t kLayers = 2, kQueryHeads = 6, kKvHeads = 2, kSize = 8, kTurned = 6;

TraceHeader sample_header(Dtype dtype, Rounding rounding) {
  TraceHeader header;
  header.model = "sample";
  header.shape = {kLayers, kQueryHeads, kKvHeads, kSize, dtype};
  header.rope = {{1.0f, 0.1f, 0.01f}, 1.25f};
  header.rope_config = nlohmann::json{{"rope_type", "yarn"}, {"rope_theta", 1000.0}};
  header.softmax_scale = 0.6f;
  header.rounding = rounding;
  header.weights_xxh3 = "0123456789abcdef";
  header.capture = nlohmann::json{{"engine", "test"}};
  return header;
}

std::vector<float> random_rows(std::mt19937& random, std::size_t count, Dtype dtype,
                               float magnitude = 1.3f) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = round_to(dtype, magnitude * normal(random));
  return values;
}

/// One head's vector rotated to a position, in float64, then rounded if the model rounds.
std::vector<double> rotated(const float* x, std::uint32_t position, const TraceHeader& header,
                            const Rope& rope, Mistake mistake) {
  std::vector<double> y(x, x + kSize);
  if (mistake == Mistake::no_rope) return y;
  const std::size_t half = kTurned / 2;
  for (std::size_t i = 0; i < half; ++i) {
    const bool pairs = mistake == Mistake::interleaved_rope;
    const std::size_t a = pairs ? 2 * i : i, b = pairs ? 2 * i + 1 : i + half;
    const double angle = double{rope.inv_freq[i]} * position;
    const double c = std::cos(angle) * rope.factor, s = std::sin(angle) * rope.factor;
    y[a] = x[a] * c - x[b] * s;
    y[b] = x[b] * c + x[a] * s;
  }
  if (header.rounding == Rounding::model_dtype)
    for (double& value : y) value = round_to(header.shape.dtype, static_cast<float>(value));
  return y;
}

/// Computes the attention of one layer for all queries, with the given mistake.
class Attention {
 public:
  Attention(Sample& sample, std::size_t layer, Mistake mistake)
      : sample_(sample),
        layer_(layer),
        mistake_(mistake),
        spec_(sample.header.row(static_cast<std::uint32_t>(layer))) {
    const std::uint32_t late = mistake == Mistake::later_positions ? 1 : 0;
    for (std::uint32_t t = 0; t < sample.tokens(); ++t)
      for (std::size_t h = 0; h < kKvHeads; ++h)
        keys_.push_back(rotated(sample.k[layer].data() + (t * kKvHeads + h) * kSize, t + late,
                                sample.header, spec_.rope, mistake));
  }

  void row(std::uint32_t t, std::size_t head) {
    const auto query = rotated(sample_.q[layer_].data() + (t * kQueryHeads + head) * kSize, t,
                               sample_.header, spec_.rope, mistake_);
    const std::size_t kv_head =
        mistake_ == Mistake::heads_in_turn ? head % kKvHeads : head / (kQueryHeads / kKvHeads);
    const double scale = spec_.scale * (mistake_ == Mistake::scale ? 1.1 : 1.0);
    std::uint32_t first = mistake_ == Mistake::no_first_key && t > 0 ? 1 : 0;
    if (spec_.window > 0)
      while (t - first >= spec_.window) ++first;
    const std::uint32_t last =
        mistake_ == Mistake::not_causal ? std::min(t + 1, sample_.tokens() - 1) : t;
    const auto score = [&](std::uint32_t j) {
      const auto& key = keys_[j * kKvHeads + kv_head];
      double product = 0;
      for (std::size_t d = 0; d < kSize; ++d) product += query[d] * key[d];
      const double cap = spec_.softcap, s = scale * product;
      return cap > 0 ? cap * std::tanh(s / cap) : s;
    };
    double largest = score(first), sum = 0, output[kSize] = {};
    if (!spec_.sinks.empty()) {
      largest = std::max<double>(largest, spec_.sinks[head]);
      for (std::uint32_t j = first; j <= last; ++j) largest = std::max(largest, score(j));
      sum = std::exp(spec_.sinks[head] - largest);
    }
    for (std::uint32_t j = first; j <= last; ++j) largest = std::max(largest, score(j));
    for (std::uint32_t j = first; j <= last; ++j) {
      const double e = std::exp(score(j) - largest);
      sum += e;
      const float* value = sample_.v[layer_].data() + (j * kKvHeads + kv_head) * kSize;
      for (std::size_t d = 0; d < kSize; ++d) output[d] += e * value[d];
    }
    float* out = sample_.out[layer_].data() + (t * kQueryHeads + head) * kSize;
    for (std::size_t d = 0; d < kSize; ++d)
      out[d] = round_to(sample_.header.shape.dtype, static_cast<float>(output[d] / sum));
    sample_.lse[layer_][t * kQueryHeads + head] = static_cast<float>(
        (std::log(sum) + largest) * (mistake_ == Mistake::lse_base_two ? 1 / std::log(2.0) : 1.0));
  }

 private:
  Sample& sample_;
  std::size_t layer_;
  Mistake mistake_;
  RowSpec spec_;
  std::vector<std::vector<double>> keys_;  // [tokens * kv_heads]
};

}  // namespace

std::vector<RowSpec> sample_rows() {
  const Rope near{{1.0f, 0.1f, 0.01f}, 1.25f}, far{{0.5f, 0.0f, 0.002f}, 1.0f};
  return {{.window = 20, .table = 1, .scale = 0.6f, .rope = near},
          {.softcap = 1.5f,
           .table = 0,
           .scale = 0.9f,
           .rope = far,
           .sinks = {0.5f, -1.0f, 2.0f, 0.0f, 3.0f, -20.0f}}};
}

Sample make_sample(std::uint32_t tokens, Dtype dtype, Rounding rounding, Mistake mistake,
                   float magnitude, std::vector<RowSpec> rows) {
  std::mt19937 random(7);
  Sample sample;
  sample.header = sample_header(dtype, rounding);
  sample.header.rows = std::move(rows);
  for (std::uint32_t t = 0; t < tokens; ++t)
    sample.ids.push_back(static_cast<std::int32_t>(3 * t + 1));
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    sample.q.push_back(random_rows(random, tokens * kQueryHeads * kSize, dtype, magnitude));
    sample.k.push_back(random_rows(random, tokens * kKvHeads * kSize, dtype, magnitude));
    sample.v.push_back(random_rows(random, tokens * kKvHeads * kSize, dtype));
    sample.out.emplace_back(tokens * kQueryHeads * kSize);
    sample.lse.emplace_back(tokens * kQueryHeads);
    Attention attention(sample, layer, mistake);
    for (std::uint32_t t = 0; t < tokens; ++t)
      for (std::size_t head = 0; head < kQueryHeads; ++head) attention.row(t, head);
  }
  if (mistake == Mistake::nan_output)
    sample.out.back().back() = std::numeric_limits<float>::quiet_NaN();
  return sample;
}

const Sample& two_shards() {
  static const Sample kSample = make_sample(1100, Dtype::f32, Rounding::none);
  return kSample;
}

void append(TraceWriter& writer, const Sample& sample, std::uint32_t first, std::uint32_t count,
            SegmentKind kind, bool new_segment) {
  const auto rows = [&](const std::vector<float>& all) {
    const std::size_t width = all.size() / sample.tokens();
    return std::span(all).subspan(first * width, count * width);
  };
  writer.begin(std::span(sample.ids).subspan(first, count), kind, new_segment);
  for (std::uint32_t l = 0; l < sample.q.size(); ++l)
    writer.layer(l, rows(sample.q[l]), rows(sample.k[l]), rows(sample.v[l]), rows(sample.out[l]),
                 rows(sample.lse[l]));
  writer.end();
}

void write_trace(const std::filesystem::path& directory, const Sample& sample,
                 std::uint32_t prompt) {
  TraceWriter writer(directory, sample.header);
  if (prompt > 0) append(writer, sample, 0, prompt, SegmentKind::prompt);
  for (std::uint32_t t = prompt; t < sample.tokens(); ++t)
    append(writer, sample, t, 1, SegmentKind::decode);
  writer.finish();
}

}  // namespace kvlab::test
