#include "engine/capture.hpp"

#include <unistd.h>

#include "tests/catch.hpp"
#include "traces/base/json.hpp"

using namespace kvlab;

namespace {

const Model& tiny() {
  static const Model model = Model::load(KVLAB_SOURCE_DIR "/engine/models/tiny", 1);
  return model;
}

/// A new directory for traces, which is removed at the end.
class Scratch {
 public:
  Scratch() {
    std::string name = (std::filesystem::temp_directory_path() / "kvlab-XXXXXX").string();
    REQUIRE(mkdtemp(name.data()));
    path_ = name;
  }
  ~Scratch() { std::filesystem::remove_all(path_); }
  std::filesystem::path at(const char* name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

std::vector<std::int32_t> some_ids(std::size_t count) {
  std::vector<std::int32_t> ids{0};
  while (ids.size() < count) ids.push_back(static_cast<std::int32_t>(ids.size() * 7919 % 8192));
  return ids;
}

/// Captures a long prompt, decoded tokens and a second turn: 1,150 tokens.
TraceReader capture(const std::filesystem::path& path, Prefill prefill) {
  const auto ids = some_ids(1150);
  TraceWriter writer(path, trace_header(tiny(), {{"teacher_forced", true}}));
  std::uint32_t seen = 0;
  Capture capture(writer, [&](std::uint32_t tokens) { seen = tokens; });
  ResolvedConfig options;
  options.prefill = prefill;
  Decoder decoder(tiny(), options, 2);
  decoder.watch(&capture);
  decoder.feed(std::span(ids).first(1010), SegmentKind::prompt);
  decoder.feed(std::span(ids).subspan(1010, 30), SegmentKind::decode);
  decoder.feed(std::span(ids).subspan(1040, 70), SegmentKind::prompt);
  decoder.feed(std::span(ids).subspan(1110), SegmentKind::decode);
  writer.finish();
  CHECK(seen == 1150);
  return TraceReader::open(path);
}

}  // namespace

TEST_CASE("A captured trace verifies, and contains the ids that were fed") {
  const Scratch scratch;
  const TraceReader trace = capture(scratch.at("trace"), {});
  CHECK(trace.tokens() == 1150);
  CHECK(trace.ids() == some_ids(1150));
  CHECK(trace.segments() == std::vector<Segment>{{0, 1010, SegmentKind::prompt},
                                                 {1010, 30, SegmentKind::decode},
                                                 {1040, 70, SegmentKind::prompt},
                                                 {1110, 40, SegmentKind::decode}});
  CHECK(trace.shards().size() == 2);
  CHECK(trace.shape() == tiny().config().shape());
  CHECK(trace.header().capture->at("engine") == "kvlab");
  const TraceCheck check = verify_trace(trace, 1);
  CHECK(check.ok);
  CHECK(check.rows == 2 * 16 * 4 * 4);
  CHECK(check.worst_out < 1e-5);
  CHECK(check.worst_lse < 1e-5);
}

TEST_CASE("How a prompt is appended does not change its trace") {
  const Scratch scratch;
  const TraceReader dense = capture(scratch.at("dense"), {});
  const TraceReader chunked = capture(scratch.at("chunked"), {100});
  REQUIRE(chunked.shards().size() == dense.shards().size());
  CHECK(chunked.segments() == dense.segments());
  for (std::size_t i = 0; i < dense.shards().size(); ++i)
    CHECK(chunked.shards()[i].xxh3 == dense.shards()[i].xxh3);
}

TEST_CASE("An abandoned capture leaves no trace") {
  const Scratch scratch;
  {
    TraceWriter writer(scratch.at("trace"), trace_header(tiny(), {}));
    Capture capture(writer);
    Decoder decoder(tiny(), {}, 1);
    decoder.watch(&capture);
    decoder.feed(some_ids(40), SegmentKind::prompt);
  }
  CHECK_THROWS_AS(TraceReader::open(scratch.at("trace")), std::runtime_error);
}
