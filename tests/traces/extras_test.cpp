// Tests of the extras of format 2. They must be read back as written, damage must be reported, and
// a killed capture must keep them.
#include "traces/extras.hpp"

#include <cmath>
#include <limits>

#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/extra_files.hpp"
#include "tests/traces/sample_trace.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"
#include "traces/shard.hpp"
#include "traces/trace.hpp"

namespace kvlab {
namespace {

using Catch::Matchers::ContainsSubstring;
using nlohmann::json;
using namespace test;

constexpr std::uint32_t kTokens = 1100;

OutputSketch sketch_of(const ModelShape& shape) {
  OutputSketch sketch{7, {}};
  const std::uint64_t count =
      std::uint64_t{shape.layers} * shape.query_heads * shape.head_size * kSketchColumns;
  for (std::uint64_t i = 0; i < count; ++i)
    sketch.values.push_back(static_cast<float>(sketch_normal(7, i)));
  return sketch;
}

/// Appends tokens [first, first + count) of two_shards(). The residual norm of token t is t +
/// layer, plus `worst` for the last of these tokens.
void append_with_residuals(TraceWriter& writer, std::uint32_t first, std::uint32_t count,
                           float worst = 0) {
  const Sample& s = two_shards();
  const auto rows = [&](const std::vector<float>& all) {
    const std::size_t width = all.size() / s.tokens();
    return std::span(all).subspan(first * width, count * width);
  };
  writer.begin(std::span(s.ids).subspan(first, count), SegmentKind::prompt);
  for (std::uint32_t l = 0; l < s.q.size(); ++l) {
    writer.layer(l, rows(s.q[l]), rows(s.k[l]), rows(s.v[l]), rows(s.out[l]), rows(s.lse[l]));
    std::vector<float> norms;
    for (std::uint32_t t = first; t < first + count; ++t)
      norms.push_back(static_cast<float>(t + l));
    norms.back() += worst;
    writer.residual(l, norms);
  }
  writer.end();
}

std::filesystem::path write_whole(const TemporaryFolder& folder, float worst = 0) {
  TraceHeader header = two_shards().header;
  header.passages = {{"early", 3, 5}, {"late", 1090, 10}};
  TraceWriter writer(folder / "t", header);
  writer.sketch(sketch_of(header.shape));
  append_with_residuals(writer, 0, kTokens, worst);
  writer.finish();
  return folder / "t";
}

TEST_CASE("Residual norms, the sketch and passages read back as they were written") {
  const TemporaryFolder folder;
  const TraceReader trace = open_verified_trace(write_whole(folder), 1);
  REQUIRE(trace.has_residuals());
  CHECK(trace.header().passages == std::vector<Passage>{{"early", 3, 5}, {"late", 1090, 10}});
  std::vector<float> norms(kTokens);
  trace.residual_norm2(1, norms.data());
  for (std::uint32_t t = 0; t < kTokens; ++t) REQUIRE(norms[t] == static_cast<float>(t + 1));

  const ModelShape& shape = trace.shape();
  const std::size_t layer_values =
                        std::size_t{shape.query_heads} * shape.head_size * kSketchColumns,
                    head_values = layer_values / shape.kv_heads;
  const auto all = trace.sketch(1, 1, kSketchColumns), half = trace.sketch(1, 1, 32);
  REQUIRE(all.size() == head_values);
  for (std::size_t i = 0; i < head_values; ++i)
    REQUIRE(all[i] == round_to(Dtype::bf16, static_cast<float>(
                                                sketch_normal(7, layer_values + head_values + i))));
  CHECK(half[32 + 3] == std::sqrt(2.0f) * all[64 + 3]);
}

TEST_CASE("A sketch's numbers are normally distributed") {
  double sum = 0, squares = 0;
  constexpr int kCount = 100'000;
  for (int i = 0; i < kCount; ++i) {
    const double x = sketch_normal(3, static_cast<std::uint64_t>(i));
    sum += x, squares += x * x;
  }
  CHECK(std::abs(sum / kCount) < 0.015);
  CHECK(std::abs(squares / kCount - 1) < 0.02);
}

TEST_CASE("A sketch whose file has no seed has the seed of the manifest") {
  const TemporaryFolder folder;
  const auto path = write_whole(folder);
  const auto file = SafetensorsFile::open(path / "output.safetensors");
  std::vector<TensorToWrite> tensors;
  for (const auto& [name, view] : file.tensors())
    tensors.push_back({name, view.dtype, view.shape, view.data});
  json manifest = json::parse(read_bytes(path / "manifest.json"));
  manifest["extras"]["sketch"]["xxh3"] =
      write_safetensors(path / "output.safetensors", tensors, {});
  write_bytes(path / "manifest.json", manifest.dump());
  const TraceReader trace = open_verified_trace(path, 1);
  CHECK(trace.extras().sketch->seed == manifest["extras"]["sketch"]["seed"]);
  std::filesystem::remove(path / "manifest.json");
  CHECK_THAT(error_of([&] { seal_trace(path); }), ContainsSubstring("__metadata__ has no seed"));
}

TEST_CASE("Damaged extras are refused by name") {
  const TemporaryFolder folder;
  const auto path = write_whole(folder);
  const auto manifest = read_bytes(path / "manifest.json");
  const auto error_with = [&](auto change) {
    json changed = json::parse(manifest);
    change(changed);
    write_bytes(path / "manifest.json", changed.dump());
    return error_of([&] { TraceReader::open(path); });
  };
  CHECK_THAT(error_with([](json& m) { m["spans"][0]["tokens"] = 2000; }),
             ContainsSubstring("spans[0]") && ContainsSubstring("tokens"));
  CHECK_THAT(error_with([](json& m) { m["spans"][1]["name"] = "early"; }),
             ContainsSubstring("the name \"early\" appears twice"));
  CHECK_THAT(error_with([](json& m) { m["spans"][1]["name"] = "a\nb"; }),
             ContainsSubstring("without control characters"));
  CHECK_THAT(error_with([](json& m) { m["extras"]["novel"] = json::object(); }),
             ContainsSubstring("novel"));
  CHECK_THAT(error_with([](json& m) { m["extras"]["sketch"]["seed"] = 8; }),
             ContainsSubstring("its seed differs from 8"));
  CHECK_THAT(error_with([](json& m) { m["extras"].erase("residual_norm2"); }),
             ContainsSubstring("residual_norm2"));
  CHECK_THAT(error_with([](json& m) { m["format"] = 1; }), ContainsSubstring("extras"));
  write_bytes(path / "manifest.json", manifest);

  std::string bytes = read_bytes(path / "output.safetensors");
  bytes[bytes.size() - 100] ^= 1;
  write_bytes(path / "output.safetensors", bytes);
  CHECK_THAT(error_of([&] { open_verified_trace(path, 1); }),
             ContainsSubstring("output.safetensors: is damaged"));
  ModelShape other = two_shards().header.shape;
  other.head_size = 4;
  write_sketch(path, other, sketch_of(other));
  CHECK_THAT(error_of([&] { TraceReader::open(path); }), ContainsSubstring("layers.0.sketch"));
}

TEST_CASE("A residual norm that no decoder computed does not verify") {
  for (const float worst : {std::numeric_limits<float>::quiet_NaN(), -1e9f}) {
    const TemporaryFolder folder;
    const TraceReader trace = TraceReader::open(write_whole(folder, worst));
    const TraceCheck check = verify_trace(trace, 1);
    CHECK_FALSE(check.ok);
    CHECK_THAT(check.problems.front(), ContainsSubstring("residual_norm2 at position 1099"));
  }
}

/// Adds gradients to a trace. Their elements have the values 0, 1, 2, …, through all files and
/// layers.
std::filesystem::path write_with_gradients(const TemporaryFolder& folder,
                                           std::uint32_t gradient_samples) {
  const auto path = write_whole(folder);
  float next = 0;
  write_gradients(path, gradient_samples, [&] { return next++; });
  return path;
}

TEST_CASE("Gradients read back as they were written, times their scale") {
  const TemporaryFolder folder;
  const TraceReader trace = open_verified_trace(write_with_gradients(folder, 3), 2);
  REQUIRE(trace.gradient_samples() == 3);
  CHECK(trace.gradient_samples(Queries::decode) == 3);
  CHECK(trace.gradient_samples(Queries::all) == 0);
  const ModelShape& shape = trace.shape();
  const std::size_t size = shape.head_size, heads = shape.query_heads;
  const std::vector<std::uint32_t> positions{3, 1022, 1023, 1024, 1026};  // in both files
  const std::size_t stride = size + 5;
  std::vector<float> rows(positions.size() * stride, -1);
  trace.gradient(1, 2, 1, positions, rows.data(), stride);
  const std::size_t first_shard_values = std::size_t{shape.layers} * 3 * heads * 1024 * size;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::size_t token = positions[i / stride], in_file = token % 1024, d = i % stride;
    if (d >= size) {
      CHECK(rows[i] == -1);
      continue;
    }
    const bool late = token >= 1024;
    const std::size_t tokens = late ? kTokens - 1024 : 1024,
                      head = (std::size_t{1} * 3 + 1) * heads + 2,
                      element =
                          (late ? first_shard_values : 0) + (head * tokens + in_file) * size + d;
    CHECK(rows[i] == static_cast<float>(element) * (late ? 0.5f : 0.25f));
  }
  CHECK_THROWS(trace.gradient(0, 0, 3, positions, rows.data(), stride));
  CHECK_THROWS(trace.gradient(0, 0, 0, std::vector<std::uint32_t>{kTokens}, rows.data(), stride));
}

TEST_CASE("Gradients without recorded queries count as gradients of decoded queries") {
  const TemporaryFolder folder;
  const auto path = write_with_gradients(folder, 2);
  json manifest = json::parse(read_bytes(path / "manifest.json"));
  CHECK(manifest["extras"]["grad"]["span"] == "decode");
  manifest["extras"]["grad"].erase("span");
  write_bytes(path / "manifest.json", manifest.dump());
  const TraceReader trace = open_verified_trace(path, 2);
  CHECK(trace.gradient_samples(Queries::decode) == 2);
  CHECK(trace.gradient_samples(Queries::all) == 0);
}

TEST_CASE("Damaged gradients are refused by name") {
  const TemporaryFolder folder;
  const auto path = write_with_gradients(folder, 2);
  const auto manifest = read_bytes(path / "manifest.json"),
             first = read_bytes(path / "grad-00000.safetensors");
  const auto opened = [&] { return error_of([&] { TraceReader::open(path); }); };
  const auto error_with = [&](auto change) {
    json changed = json::parse(manifest);
    change(changed["extras"]["grad"]);
    write_bytes(path / "manifest.json", changed.dump());
    const std::string error = opened();
    write_bytes(path / "manifest.json", manifest);
    return error;
  };
  CHECK_THAT(error_with([](json& g) { g["draws"] = 3; }),
             ContainsSubstring("grad-00000.safetensors") && ContainsSubstring("layers.0.grad"));
  CHECK_THAT(error_with([](json& g) { g["draws"] = 0; }), ContainsSubstring("draws"));
  CHECK_THAT(error_with([](json& g) { g["draws"] = 65; }), ContainsSubstring("draws"));
  CHECK_THAT(error_with([](json& g) { g.erase("seed"); }), ContainsSubstring("seed"));
  CHECK_THAT(error_with([](json& g) { g["span"] = "prompt"; }),
             ContainsSubstring("extras: grad: \"span\" is \"prompt\""));
  CHECK_THAT(error_with([](json& g) { g["novel"] = 1; }), ContainsSubstring("novel"));
  CHECK_THAT(error_with([](json& g) { g["files"].erase(1); }),
             ContainsSubstring("lists 1 files, but 1100 tokens need 2"));
  CHECK_THAT(error_with([](json& g) { g["files"][1]["file"] = "../grad"; }),
             ContainsSubstring("grad-00001.safetensors is expected"));
  CHECK_THAT(error_with([](json& g) { g["files"][1]["tokens"] = 75; }),
             ContainsSubstring("files[1]") && ContainsSubstring("tokens"));
  CHECK_THAT(error_with([](json& g) { g["files"][0]["xxh3"] = ""; }), ContainsSubstring("xxh3"));

  write_bytes(path / "grad-00000.safetensors", first.substr(0, first.size() - 4));
  CHECK_THAT(opened(), ContainsSubstring("grad-00000.safetensors"));
  std::string bytes = first;
  bytes[bytes.size() / 2] ^= 1;
  write_bytes(path / "grad-00000.safetensors", bytes);
  CHECK_THAT(error_of([&] { open_verified_trace(path, 1); }),
             ContainsSubstring("grad-00000.safetensors: is damaged"));
  std::filesystem::remove(path / "grad-00000.safetensors");
  CHECK_THAT(opened(), ContainsSubstring("grad-00000.safetensors"));
}

TEST_CASE("A gradient that is not finite does not verify") {
  const TemporaryFolder folder;
  const auto path = write_whole(folder);
  const ModelShape& shape = two_shards().header.shape;
  // In the first file: layer 1, gradient sample 1, query head 2, token 17.
  const std::size_t size = shape.head_size,
                    wrong = (((std::size_t{2} + 1) * shape.query_heads + 2) * 1024 + 17) * size + 1;
  std::size_t next = 0;
  write_gradients(path, 2,
                  [&] { return next++ == wrong ? -std::numeric_limits<float>::infinity() : 1.0f; });
  const TraceCheck check = verify_trace(TraceReader::open(path), 2);
  CHECK_FALSE(check.ok);
  REQUIRE(check.problems.size() == 1);
  CHECK_THAT(
      check.problems.front(),
      ContainsSubstring("grad-00000.safetensors: layer 1, gradient sample 1, query head 2") &&
          ContainsSubstring("token 17"));
}

/// The error of opening a trace of `dtype` whose first gradient file has the scale `scale`.
std::string error_of_scale(Dtype dtype, float scale) {
  const TemporaryFolder folder;
  const Sample s = make_sample(16, dtype, Rounding::none);
  write_trace(folder / "t", s, 16);
  write_gradients(folder / "t", 1, [] { return 60000.0f; });
  const auto file = folder / "t" / "grad-00000.safetensors";
  std::string bytes = read_bytes(file);
  const float was = 0.25f;
  const std::string old(reinterpret_cast<const char*>(&was), 4);
  REQUIRE(bytes.find(old) != std::string::npos);
  bytes.replace(bytes.find(old), 4, std::string(reinterpret_cast<const char*>(&scale), 4));
  write_bytes(file, bytes);
  return error_of([&] { TraceReader::open(folder / "t"); });
}

TEST_CASE("A scale that could make a finite gradient infinite is refused by name") {
  const auto refused = [](const std::string& rest) {
    return ContainsSubstring("grad-00000.safetensors: grad_scale is " + rest);
  };
  constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
  for (const Dtype dtype : {Dtype::f16, Dtype::bf16, Dtype::f32}) {
    CHECK_THAT(error_of_scale(dtype, kNone), refused("nan; a positive number"));
    CHECK_THAT(error_of_scale(dtype, 0), refused("0; a positive number"));
    CHECK_THAT(error_of_scale(dtype, 1e36f), refused("1e+36; a positive number"));
    CHECK(error_of_scale(dtype, 1).empty());
  }
  const float beyond = std::numeric_limits<float>::max() / 65504,
              max_scale = std::nextafter(beyond, 0.0f);
  CHECK(std::isfinite(max_scale * 65504));
  CHECK_FALSE(std::isfinite(beyond * 65504));
  CHECK(error_of_scale(Dtype::f16, max_scale).empty());
  CHECK_THAT(error_of_scale(Dtype::f16, beyond), refused("5."));
  CHECK_THAT(error_of_scale(Dtype::bf16, 2),
             refused("2; a positive number up to 1 is expected for gradients in bfl"));
  CHECK_THAT(error_of_scale(Dtype::f32, 2),
             refused("2; a positive number up to 1 is expected for gradients in float32"));
}

TEST_CASE("Sealing a trace again drops its gradients, because they need the whole trace") {
  const TemporaryFolder folder;
  const auto path = write_with_gradients(folder, 1);
  std::filesystem::remove(path / "manifest.json");
  write_bytes(path / "grad-00002.safetensors.part", "x");
  CHECK(seal_trace(path) == kTokens);
  CHECK(open_verified_trace(path, 1).gradient_samples() == 0);
  CHECK_FALSE(std::filesystem::exists(path / "grad-00002.safetensors.part"));
}

// --- features

std::filesystem::path write_with_features(const TemporaryFolder& folder) {
  write_trace(folder / "t", two_shards(), kTokens);
  write_feature(folder / "t", "score", [](auto layer, auto head, auto token) {
    return static_cast<float>(1000 * (10 * layer + head)) - 0.5f * static_cast<float>(token);
  });
  write_feature(folder / "t", "zero", [](auto, auto, auto) { return 0.0f; });
  return folder / "t";
}

TEST_CASE("Features read back as they were written, by layer, KV head and token") {
  const TemporaryFolder folder;
  const TraceReader trace = open_verified_trace(write_with_features(folder), 1);
  CHECK(trace.has_feature("score"));
  CHECK(trace.has_feature("zero"));
  CHECK_FALSE(trace.has_feature("scor"));
  std::vector<float> values(kTokens);
  trace.feature("score", 1, 1, values.data());
  for (std::uint32_t t = 0; t < kTokens; ++t)
    REQUIRE(values[t] == 11000 - 0.5f * static_cast<float>(t));
  CHECK_THROWS_AS(trace.feature("other", 0, 0, values.data()), std::logic_error);
}

TEST_CASE("A feature that is missing, has another shape or is not finite is named") {
  const TemporaryFolder folder;
  const auto path = write_with_features(folder);
  const std::string manifest = read_bytes(path / "manifest.json");
  const auto error_with = [&](auto change) {
    json changed = json::parse(manifest);
    change(changed["extras"]["columns"]);
    write_bytes(path / "manifest.json", changed.dump());
    return error_of([&] { TraceReader::open(path); });
  };
  CHECK_THAT(error_with([](json& c) { c[1]["name"] = "score"; }),
             ContainsSubstring("columns[1]") && ContainsSubstring("column-score.safetensors"));
  CHECK_THAT(error_with([](json& c) { c[1] = c[0]; }),
             ContainsSubstring("columns[1]: the name \"score\" appears twice"));
  CHECK_THAT(error_with([](json& c) { c[0]["name"] = "../x"; }),
             ContainsSubstring("up to 64 letters"));
  CHECK_THAT(error_with([](json& c) { c[0].erase("xxh3"); }), ContainsSubstring("xxh3"));
  write_bytes(path / "manifest.json", manifest);

  const auto file = path / "column-score.safetensors";
  const std::string bytes = read_bytes(file);
  std::string damaged = bytes;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  damaged.replace(bytes.size() - 8, 4, std::string(reinterpret_cast<const char*>(&nan), 4));
  write_bytes(file, damaged);
  CHECK_THAT(error_of([&] { open_verified_trace(path, 1); }),
             ContainsSubstring("column-score.safetensors: is damaged"));
  json renewed = json::parse(manifest);
  renewed["extras"]["columns"][0]["xxh3"] = xxh3_hex(damaged);
  write_bytes(path / "manifest.json", renewed.dump());
  CHECK_THAT(error_of([&] { open_verified_trace(path, 1); }),
             ContainsSubstring("layers.1.column.score: KV head 1: the value of token 1098 is not"));
  std::filesystem::remove(file);
  CHECK_THAT(error_of([&] { TraceReader::open(path); }),
             ContainsSubstring("column-score.safetensors"));

  const TemporaryFolder other;
  const Sample shorter = make_sample(kTokens - 1, Dtype::f32, Rounding::none);
  write_trace(other / "t", shorter, kTokens - 1);
  write_feature(other / "t", "score", [](auto, auto, auto) { return 1.0f; });
  std::filesystem::copy(other / "t" / "column-score.safetensors", file);
  CHECK_THAT(error_of([&] { TraceReader::open(path); }),
             ContainsSubstring("layers.0.column.score") && ContainsSubstring("1099"));
}

TEST_CASE("Sealing a trace again drops its features, because they need the whole trace") {
  const TemporaryFolder folder;
  const auto path = write_with_features(folder);
  std::filesystem::remove(path / "manifest.json");
  write_bytes(path / "column-more.safetensors.part", "x");
  CHECK(seal_trace(path) == kTokens);
  CHECK(open_verified_trace(path, 1).extras().features.empty());
  CHECK_FALSE(std::filesystem::exists(path / "column-more.safetensors.part"));
}

TEST_CASE("A sealed trace keeps its extras, and the passages that lie within it") {
  const TemporaryFolder folder;
  const auto path = write_whole(folder);
  std::filesystem::remove(path / "manifest.json");
  std::filesystem::remove(path / "shard-00001.safetensors");
  CHECK(seal_trace(path) == 1024);
  const TraceReader trace = open_verified_trace(path, 1);
  CHECK(trace.has_residuals());
  CHECK(trace.header().passages == std::vector<Passage>{{"early", 3, 5}});
}

}  // namespace
}  // namespace kvlab
