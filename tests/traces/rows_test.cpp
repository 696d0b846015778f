// Tests of traces whose layers have different attention: sliding windows, soft caps, sinks, RoPE
// tables and layer numbers.
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/sample_trace.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/manifest.hpp"
#include "traces/shard.hpp"

namespace kvlab {
namespace {

using Catch::Matchers::ContainsSubstring;
using nlohmann::json;
using test::append;
using test::error_of;
using test::make_sample;
using test::Mistake;
using test::read_bytes;
using test::Sample;
using test::sample_rows;
using test::TemporaryFolder;
using test::write_bytes;
using test::write_trace;

/// A sample with two layers that are layers 3 and 7 of a model.
Sample row_sample(std::uint32_t tokens, Dtype dtype = Dtype::f32,
                  Rounding rounding = Rounding::none) {
  Sample sample = make_sample(tokens, dtype, rounding, Mistake::none, 1.3f, sample_rows());
  sample.header.shape.numbers = {3, 7};
  return sample;
}

TEST_CASE("Row specs and layer numbers read back as they were written") {
  const TemporaryFolder folder;
  const Sample sample = row_sample(1100);
  write_trace(folder / "t", sample, 1050);
  const auto trace = TraceReader::open(folder / "t");
  CHECK(trace.header().format() == 3);
  CHECK(trace.shape().numbers == std::vector<std::uint32_t>{3, 7});
  CHECK(trace.shape().layer_of(7) == 1);
  CHECK(trace.shape().layer_of(1) == 2);
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    const RowSpec &read = trace.row(layer), &written = sample.header.rows[layer];
    CHECK(read.window == written.window);
    CHECK(read.softcap == written.softcap);
    CHECK(read.table == written.table);
    CHECK(read.scale == written.scale);
    CHECK(read.rope == written.rope);
    CHECK(read.sinks == written.sinks);
  }
  const auto& tensors = trace.shard_file(0).tensors();
  for (const char* name : {"layers.3.q", "layers.7.v", "layers.7.check_out"})
    CHECK(tensors.contains(name));
  CHECK(!tensors.contains("layers.0.q"));
  std::vector<float> key(8);
  trace.read(Part::k, 1, 0, 5, 1, key.data());
  CHECK(std::equal(key.begin(), key.end(), sample.k[1].begin() + 5 * 16));
}

TEST_CASE(
    "Attention with sliding windows, caps, sinks and two tables verifies only with all of "
    "them") {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    const TemporaryFolder folder;
    const Sample sample = row_sample(300, dtype, Rounding::model_dtype);
    write_trace(folder / "right", sample, 250);
    const TraceCheck check = verify_trace(TraceReader::open(folder / "right"), 2);
    INFO(torch_name(dtype));
    CHECK(check.problems == std::vector<std::string>{});
    CHECK(check.worst_out < (dtype == Dtype::f32 ? 1e-5 : 5e-3));
    CHECK(check.worst_lse < (dtype == Dtype::f32 ? 1e-5 : 5e-3));
    int count = 0;
    const auto fails = [&](auto change) {
      Sample other = sample;
      change(other.header.rows);
      const auto path = folder / ("wrong" + std::to_string(count++));
      write_trace(path, other, 250);
      INFO(count);
      CHECK(!verify_trace(TraceReader::open(path), 2).ok);
    };
    fails([](auto& rows) { rows[0].window = 0; });
    fails([](auto& rows) { rows[0].window = 21; });
    fails([](auto& rows) { rows[1].softcap = 0; });
    fails([](auto& rows) { rows[1].sinks.clear(); });
    fails([](auto& rows) { rows[1].sinks[4] += 0.5f; });
    fails([](auto& rows) { std::swap(rows[0].rope, rows[1].rope); });
    fails([](auto& rows) { rows[1].scale *= 1.1f; });
  }
}

TEST_CASE("Scores in the thousands verify under a cap and beside a sink") {
  const TemporaryFolder folder;
  write_trace(folder / "t",
              make_sample(300, Dtype::f32, Rounding::none, Mistake::none, 30.0f, sample_rows()),
              300);
  CHECK(verify_trace(TraceReader::open(folder / "t"), 1).ok);
}

TEST_CASE("If no layer needs a row spec, format 2 is written, byte for byte") {
  const TemporaryFolder folder;
  Sample sample = make_sample(1100, Dtype::bf16, Rounding::model_dtype);
  write_trace(folder / "plain", sample, 900);
  const RowSpec all = sample.header.row(0);
  sample.header.rows = {all, all};
  sample.header.shape.numbers = {0, 1};
  sample.header.rope = {};
  write_trace(folder / "rows", sample, 900);
  for (const char* name : {"manifest.json", "tokens.safetensors", "shard-00000.safetensors",
                           "shard-00001.safetensors"})
    CHECK(read_bytes(folder / "plain" / name) == read_bytes(folder / "rows" / name));
  const json manifest = json::parse(read_bytes(folder / "plain/manifest.json"));
  CHECK(manifest["format"] == 2);
  CHECK(manifest["config"].size() == 6);
  const auto tokens = SafetensorsFile::open(folder / "plain/tokens.safetensors");
  CHECK(tokens.tensors().size() == 4);
  CHECK(tokens.at("inv_freq").shape == std::vector<std::size_t>{3});
}

TEST_CASE("A killed capture with row specs is sealed, and keeps its sinks and tables") {
  const TemporaryFolder folder;
  const Sample sample = row_sample(2000);
  const auto whole = folder / "whole";
  write_trace(whole, sample, 1500);
  std::filesystem::remove(whole / "manifest.json");
  std::filesystem::remove(whole / "shard-00001.safetensors");
  CHECK(seal_trace(whole) == 1024);
  const auto sealed = open_verified_trace(whole, 2);
  CHECK(sealed.row(1).sinks == sample.header.rows[1].sinks);
  CHECK(sealed.row(0).window == 20);
  CHECK(sealed.row(0).rope == sample.header.rows[0].rope);
  CHECK(sealed.shape().numbers == sample.header.shape.numbers);
}

TEST_CASE("An invalid row spec is refused before anything is written") {
  const TemporaryFolder folder;
  const TraceHeader good = row_sample(1).header;
  const auto refused = [&](auto change) {
    TraceHeader header = good;
    change(header);
    CHECK_THROWS_AS(TraceWriter(folder / "t", header), std::invalid_argument);
  };
  refused([](TraceHeader& h) { h.rows.pop_back(); });
  refused([](TraceHeader& h) { h.shape.numbers = {3}; });
  refused([](TraceHeader& h) { h.shape.numbers = {7, 3}; });
  refused([](TraceHeader& h) { h.shape.numbers = {3, 1u << 20}; });
  refused([](TraceHeader& h) { h.rows[0].table = 2; });
  refused([](TraceHeader& h) { h.rows[0].table = 0; });  // that table has other frequencies
  refused([](TraceHeader& h) { h.rows[0].rope.inv_freq.pop_back(); });
  refused([](TraceHeader& h) { h.rows[0].scale = 0; });
  refused([](TraceHeader& h) { h.rows[0].softcap = -1; });
  refused([](TraceHeader& h) { h.rows[0].softcap = NAN; });
  refused([](TraceHeader& h) { h.rows[1].sinks.pop_back(); });
  refused([](TraceHeader& h) { h.rows[1].sinks[0] = INFINITY; });
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("A manifest with wrong row specs is refused by name") {
  const TemporaryFolder folder;
  write_trace(folder / "t", row_sample(30), 20);
  const auto path = folder / "t/manifest.json";
  const std::string text = read_bytes(path);
  const auto refused = [&](auto change, const char* why) {
    json manifest = json::parse(text);
    change(manifest["config"]["rows"]);
    write_bytes(path, manifest.dump());
    const std::string error = error_of([&] { TraceReader::open(folder / "t"); });
    CHECK_THAT(error, ContainsSubstring(why));
    CHECK(error.find('\n') == std::string::npos);
  };
  refused([](json& rows) { rows.erase(1); }, "1 rows; one row for each of 2 layers is expected");
  refused([](json& rows) { rows = 5; }, "rows");
  refused([](json& rows) { rows[1]["layer"] = 3; }, "\"layer\" is 3");
  refused([](json& rows) { rows[1]["layer"] = 4000000000u; }, "\"layer\"");
  refused([](json& rows) { rows[0]["span"] = -1; }, "\"span\" is -1");
  refused([](json& rows) { rows[0]["span"] = 1e30; }, "\"span\"");
  refused([](json& rows) { rows[0]["softcap"] = "much"; }, "\"softcap\"");
  refused([](json& rows) { rows[0]["softcap"] = -0.5; }, "\"softcap\"");
  refused([](json& rows) { rows[0]["scale"] = 0; }, "softmax_scale is 0");
  refused([](json& rows) { rows[0]["rope"] = 2; }, "\"rope\" is 2");
  refused([](json& rows) { rows[1]["rope"] = 1; }, "no row has rope 0");
  refused([](json& rows) { rows[1]["value_size"] = 4; },
          "\"value_size\" is 4; 8 is expected, as in all layers");
  refused([](json& rows) { rows[0]["query_heads"] = 2; }, "6 is expected, as in all layers");
  refused([](json& rows) { rows[0].erase("kv_heads"); }, "kv_heads");
  refused([](json& rows) { rows[0]["novel"] = 1; }, "\"novel\" is not known");
  refused([](json& rows) { rows[0]["span"] = 19; }, "model or config differ from the manifest");
  json old = json::parse(text);
  old["format"] = 2;
  write_bytes(path, old.dump());
  CHECK_THAT(error_of([&] { TraceReader::open(folder / "t"); }),
             ContainsSubstring("\"rows\" is not known"));
}

TEST_CASE("Tables and sinks that do not match the row specs are refused") {
  const TemporaryFolder folder;
  const Sample sample = row_sample(30);
  write_trace(folder / "t", sample, 20);
  const auto refused = [&](auto change, const char* why) {
    TraceHeader header = sample.header;
    change(header);
    write_tokens(folder / "t", sample.ids, header);
    CHECK_THAT(error_of([&] { TraceReader::open(folder / "t"); }), ContainsSubstring(why));
  };
  refused([](TraceHeader& h) { h.rows[0].table = 0; }, "inv_freq");
  refused([](TraceHeader& h) { h.rows.clear(); }, "inv_freq");
  refused(
      [](TraceHeader& h) {
        for (auto& row : h.rows) row.rope.inv_freq.resize(5);
      },
      "at most 4, half the head size, are expected");
  refused([](TraceHeader& h) { h.rows[0].rope.inv_freq[1] = -1; }, "inv_freq contains -1");
  refused([](TraceHeader& h) { h.rows[0].rope.factor = 0; }, "rope_factor is 0");
  refused([](TraceHeader& h) { h.rows[1].sinks.resize(5); }, "layers.7.sink");
  refused([](TraceHeader& h) { h.rows[1].sinks[1] = NAN; }, "layer 7: a sink is nan");
  refused([](TraceHeader& h) { h.shape.numbers = {3, 8}; }, "layers.8.sink");
}

}  // namespace
}  // namespace kvlab
