#include "tests/sim/random_trace.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "tests/catch.hpp"
#include "tests/sim/brute_force.hpp"
#include "tests/traces/extra_files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

TraceHeader header_of(const RandomTrace& wanted) {
  TraceHeader header;
  header.model = "random";
  header.shape = {wanted.layers,    wanted.query_heads, wanted.kv_heads,
                  wanted.head_size, wanted.dtype,       wanted.numbers};
  header.rows = wanted.rows;
  const std::uint32_t half = wanted.head_size / 2;
  for (std::uint32_t i = 0; i < half; ++i)
    header.rope.inv_freq.push_back(
        static_cast<float>(std::pow(10000.0, -static_cast<double>(i) / half)));
  header.rope.factor = wanted.rope_factor;
  header.rope_config = nlohmann::json{{"rope_type", "default"}, {"rope_theta", 10000.0}};
  header.softmax_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(wanted.head_size)));
  header.rounding = wanted.rounding;
  header.weights_xxh3 = "0123456789abcdef";
  header.passages = wanted.passages;
  header.capture = nlohmann::json{{"engine", "random"},
                                  {"version", "1"},
                                  {"device", "cpu"},
                                  {"options", nlohmann::json::object()}};
  return header;
}

int bits_of(Dtype dtype) {
  if (dtype == Dtype::bf16) return 8;
  return dtype == Dtype::f16 ? 11 : 24;
}

/// Samples from a normal distribution. The algorithm is portable, because the results of
/// std::normal_distribution differ between standard libraries.
class NormalSampler {
 public:
  explicit NormalSampler(std::uint64_t seed) : engine_(seed) {}
  double uniform() { return (static_cast<double>(engine_() >> 11) + 0.5) * 0x1p-53; }
  double normal() {
    return std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform());
  }

 private:
  std::mt19937_64 engine_;
};

/// The tensors of a random sequence. A common direction, along the dimensions that rotate slowest,
/// makes every query attend to the heavy tokens: the first token and about one in twelve.
brute::Sequence sample_sequence(const RandomTrace& wanted, const TraceHeader& header) {
  brute::Sequence s;
  s.layers = wanted.layers, s.query_heads = wanted.query_heads, s.kv_heads = wanted.kv_heads;
  s.head_size = wanted.head_size;
  s.tokens = wanted.segments.back().start + wanted.segments.back().tokens;
  s.scale = static_cast<double>(header.softmax_scale);
  s.inv_freq = header.rope.inv_freq;
  s.rope_factor = wanted.rope_factor;
  s.rows = wanted.rows;
  s.segments = wanted.segments;
  if (wanted.rounding == Rounding::model_dtype && wanted.dtype != Dtype::f32)
    s.rounding_bits = bits_of(wanted.dtype);

  NormalSampler sampler(wanted.seed);
  const int bits = bits_of(wanted.dtype);
  const std::uint32_t slowest = wanted.head_size / 2 - 1;
  const double size = std::sqrt(wanted.spread),
               root = std::sqrt(static_cast<double>(wanted.head_size));
  const auto rows = [&](double scale, auto&& along) {
    brute::Matrix m;
    for (std::uint32_t t = 0; t < s.tokens; ++t) {
      brute::Vector& row = m.emplace_back();
      for (std::uint32_t d = 0; d < s.head_size; ++d) row.push_back(scale * sampler.normal());
      row[slowest] += along(t);
      for (double& x : row) x = brute::round_to_bits(x, bits);
    }
    return m;
  };
  const auto heavy = [&](std::uint32_t t) {
    return t == 0 || sampler.uniform() < 1.0 / 12 ? wanted.pull * (0.75 + 0.5 * sampler.uniform())
                                                  : 0;
  };
  for (std::uint32_t layer = 0; layer < s.layers; ++layer) {
    s.q.emplace_back(), s.k.emplace_back(), s.v.emplace_back();
    for (std::uint32_t h = 0; h < s.query_heads; ++h)
      s.q[layer].push_back(rows(size, [&](std::uint32_t) { return wanted.pull > 0 ? root : 0.0; }));
    for (std::uint32_t h = 0; h < s.kv_heads; ++h) {
      s.k[layer].push_back(rows(size, heavy));
      s.v[layer].push_back(rows(1, [](std::uint32_t) { return 0.0; }));
      if (wanted.silent_first) s.v[layer][h][0].assign(s.head_size, 0);
    }
  }
  return s;
}

/// Converts [head][token, dim] to [token, head, dim], for tokens [first, first + count).
std::vector<float> interleave(const std::vector<brute::Matrix>& heads, const Segment& segment) {
  std::vector<float> all;
  for (std::uint32_t t = segment.start; t < segment.start + segment.tokens; ++t)
    for (const brute::Matrix& head : heads)
      for (double x : head[t]) all.push_back(static_cast<float>(x));
  return all;
}

}  // namespace

void add_random_gradients(const std::filesystem::path& directory, std::uint32_t gradient_samples,
                          std::uint64_t seed, Queries queries) {
  NormalSampler normals(seed);
  test::write_gradients(
      directory, gradient_samples, [&] { return static_cast<float>(normals.normal()); }, queries);
}

TraceReader write_random_trace(const std::filesystem::path& directory, const RandomTrace& wanted) {
  const TraceHeader header = header_of(wanted);
  const brute::Sequence drawn = sample_sequence(wanted, header);
  const brute::Simulator exact(drawn);
  TraceWriter writer(directory, header);
  NormalSampler sampler(wanted.seed + 1000);
  OutputSketch sketch{wanted.seed, {}};
  for (std::size_t i = 0;
       i < std::size_t{wanted.layers} * wanted.query_heads * wanted.head_size * kSketchColumns; ++i)
    sketch.values.push_back(static_cast<float>(sampler.normal() / 8));
  if (wanted.residuals) writer.sketch(sketch);
  for (const Segment& segment : wanted.segments) {
    writer.begin(std::vector<std::int32_t>(segment.tokens, 7), segment.kind, true);
    for (std::uint32_t layer = 0; layer < wanted.layers; ++layer) {
      std::vector<brute::Matrix> out, lse;
      for (std::uint32_t h = 0; h < wanted.query_heads; ++h) {
        out.push_back(exact.outputs(layer, h));
        brute::Matrix& sums = lse.emplace_back();
        for (std::uint32_t t = 0; t < drawn.tokens; ++t)
          sums.push_back({exact.log_sum(layer, h, t)});
      }
      writer.layer(layer, interleave(drawn.q[layer], segment), interleave(drawn.k[layer], segment),
                   interleave(drawn.v[layer], segment), interleave(out, segment),
                   interleave(lse, segment));
      std::vector<float> norms(segment.tokens);
      for (float& x : norms) x = static_cast<float>(10 + 10 * sampler.uniform());
      if (wanted.residuals) writer.residual(layer, norms);
    }
    writer.end();
  }
  writer.finish();
  if (wanted.gradient_samples)
    add_random_gradients(directory, wanted.gradient_samples, wanted.seed + 2000,
                         wanted.gradients_of);
  return TraceReader::open(directory);
}

std::vector<RandomTrace> group_shapes() {
  constexpr auto kPrompt = SegmentKind::prompt, kDecode = SegmentKind::decode;
  return {
      {.layers = 1,
       .query_heads = 2,
       .kv_heads = 2,
       .head_size = 8,
       .segments = {{0, 1, kPrompt}, {1, 64, kDecode}},
       .seed = 4},
      {.layers = 1,
       .query_heads = 6,
       .kv_heads = 2,
       .head_size = 24,
       .dtype = Dtype::bf16,
       .rounding = Rounding::model_dtype,
       .segments = {{0, 33, kPrompt}, {33, 95, kDecode}, {128, 17, kPrompt}, {145, 50, kDecode}},
       .gradient_samples = 5,
       .passages = {{"early", 20, 5}, {"across", 130, 30}},
       .seed = 5},
      {.layers = 1,
       .query_heads = 7,
       .kv_heads = 1,
       .head_size = 136,
       .dtype = Dtype::f16,
       .rounding = Rounding::model_dtype,
       .rope_factor = 1.1f,
       .segments = {{0, 48, kPrompt}, {48, 16, kDecode}},
       .silent_first = true,
       .seed = 6},
      // The heavy tokens have so much larger logits that the exponentials of all other tokens
      // become 0.
      {.layers = 1,
       .query_heads = 4,
       .kv_heads = 1,
       .head_size = 16,
       .segments = {{0, 20, kPrompt}, {20, 80, kDecode}},
       .pull = 90,
       .seed = 7}};
}

Sets every_set(const TraceReader& trace, std::uint32_t sequence, const CacheConfig& config,
               const ReplayOptions& options, std::uint32_t layer, std::uint32_t kv_head) {
  std::vector<std::uint32_t> every(trace.tokens());
  std::iota(every.begin(), every.end(), 0u);
  Sets sets;
  for (KeptSet& set : kept_sets(trace, sequence, config, options, layer, kv_head, every)) {
    if (set.query != sets.size())
      FAIL("the kept set of query " << set.query << " where that of " << sets.size()
                                    << " should be");
    sets.push_back(std::move(set.positions));
  }
  return sets;
}

void check_sets(const Sets& kept, const Sets& wanted) {
  REQUIRE(kept.size() == wanted.size());
  const auto differs = std::ranges::mismatch(kept, wanted);
  INFO("query " << differs.in1 - kept.begin());
  if (differs.in1 != kept.end()) REQUIRE(*differs.in1 == *differs.in2);
}

}  // namespace kvlab
