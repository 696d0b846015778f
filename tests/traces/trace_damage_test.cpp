// Tests of traces that are broken, unfinished, of a later format, or truncated because the disk is
// full.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ctime>
#include <set>

#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/sample_trace.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"
#include "traces/manifest.hpp"
#include "traces/trace.hpp"

namespace kvlab {
namespace {

using Catch::Matchers::ContainsSubstring;
using nlohmann::json;
using test::append;
using test::error_of;
using test::make_sample;
using test::read_bytes;
using test::Sample;
using test::TemporaryFolder;
using test::two_shards;
using test::write_bytes;
using test::write_trace;
namespace fs = std::filesystem;

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

/// A complete trace, for tests that break it.
class BrokenTrace {
 public:
  BrokenTrace() { write_trace(path(), two_shards(), 900); }

  fs::path path() const { return folder_ / "t"; }
  fs::path file(const char* name) const { return path() / name; }

  /// The error of opening the trace; "" if it opens. Checks that it begins with a path in the
  /// trace.
  std::string error() const {
    const std::string text = error_of([&] { TraceReader::open(path()); });
    CHECK((text.empty() || text.starts_with(path().string())));
    CHECK(text.find('\n') == std::string::npos);
    return text;
  }

  template <class Change>
  std::string error_with_manifest(Change change) const {
    const std::string text = read_bytes(file("manifest.json"));
    json manifest = json::parse(text);
    change(manifest);
    write_bytes(file("manifest.json"), manifest.dump());
    const std::string found = error();
    write_bytes(file("manifest.json"), text);
    return found;
  }

 private:
  TemporaryFolder folder_;
};

TEST_CASE("A folder that is not a trace is refused by name") {
  const TemporaryFolder folder;
  CHECK_THAT(error_of([&] { TraceReader::open(folder / "none"); }),
             ContainsSubstring("no such directory"));
  CHECK_THAT(
      error_of([&] { TraceReader::open(folder.path()); }),
      ContainsSubstring("not a trace, because it has neither manifest.json nor a complete shard"));
}

TEST_CASE("A later format is refused with a message that says so, whatever else it contains") {
  const BrokenTrace trace;
  CHECK_THAT(trace.error_with_manifest([](json& m) {
    m = {{"format", 4}, {"novel", 1}};
  }),
             ContainsSubstring(
                 "has trace format 4, but this kvlab reads formats up to 3; use a newer kvlab"));
}

TEST_CASE("A manifest with a key that is missing, unknown or out of range is refused") {
  const BrokenTrace trace;
  const auto error_if = [&](auto change) { return trace.error_with_manifest(change); };
  CHECK(error_if([](json&) {}).empty());
  const json manifest = json::parse(read_bytes(trace.file("manifest.json")));
  for (const auto& [key, value] : manifest.items())
    CHECK_THAT(error_if([&](json& m) { m.erase(key); }),
               ContainsSubstring("key \"" + key + "\" is missing"));
  for (const auto& [key, value] : manifest["config"].items())
    CHECK_THAT(error_if([&](json& m) { m["config"].erase(key); }),
               ContainsSubstring("key \"" + key + "\" is missing"));
  for (const char* key : {"sliding_window", "attn_logit_softcapping", "sinks"})
    CHECK_THAT(error_if([&](json& m) { m["config"][key] = 1; }),
               ContainsSubstring("config: key \"" + std::string(key) + "\" is not known"));
  CHECK_THAT(error_if([](json& m) { m["post_rope"] = true; }), ContainsSubstring("\"post_rope\""));
  CHECK_THAT(error_if([](json& m) { m["rounding"] = "float8"; }),
             ContainsSubstring("\"rounding\" is \"float8\""));
  CHECK_THAT(error_if([](json& m) { m["segments"][0]["kind"] = "image"; }),
             ContainsSubstring("segments[0]: \"kind\" is \"image\""));
  CHECK_THAT(error_if([](json& m) { m["config"]["dtype"] = "int32"; }), ContainsSubstring("dtype"));
  CHECK_THAT(error_if([](json& m) { m["config"]["rope"]["rope_type"] = "longrope"; }),
             ContainsSubstring("\"rope_type\" is \"longrope\""));
  CHECK_THAT(error_if([](json& m) { m["config"]["kv_heads"] = 4; }),
             ContainsSubstring("6 query heads cannot share 4 KV heads"));
  CHECK_THAT(error_if([](json& m) { m["config"]["layers"] = 0; }),
             ContainsSubstring("\"layers\" is 0"));
  CHECK_THAT(error_if([](json& m) { m["config"]["head_size"] = -8; }), ContainsSubstring("is -8"));
  CHECK_THAT(error_if([](json& m) { m["tokens"] = 0; }), ContainsSubstring("\"tokens\" is 0"));
  CHECK_THAT(error_if([](json& m) { m["tokens"] = 4294967296; }), ContainsSubstring("4294967296"));
  CHECK_THAT(error_if([](json& m) { m["tokens"] = 1099; }), ContainsSubstring("segments[1]"));
  CHECK_THAT(error_if([](json& m) { m["prompt_tokens"] = 901; }),
             ContainsSubstring("prompt_tokens"));
  CHECK_THAT(error_if([](json& m) { m["segments"][1]["start"] = 899; }),
             ContainsSubstring("\"start\""));
  CHECK_THAT(error_if([](json& m) { m["segments"].erase(1); }),
             ContainsSubstring("segments cover only 900 of 1100 tokens"));
  CHECK_THAT(error_if([](json& m) { m["shards"].erase(1); }), ContainsSubstring("lists 1 shards"));
  CHECK_THAT(error_if([](json& m) { m["shards"][1]["first"] = 0; }),
             ContainsSubstring("\"first\""));
  CHECK_THAT(error_if([](json& m) { m["shards"][0]["tokens"] = 76; }),
             ContainsSubstring("\"tokens\""));
  CHECK_THAT(error_if([](json& m) { m["shards"][0]["file"] = "../x"; }),
             ContainsSubstring("\"../x\""));
  CHECK_THAT(error_if([](json& m) { m["shards"][0]["xxh3"] = "0"; }), ContainsSubstring("16 hex"));
  CHECK_THAT(error_if([](json& m) { m = json::array(); }), ContainsSubstring("object is expected"));
}

TEST_CASE("A manifest truncated at any byte is refused") {
  const BrokenTrace trace;
  const std::string text = read_bytes(trace.file("manifest.json"));
  CHECK_NOTHROW(parse_manifest(text, "manifest.json"));
  for (std::size_t size = 0; size + 1 < text.size(); ++size) {  // the last byte is a newline
    INFO(size);
    CHECK_THAT(
        error_of([&] { parse_manifest(std::string_view(text).substr(0, size), "manifest.json"); }),
        ContainsSubstring("manifest.json: is not valid JSON from byte"));
  }
}

TEST_CASE("A missing, truncated, swapped or foreign shard is refused by name") {
  const BrokenTrace trace;
  const auto first = trace.file("shard-00000.safetensors"),
             second = trace.file("shard-00001.safetensors");
  const std::string whole = read_bytes(second);

  fs::remove(second);
  CHECK_THAT(trace.error(),
             ContainsSubstring("shard-00001.safetensors: cannot open: No such file"));
  write_bytes(second, whole.substr(0, whole.size() - 1));
  CHECK_THAT(trace.error(),
             ContainsSubstring("shard-00001.safetensors") && ContainsSubstring("truncated"));
  write_bytes(second, whole.substr(0, 100));
  CHECK_THAT(trace.error(),
             ContainsSubstring("shard-00001.safetensors") && ContainsSubstring("truncated"));

  write_bytes(second, read_bytes(first));
  write_bytes(first, whole);
  CHECK_THAT(trace.error(),
             ContainsSubstring("shard-00000.safetensors: holds 76 tokens from position 1024 on") &&
                 ContainsSubstring("swapped"));
  write_bytes(first, read_bytes(second));

  Sample other = two_shards();
  other.header.model = "another";
  write_trace(trace.path() / "other", other, 900);
  write_bytes(second, read_bytes(trace.path() / "other/shard-00001.safetensors"));
  CHECK_THAT(trace.error(), ContainsSubstring("shard-00001.safetensors: model or config differ"));
}

TEST_CASE("A shard with a tensor missing, misshapen or unknown is refused by name") {
  const BrokenTrace trace;
  const auto path = trace.file("shard-00001.safetensors");
  const auto rewritten = [&](auto change) {
    const std::string whole = read_bytes(path);
    {
      const auto file = SafetensorsFile::open(path);
      std::vector<TensorToWrite> tensors;
      for (const auto& [name, tensor] : file.tensors())
        tensors.push_back({name, tensor.dtype, tensor.shape, tensor.data});
      auto metadata = file.metadata();
      change(tensors, metadata);
      write_safetensors(path, tensors, metadata);
    }
    const std::string error = trace.error();
    write_bytes(path, whole);
    return error;
  };
  using Tensors = std::vector<TensorToWrite>;
  using Metadata = std::map<std::string, std::string>;
  const auto find = [](Tensors& tensors, const std::string& name) {
    return std::find_if(tensors.begin(), tensors.end(),
                        [&](const auto& t) { return t.name == name; });
  };
  CHECK(rewritten([](Tensors&, Metadata&) {}).empty());
  for (const char* name : {"check_rows", "layers.0.q", "layers.1.k", "layers.1.v",
                           "layers.0.check_out", "layers.1.check_lse"}) {
    CHECK_THAT(rewritten([&](Tensors& t, Metadata&) { t.erase(find(t, name)); }),
               ContainsSubstring("tensor \"" + std::string(name) + "\" is missing"));
    CHECK_THAT(rewritten([&](Tensors& t, Metadata&) { find(t, name)->shape.push_back(1); }),
               ContainsSubstring("tensor \"" + std::string(name) + "\" is ") &&
                   ContainsSubstring(" is expected"));
  }
  CHECK_THAT(rewritten([&](Tensors& t, Metadata&) {
               t.push_back({"layers.0.sinks", Dtype::f32, {0}, {}});
             }),
             ContainsSubstring("tensor \"layers.0.sinks\" is not known"));
  std::array<std::int32_t, 16> rows{};
  CHECK_THAT(rewritten([&](Tensors& t, Metadata&) {
               find(t, "check_rows")->data = std::as_bytes(std::span(rows));
             }),
             ContainsSubstring("check_rows must ascend from 1024 to 1099"));
  for (const char* key : {"format", "config", "first", "tokens", "segments", "rounding", "model"})
    CHECK_THAT(rewritten([&](Tensors&, Metadata& m) { m.erase(key); }),
               ContainsSubstring("key \"" + std::string(key) + "\" is missing"));
  CHECK_THAT(rewritten([&](Tensors&, Metadata& m) { m["first"] = "x"; }),
             ContainsSubstring("__metadata__ first: is not valid JSON"));
}

TEST_CASE("Wrong ids, frequencies or scale are refused by name") {
  const BrokenTrace trace;
  const auto error_of_tokens = [&](std::vector<std::int32_t> ids, std::vector<float> inv_freq,
                                   float factor, float scale) {
    const std::vector<TensorToWrite> tensors{
        {"ids", Dtype::i32, {ids.size()}, std::as_bytes(std::span(ids))},
        {"inv_freq", Dtype::f32, {inv_freq.size()}, std::as_bytes(std::span(inv_freq))},
        {"rope_factor", Dtype::f32, {1}, std::as_bytes(std::span(&factor, 1))},
        {"softmax_scale", Dtype::f32, {1}, std::as_bytes(std::span(&scale, 1))}};
    write_safetensors(trace.file("tokens.safetensors"), tensors, {});
    return trace.error();
  };
  const auto& ids = two_shards().ids;
  CHECK(error_of_tokens(ids, {1, 0.1f}, 1, 1).empty());
  CHECK_THAT(error_of_tokens({1, 2}, {1}, 1, 1),
             ContainsSubstring("2 ids, but the trace has 1100 tokens"));
  CHECK_THAT(error_of_tokens(std::vector<std::int32_t>(1100, -1), {1}, 1, 1),
             ContainsSubstring("a negative id"));
  CHECK_THAT(error_of_tokens(ids, std::vector<float>(5, 1.0f), 1, 1),
             ContainsSubstring("inv_freq has 5"));
  CHECK_THAT(error_of_tokens(ids, {std::nanf("")}, 1, 1),
             ContainsSubstring("inv_freq contains nan"));
  CHECK_THAT(error_of_tokens(ids, {1}, -1, 1), ContainsSubstring("rope_factor is -1"));
  CHECK_THAT(error_of_tokens(ids, {1}, 1, 0), ContainsSubstring("softmax_scale is 0"));
  fs::remove(trace.file("tokens.safetensors"));
  CHECK_THAT(trace.error(), ContainsSubstring("tokens.safetensors: cannot open"));
}

/// Runs `body` in a child process that then kills itself, as kill -9 would.
template <class Body>
void run_and_kill(Body body) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    try {
      body();
    } catch (...) {
      ::_exit(1);
    }
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFSIGNALED(status));
}

TEST_CASE("A killed capture leaves whole shards, is marked unfinished, and can be sealed") {
  const TemporaryFolder folder;
  const auto path = folder / "t";
  const Sample& s = two_shards();
  run_and_kill([&] {
    TraceWriter writer(path, s.header);
    append(writer, s, 0, 900, SegmentKind::prompt);
    for (std::uint32_t t = 900; t < 1100; ++t) append(writer, s, t, 1, SegmentKind::decode);
    writer.begin(std::vector<std::int32_t>{5}, SegmentKind::decode);
  });
  CHECK(names_in(path) == std::set<std::string>{"shard-00000.safetensors", "tokens.safetensors"});
  write_bytes(path / "shard-00001.safetensors.part", "half a shard");
  write_bytes(path / "tokens.safetensors.part", "");
  CHECK_THAT(error_of([&] { TraceReader::open(path); }),
             ContainsSubstring("the trace is unfinished") &&
                 ContainsSubstring("kvlab trace seal " + path.string()));
  CHECK(seal_trace(path) == 1024);
  CHECK(names_in(path) ==
        std::set<std::string>{"manifest.json", "shard-00000.safetensors", "tokens.safetensors"});
  const auto trace = open_verified_trace(path, 1);
  CHECK(trace.tokens() == 1024);
  CHECK(trace.segments() ==
        std::vector<Segment>{{0, 900, SegmentKind::prompt}, {900, 124, SegmentKind::decode}});
  CHECK(std::ranges::equal(trace.ids(), std::span(s.ids).first(1024)));
  CHECK_THAT(error_of([&] { seal_trace(path); }), ContainsSubstring("finished already"));
}

TEST_CASE("A long prompt killed between its shards is sealed up to the last whole one") {
  const TemporaryFolder folder;
  const Sample s = make_sample(3000, Dtype::bf16, Rounding::model_dtype);
  write_trace(folder / "t", s, 3000);
  // This is the state after a kill just after the second shard is renamed. The file of ids may have
  // more tokens than the shards.
  fs::remove(folder / "t/manifest.json");
  fs::remove(folder / "t/shard-00002.safetensors");
  CHECK(seal_trace(folder / "t") == 2048);
  const auto trace = open_verified_trace(folder / "t", 1);
  CHECK(trace.segments() == std::vector<Segment>{{0, 2048, SegmentKind::prompt}});
  CHECK(trace.ids().size() == 2048);
}

TEST_CASE("A capture killed just before its manifest loses nothing") {
  const BrokenTrace trace;
  const std::string manifest = read_bytes(trace.file("manifest.json"));
  fs::remove(trace.file("manifest.json"));
  CHECK(seal_trace(trace.path()) == 1100);
  CHECK(read_bytes(trace.file("manifest.json")) == manifest);
}

TEST_CASE("Sealing refuses files that cannot become a trace, and does not change them") {
  const TemporaryFolder folder;
  CHECK_THAT(error_of([&] { seal_trace(folder / "none"); }),
             ContainsSubstring("no such directory"));
  CHECK_THAT(error_of([&] { seal_trace(folder.path()); }),
             ContainsSubstring("no complete shard to keep"));

  const BrokenTrace trace;
  fs::remove(trace.file("manifest.json"));
  const auto second = trace.file("shard-00001.safetensors");
  const std::string whole = read_bytes(second);
  write_bytes(second, whole.substr(0, 200));
  CHECK_THAT(error_of([&] { seal_trace(trace.path()); }),
             ContainsSubstring("shard-00001.safetensors"));
  write_bytes(second, read_bytes(trace.file("shard-00000.safetensors")));
  CHECK_THAT(error_of([&] { seal_trace(trace.path()); }),
             ContainsSubstring("shard-00001.safetensors: begins with token 0"));
  CHECK(!fs::exists(trace.file("manifest.json")));
  write_bytes(second, whole);
  fs::remove(trace.file("tokens.safetensors"));
  CHECK_THAT(error_of([&] { seal_trace(trace.path()); }), ContainsSubstring("tokens.safetensors"));
}

TEST_CASE("A seal that is refused has written nothing") {
  const BrokenTrace trace;
  fs::remove(trace.file("manifest.json"));
  std::vector<std::int32_t> ids = two_shards().ids;
  ids.resize(ids.size() + 5);  // a killed capture leaves such ids, and sealing truncates them
  const std::vector<float> inv_freq{1, 0.1f}, one{1};
  const std::vector<TensorToWrite> tensors{
      {"ids", Dtype::i32, {ids.size()}, std::as_bytes(std::span(ids))},
      {"inv_freq", Dtype::f32, {2}, std::as_bytes(std::span(inv_freq))},
      {"rope_factor", Dtype::f32, {1}, std::as_bytes(std::span(one))},
      {"softmax_scale", Dtype::f32, {1}, std::as_bytes(std::span(one))}};
  write_safetensors(trace.file("tokens.safetensors"), tensors, {});
  write_safetensors(trace.file("output.safetensors"), {}, {});  // no sketch
  const std::string before = read_bytes(trace.file("tokens.safetensors"));
  CHECK_THAT(error_of([&] { seal_trace(trace.path()); }), ContainsSubstring("no seed"));
  CHECK(read_bytes(trace.file("tokens.safetensors")) == before);
  CHECK(!fs::exists(trace.file("manifest.json")));
  write_safetensors(trace.file("output.safetensors"), {}, {{"seed", "1"}});
  CHECK_THAT(error_of([&] { seal_trace(trace.path()); }), ContainsSubstring("output.safetensors"));
  CHECK(read_bytes(trace.file("tokens.safetensors")) == before);
  fs::remove(trace.file("output.safetensors"));
  CHECK(seal_trace(trace.path()) == 1100);
  CHECK(TraceReader::open(trace.path()).ids() == two_shards().ids);
}

TEST_CASE("A manifest of very many passages is parsed in linear time") {
  const BrokenTrace trace;
  const auto cpu_seconds = [&](std::size_t count) {
    const std::clock_t began = std::clock();
    CHECK(trace
              .error_with_manifest([&](json& m) {
                for (std::size_t i = 0; i < count; ++i)
                  m["spans"].push_back({{"name", std::to_string(i)}, {"start", 0}, {"tokens", 1}});
              })
              .empty());
    return static_cast<double>(std::clock() - began) / CLOCKS_PER_SEC;
  };
  // If each name were compared with all others, four times the passages would take sixteen times as
  // long.
  CHECK(cpu_seconds(120'000) < 10 * cpu_seconds(30'000) + 0.5);
  CHECK_THAT(trace.error_with_manifest([](json& m) {
    for (int i = 0; i < 2; ++i)
      m["spans"].push_back({{"name", "twice"}, {"start", 0}, {"tokens", 1}});
  }),
             ContainsSubstring("the name \"twice\" appears twice"));
}

/// While this object exists, no file can grow beyond `bytes`, as if the disk were full.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    handler_ = ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int) = nullptr;
};

TEST_CASE("A full disk at the first shard is reported, and no files are left") {
  const TemporaryFolder folder;
  {
    const FileSizeLimit limit(100'000);
    TraceWriter writer(folder / "t", two_shards().header);
    CHECK_THAT(error_of([&] { append(writer, two_shards(), 0, 1100, SegmentKind::prompt); }),
               ContainsSubstring("shard-00000.safetensors: cannot write: File too large"));
    CHECK(names_in(folder / "t") == std::set<std::string>{"tokens.safetensors"});
    CHECK_THROWS_AS(writer.finish(), std::logic_error);
  }
  CHECK(fs::is_empty(folder.path()));
}

TEST_CASE("A full disk later leaves the sealed shards, which make a trace") {
  const TemporaryFolder folder;
  {
    TraceWriter writer(folder / "t", two_shards().header);
    append(writer, two_shards(), 0, 1100, SegmentKind::prompt);
    const FileSizeLimit limit(2'000);
    CHECK_THAT(error_of([&] { writer.finish(); }),
               ContainsSubstring("tokens.safetensors: cannot write: File too large"));
  }
  CHECK(names_in(folder / "t") ==
        std::set<std::string>{"shard-00000.safetensors", "tokens.safetensors"});
  CHECK(seal_trace(folder / "t") == 1024);
  CHECK_NOTHROW(open_verified_trace(folder / "t", 1));
}

}  // namespace
}  // namespace kvlab
