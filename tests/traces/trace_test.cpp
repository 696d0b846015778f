// Tests that write a trace and read it back.
#include "traces/trace.hpp"

#include <algorithm>

#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/sample_trace.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"
#include "traces/shard.hpp"

namespace kvlab {
namespace {

using Catch::Matchers::ContainsSubstring;
using test::append;
using test::error_of;
using test::make_sample;
using test::read_bytes;
using test::Sample;
using test::TemporaryFolder;
using test::write_trace;

std::vector<float> head_of(const std::vector<float>& rows, std::uint32_t heads, std::uint32_t head,
                           std::uint32_t size, std::uint32_t first, std::uint32_t count) {
  std::vector<float> result;
  for (std::size_t t = first; t < first + count; ++t)
    for (std::size_t d = 0; d < size; ++d) result.push_back(rows[(t * heads + head) * size + d]);
  return result;
}

void check_part(const TraceReader& trace, Part part, const std::vector<std::vector<float>>& rows,
                std::uint32_t heads, std::uint32_t first, std::uint32_t count) {
  const std::uint32_t size = trace.shape().head_size;
  for (std::uint32_t l = 0; l < trace.shape().layers; ++l)
    for (std::uint32_t h = 0; h < heads; ++h) {
      std::vector<float> read(std::size_t{count} * size);
      trace.read(part, l, h, first, count, read.data());
      CHECK(read == head_of(rows[l], heads, h, size, first, count));
    }
}

TEST_CASE("A trace reads back as it was written, in every dtype") {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    const TemporaryFolder folder;
    const Sample sample = make_sample(1100, dtype, Rounding::model_dtype);
    write_trace(folder / "t", sample, 1050);
    const auto trace = TraceReader::open(folder / "t");
    CHECK(trace.tokens() == 1100);
    CHECK(trace.prompt_tokens() == 1050);
    CHECK(trace.segments() ==
          std::vector<Segment>{{0, 1050, SegmentKind::prompt}, {1050, 50, SegmentKind::decode}});
    CHECK(trace.ids() == sample.ids);
    CHECK(trace.shape() == sample.header.shape);
    CHECK(trace.header().model == "sample");
    CHECK(trace.header().rope.inv_freq == sample.header.rope.inv_freq);
    CHECK(trace.header().rope.factor == sample.header.rope.factor);
    CHECK(trace.header().rope_config == sample.header.rope_config);
    CHECK(trace.header().softmax_scale == sample.header.softmax_scale);
    CHECK(trace.header().rounding == Rounding::model_dtype);
    CHECK(trace.header().weights_xxh3 == sample.header.weights_xxh3);
    CHECK(trace.header().tokenizer_xxh3.empty());
    CHECK(trace.header().capture == sample.header.capture);
    const std::string manifest = read_bytes(folder / "t/manifest.json");
    CHECK(trace.hash() == xxh3_hex(std::as_bytes(std::span(manifest))));
    CHECK(trace.shards().size() == 2);
    for (const auto& [first, count] :
         {std::pair(0u, 1100u), {1000u, 60u}, {1024u, 1u}, {1100u, 0u}}) {
      check_part(trace, Part::q, sample.q, 6, first, count);
      check_part(trace, Part::k, sample.k, 2, first, count);
      check_part(trace, Part::v, sample.v, 2, first, count);
    }
  }
}

TEST_CASE("Reading past the end or another head throws") {
  const TemporaryFolder folder;
  write_trace(folder / "t", make_sample(20, Dtype::f32, Rounding::none), 10);
  const auto trace = TraceReader::open(folder / "t");
  std::vector<float> rows(1000);
  CHECK_THROWS_AS(trace.read(Part::k, 0, 0, 10, 11, rows.data()), std::out_of_range);
  CHECK_THROWS_AS(trace.read(Part::k, 0, 0, 21, 0, rows.data()), std::out_of_range);
  CHECK_THROWS_AS(trace.read(Part::k, 0, 2, 0, 1, rows.data()), std::out_of_range);
  CHECK_THROWS_AS(trace.read(Part::q, 2, 0, 0, 1, rows.data()), std::out_of_range);
  CHECK_NOTHROW(trace.read(Part::q, 1, 5, 0, 20, rows.data()));
}

TEST_CASE(
    "The check rows of a whole shard are evenly spaced; those of a shorter one end with its last "
    "row") {
  CHECK(kCheckGrid.front() == 0);
  CHECK(kCheckGrid[1] == 68);
  CHECK(kCheckGrid.back() == 1023);
  const TemporaryFolder folder;
  const Sample sample = make_sample(1024 + 140, Dtype::f32, Rounding::none);
  write_trace(folder / "t", sample, 1100);
  const auto trace = TraceReader::open(folder / "t");
  const auto whole = trace.check_rows(0, 1), rest = trace.check_rows(1, 1);
  CHECK(std::ranges::equal(whole.rows, kCheckGrid));
  std::vector<std::uint32_t> expected(16, 1024 + 139);
  expected[0] = 1024, expected[1] = 1024 + 68, expected[2] = 1024 + 136;
  CHECK(rest.rows == expected);
  for (std::size_t h = 0; h < 6; ++h)
    for (std::size_t i = 0; i < 16; ++i) {
      CHECK(rest.lse[h * 16 + i] == sample.lse[1][expected[i] * 6 + h]);
      CHECK(whole.lse[h * 16 + i] == sample.lse[1][kCheckGrid[i] * 6 + h]);
      for (std::size_t d = 0; d < 8; ++d)
        CHECK(rest.out[(h * 16 + i) * 8 + d] == sample.out[1][(expected[i] * 6 + h) * 8 + d]);
    }
}

TEST_CASE("The files do not depend on how a prompt was split into appends") {
  const TemporaryFolder folder;
  for (const std::uint32_t tokens : {1u, 2u, 17u, 1023u, 1024u, 1025u, 2100u}) {
    INFO(tokens);
    const Sample sample = make_sample(tokens, Dtype::bf16, Rounding::model_dtype);
    const std::string name = std::to_string(tokens);
    write_trace(folder / (name + "-dense"), sample, tokens);
    for (const std::uint32_t chunk : {1u, 100u, 1024u, 1500u}) {
      const auto path = folder / (name + "-" + std::to_string(chunk));
      TraceWriter writer(path, sample.header);
      for (std::uint32_t t = 0; t < tokens; t += chunk)
        append(writer, sample, t, std::min(chunk, tokens - t), SegmentKind::prompt);
      CHECK(writer.tokens() == tokens);
      writer.finish();
      CHECK(TraceReader::open(path).segments().size() == 1);
      CHECK(read_bytes(path / "manifest.json") ==
            read_bytes(folder / (name + "-dense/manifest.json")));
    }
    CHECK(verify_trace(TraceReader::open(folder / (name + "-dense")), 1).ok);
  }
}

TEST_CASE("Turns of a conversation are separate segments") {
  const TemporaryFolder folder;
  const Sample sample = make_sample(40, Dtype::f32, Rounding::none);
  TraceWriter writer(folder / "t", sample.header);
  append(writer, sample, 0, 10, SegmentKind::prompt);
  append(writer, sample, 10, 5, SegmentKind::prompt, true);
  append(writer, sample, 15, 5, SegmentKind::prompt);
  append(writer, sample, 20, 1, SegmentKind::decode);
  append(writer, sample, 21, 1, SegmentKind::decode);
  append(writer, sample, 22, 18, SegmentKind::prompt);
  writer.finish();
  const auto trace = TraceReader::open(folder / "t");
  CHECK(trace.segments() == std::vector<Segment>{{0, 10, SegmentKind::prompt},
                                                 {10, 10, SegmentKind::prompt},
                                                 {20, 2, SegmentKind::decode},
                                                 {22, 18, SegmentKind::prompt}});
  CHECK(trace.prompt_tokens() == 38);
}

TEST_CASE("Layers may arrive in any order, and without log-sum-exp") {
  const TemporaryFolder folder;
  const Sample sample = make_sample(30, Dtype::f32, Rounding::none);
  TraceWriter writer(folder / "t", sample.header);
  writer.begin(sample.ids, SegmentKind::prompt);
  for (const std::uint32_t l : {1u, 0u})
    writer.layer(l, sample.q[l], sample.k[l], sample.v[l], sample.out[l], {});
  writer.end();
  writer.finish();
  const auto trace = TraceReader::open(folder / "t");
  CHECK(trace.check_rows(0, 0).lse.empty());
  CHECK(verify_trace(trace, 1).ok);
}

TEST_CASE("Misuse of a writer throws and changes nothing") {
  const TemporaryFolder folder;
  const Sample s = make_sample(10, Dtype::f32, Rounding::none);
  TraceWriter writer(folder / "t", s.header);
  CHECK_THROWS_AS(writer.end(), std::logic_error);
  CHECK_THROWS_AS(writer.finish(), std::logic_error);
  CHECK_THROWS_AS(writer.begin({}, SegmentKind::prompt), std::logic_error);
  CHECK_THROWS_AS(writer.begin(std::vector<std::int32_t>{-1}, SegmentKind::prompt),
                  std::logic_error);
  CHECK_THROWS_AS(writer.layer(0, s.q[0], s.k[0], s.v[0], s.out[0], s.lse[0]), std::logic_error);
  writer.begin(s.ids, SegmentKind::prompt);
  CHECK_THROWS_AS(writer.begin(s.ids, SegmentKind::prompt), std::logic_error);
  CHECK_THROWS_AS(writer.layer(2, s.q[0], s.k[0], s.v[0], s.out[0], s.lse[0]), std::logic_error);
  CHECK_THROWS_AS(writer.layer(0, s.k[0], s.k[0], s.v[0], s.out[0], s.lse[0]), std::logic_error);
  writer.layer(0, s.q[0], s.k[0], s.v[0], s.out[0], s.lse[0]);
  CHECK_THROWS_AS(writer.layer(0, s.q[0], s.k[0], s.v[0], s.out[0], s.lse[0]), std::logic_error);
  CHECK_THROWS_AS(writer.layer(1, s.q[1], s.k[1], s.v[1], s.out[1], {}), std::logic_error);
  CHECK_THROWS_AS(writer.end(), std::logic_error);
  writer.layer(1, s.q[1], s.k[1], s.v[1], s.out[1], s.lse[1]);
  writer.end();
  writer.finish();
  CHECK_THROWS_AS(writer.finish(), std::logic_error);
  CHECK(verify_trace(TraceReader::open(folder / "t"), 1).ok);
}

TEST_CASE("A new capture removes the files of one that was killed before its first shard") {
  const TemporaryFolder folder;
  const Sample s = make_sample(8, Dtype::f32, Rounding::none);
  std::filesystem::create_directory(folder / "t");
  write_file_atomically(folder / "t" / "tokens.safetensors", "of no use");
  write_file_atomically(folder / "t" / "shard-00000.safetensors.part", "half of one");
  {
    TraceWriter writer(folder / "t", s.header);
    CHECK(std::filesystem::is_empty(folder / "t"));
    CHECK_THAT(error_of([&] { TraceWriter(folder / "t", s.header); }),
               ContainsSubstring("another trace is being written there"));
  }
  CHECK(std::filesystem::is_directory(folder / "t"));
  write_file_atomically(folder / "t" / "shard-00000.safetensors", "a whole one");
  CHECK_THAT(error_of([&] { TraceWriter(folder / "t", s.header); }),
             ContainsSubstring("exists already"));
}

TEST_CASE("A capture that fails after its first shard leaves that shard and the ids") {
  const TemporaryFolder folder;
  const Sample s = make_sample(8, Dtype::f32, Rounding::none);
  {
    const TraceWriter writer(folder / "t", s.header);
    write_file_atomically(folder / "t" / "tokens.safetensors", "the ids");
    write_file_atomically(folder / "t" / "shard-00000.safetensors", "renamed before the error");
  }
  CHECK(read_bytes(folder / "t" / "tokens.safetensors") == "the ids");
}

TEST_CASE("A folder that exists or cannot be made is refused and not changed") {
  const TemporaryFolder folder;
  const TraceHeader header = make_sample(1, Dtype::f32, Rounding::none).header;
  std::filesystem::create_directory(folder / "notes");
  CHECK_THAT(error_of([&] { TraceWriter(folder.path(), header); }),
             ContainsSubstring("exists already"));
  std::filesystem::remove(folder / "notes");
  CHECK_THAT(error_of([&] { TraceWriter(folder / "a/b", header); }),
             ContainsSubstring("a/b: cannot create the folder: No such file or directory"));
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("A header that no reader would accept is refused before anything is written") {
  const TemporaryFolder folder;
  const TraceHeader good = make_sample(1, Dtype::f32, Rounding::none).header;
  const auto refused = [&](auto change) {
    TraceHeader header = good;
    change(header);
    CHECK_THROWS_AS(TraceWriter(folder / "t", header), std::invalid_argument);
  };
  refused([](TraceHeader& h) { h.shape.kv_heads = 4; });
  refused([](TraceHeader& h) { h.shape.layers = 0; });
  refused([](TraceHeader& h) { h.shape.dtype = Dtype::i32; });
  refused([](TraceHeader& h) { h.rope.inv_freq.resize(5); });
  refused([](TraceHeader& h) { h.rope.inv_freq[0] = -1; });
  refused([](TraceHeader& h) { h.softmax_scale = 0; });
  refused([](TraceHeader& h) { (*h.rope_config)["rope_type"] = "longrope"; });
  refused([](TraceHeader& h) { h.weights_xxh3 = "short"; });
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("A capture that ends before its first whole shard leaves nothing") {
  const TemporaryFolder folder;
  const Sample sample = make_sample(100, Dtype::f32, Rounding::none);
  {
    TraceWriter writer(folder / "t", sample.header);
    append(writer, sample, 0, 100, SegmentKind::prompt);
  }
  CHECK(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace kvlab
