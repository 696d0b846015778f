// Tests of the selections of a trace, alone or beside queries, keys and values. They must be read
// back as written, and rows that are not selections must be refused with a message that names the
// row.
#include "traces/selections.hpp"

#include <fmt/format.h>

#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/sample_trace.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"
#include "traces/trace.hpp"

namespace kvlab::selections_test {
namespace {

using Catch::Matchers::ContainsSubstring;
using nlohmann::json;
using test::error_of;
using test::make_sample;
using test::Mistake;
using test::read_bytes;
using test::Sample;
using test::sample_rows;
using test::TemporaryFolder;
using test::write_bytes;
using test::write_trace;

constexpr std::uint32_t kPrompt = 20, kTokens = 32, kSelected = 3;
constexpr std::uint32_t kLayers = 2, kHeads = 2;  // of make_sample()

using Rows = std::vector<std::int32_t>;

/// Selections of two layers. Query t of layer l and KV head h selects the tokens t - 1, h and l +
/// 2. In every third row it selects only token t - 1, and the other entries are -1.
struct Drawn {
  explicit Drawn(Queries which) : queries(which) {
    for (std::int32_t layer = 0; layer < 2; ++layer)
      for (std::int32_t head = 0; head < 2; ++head)
        for (std::int32_t query = which == Queries::all ? 0 : kPrompt; query < 32; ++query) {
          const bool is_short = query % 3 == 0 || query < 6;
          Rows& own = rows[static_cast<std::size_t>(layer)];
          own.push_back(is_short ? kNoToken : head);
          own.push_back(query - 1);
          own.push_back(is_short ? kNoToken : layer + 2);
        }
  }
  SelectionsToWrite to_write() const { return {queries, kSelected, {rows[0], rows[1]}}; }

  Queries queries;
  std::array<Rows, 2> rows;
};

std::vector<std::uint32_t> selected_by(std::uint32_t layer, std::uint32_t head,
                                       std::uint32_t query) {
  if (query == 0) return {};
  if (query % 3 == 0 || query < 6) return {query - 1};
  return {head, layer + 2, query - 1};
}

Sample sample() { return make_sample(kTokens, Dtype::f32, Rounding::none); }
const std::vector<Segment> kSegments{{0, kPrompt, SegmentKind::prompt},
                                     {kPrompt, kTokens - kPrompt, SegmentKind::decode}};

std::filesystem::path write_alone(const TemporaryFolder& folder, const Drawn& drawn) {
  const Sample whole = sample();
  write_selections_trace(folder / "alone", whole.header, whole.ids, kSegments, drawn.to_write());
  return folder / "alone";
}

void check_rows_of(const TraceReader& trace, std::uint32_t first) {
  REQUIRE(trace.max_selected() == kSelected);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer)
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      std::uint32_t next = first;
      trace.selections(
          layer, head, [&](std::uint32_t query, std::span<const std::uint32_t> tokens) {
            REQUIRE(query == next++);
            REQUIRE(std::vector(tokens.begin(), tokens.end()) == selected_by(layer, head, query));
          });
      CHECK(next == kTokens);
    }
}

TEST_CASE("Selections read back, alone or beside queries, keys and values") {
  for (const Queries queries : {Queries::decode, Queries::all}) {
    const TemporaryFolder folder;
    const Drawn drawn(queries);
    const std::uint32_t first = queries == Queries::all ? 0 : kPrompt;
    write_trace(folder / "beside", sample(), kPrompt);
    write_selections(folder / "beside", drawn.to_write());
    for (const auto& path : {folder / "beside", write_alone(folder, drawn)}) {
      const TraceReader trace = open_verified_trace(path, 1);
      CHECK(trace.extras().selections->queries == queries);
      CHECK(trace.ids() == sample().ids);
      CHECK(trace.tokens() == kTokens);
      CHECK(trace.segments() == kSegments);
      check_rows_of(trace, first);
      CHECK(verify_trace(trace, 2).selections == kLayers * kHeads * (kTokens - first));
    }
    CHECK(TraceReader::open(folder / "beside").has_tensors());
    const TraceReader alone = TraceReader::open(folder / "alone");
    CHECK_FALSE(alone.has_tensors());
    std::vector<float> row(8);
    CHECK_THAT(error_of([&] { alone.read(Part::k, 0, 0, 0, 1, row.data()); }),
               ContainsSubstring("alone: has only selections and no queries, keys and values"));
  }
}

TEST_CASE("Selections replace those that the trace has") {
  const TemporaryFolder folder;
  const auto path = write_alone(folder, Drawn(Queries::decode));
  write_selections(path, Drawn(Queries::all).to_write());
  check_rows_of(open_verified_trace(path, 1), 0);
}

TEST_CASE("A layer with a sliding window has no selections") {
  const TemporaryFolder folder;
  TraceHeader header =
      make_sample(kTokens, Dtype::f32, Rounding::none, Mistake::none, 1.3f, sample_rows()).header;
  const Drawn drawn(Queries::decode);
  const std::vector<std::int32_t> ids(kTokens, 1);
  const std::uint32_t full = header.rows[0].window == 0 ? 0 : 1;
  CHECK_THAT(error_of<std::invalid_argument>([&] {
               write_selections_trace(folder / "t", header, ids, kSegments, drawn.to_write());
             }),
             ContainsSubstring("has 2 layers; one for each of 1 layers without a sliding window"));
  write_selections_trace(folder / "t", header, ids, kSegments,
                         {Queries::decode, kSelected, {drawn.rows[full]}});
  const TraceReader trace = open_verified_trace(folder / "t", 1);
  CHECK(trace.selected_file()->tensors().size() == 1);
  std::uint32_t next = kPrompt;
  trace.selections(full, 1, [&](std::uint32_t query, std::span<const std::uint32_t> tokens) {
    CHECK(std::vector(tokens.begin(), tokens.end()) == selected_by(full, 1, query));
    ++next;
  });
  CHECK(next == kTokens);
}

TEST_CASE("Rows that are not selections are refused, and nothing is left") {
  const TemporaryFolder folder;
  const auto refused = [&](std::size_t at, std::int32_t token) {
    Drawn drawn(Queries::decode);
    drawn.rows[1][at] = token;
    const std::string why = error_of<std::invalid_argument>([&] { write_alone(folder, drawn); });
    CHECK_FALSE(std::filesystem::exists(folder / "alone"));
    return why;
  };
  // Row 1 of KV head 1 belongs to query 21, a multiple of 3: it has token 20 and -1 twice.
  const std::size_t row = ((kTokens - kPrompt) + 1) * kSelected;
  CHECK(refused(row, 22) ==
        "layers.1.selected: KV head 1, row 1 (query 21): has token 22; 0 to 21, the query's "
        "position, or -1 is expected");
  CHECK_THAT(refused(row, -2), ContainsSubstring("row 1 (query 21): has token -2; 0 to 21"));
  CHECK(refused(row, 20) ==
        "layers.1.selected: KV head 1, row 1 (query 21): has token 20 twice; list each token once, "
        "and fill the row with -1");
}

TEST_CASE("Selections of the wrong size are refused") {
  const TemporaryFolder folder;
  const Drawn drawn(Queries::decode);
  const Sample whole = sample();
  const auto refused = [&](const SelectionsToWrite& selections,
                           const std::vector<Segment>& segments = kSegments) {
    const std::string why = error_of<std::invalid_argument>([&] {
      write_selections_trace(folder / "t", whole.header, whole.ids, segments, selections);
    });
    CHECK_FALSE(std::filesystem::exists(folder / "t"));
    return why;
  };
  SelectionsToWrite selections = drawn.to_write();
  selections.tokens = 4;
  CHECK(refused(selections) == "layers.0.selected: has 72 entries; [2, 12, 4] are expected");
  selections.tokens = 0;
  CHECK_THAT(refused(selections), ContainsSubstring("a row has 0 entries; 1 to 1048576"));
  CHECK_THAT(refused(drawn.to_write(), {{0, kTokens, SegmentKind::prompt}}),
             ContainsSubstring("the trace has no decode queries"));
  selections = drawn.to_write();
  selections.layers.pop_back();
  CHECK_THAT(refused(selections), ContainsSubstring("has 1 layers; one for each of 2 layers"));
}

TEST_CASE("Damaged selections are refused by name") {
  const TemporaryFolder folder;
  const Drawn drawn(Queries::decode);
  const auto path = write_alone(folder, drawn);
  const std::string manifest = read_bytes(path / "manifest.json"),
                    file = read_bytes(path / kSelectedFile);
  const auto restore = [&] {
    write_bytes(path / "manifest.json", manifest);
    write_bytes(path / kSelectedFile, file);
  };
  const auto error_with = [&](auto change) {
    json changed = json::parse(manifest);
    change(changed);
    write_bytes(path / "manifest.json", changed.dump());
    const std::string error = error_of([&] { TraceReader::open(path); });
    restore();
    return error;
  };
  CHECK_THAT(error_with([](json& m) { m["extras"]["selected"]["file"] = "x"; }),
             ContainsSubstring("selected.safetensors is expected"));
  CHECK_THAT(error_with([](json& m) { m["extras"]["selected"]["queries"] = "prompt"; }),
             ContainsSubstring("queries"));
  CHECK_THAT(error_with([](json& m) { m["extras"]["selected"]["queries"] = "all"; }),
             ContainsSubstring("selected.safetensors") && ContainsSubstring("layers.0.selected"));
  CHECK_THAT(error_with([](json& m) { m["extras"].erase("selected"); }),
             ContainsSubstring("lists 0 shards, but 32 tokens need 1"));
  CHECK_THAT(error_with([](json& m) { m["extras"]["residual_norm2"] = json::object(); }),
             ContainsSubstring("residual_norm2"));

  /// Replaces the selections by those of `tensors`, with a checksum that fits.
  const auto verified_with = [&](std::span<const TensorToWrite> tensors) {
    json changed = json::parse(manifest);
    changed["extras"]["selected"]["xxh3"] = write_safetensors(path / kSelectedFile, tensors, {});
    write_bytes(path / "manifest.json", changed.dump());
    const std::string error = error_of([&] { open_verified_trace(path, 1); });
    restore();
    return error;
  };
  std::array<Rows, 2> rows = drawn.rows;
  rows[1][kSelected + 1] = 40;
  const std::vector<std::size_t> shape{kHeads, kTokens - kPrompt, kSelected};
  const auto tensor = [&](const char* name, const Rows& own, std::vector<std::size_t> own_shape) {
    return TensorToWrite{name, Dtype::i32, std::move(own_shape), std::as_bytes(std::span(own))};
  };
  const TensorToWrite first = tensor("layers.0.selected", rows[0], shape);
  CHECK_THAT(verified_with(std::vector{first, tensor("layers.1.selected", rows[1], shape)}),
             ContainsSubstring("selected.safetensors: layers.1.selected: KV head 0, row 1 (query "
                               "21): has token 40; 0 to 21"));
  CHECK_THAT(verified_with(std::vector{first}), ContainsSubstring("1 tensors; one for each of 2"));
  CHECK_THAT(verified_with(std::vector{first, tensor("layers.1.selected", rows[1], {2, 18, 2})}),
             ContainsSubstring("layers.1.selected"));
  CHECK_THAT(verified_with(std::vector{first, tensor("layers.2.selected", rows[1], shape)}),
             ContainsSubstring("layers.1.selected"));
  const Rows none;
  CHECK_THAT(verified_with(std::vector{tensor("layers.0.selected", none, {2, 12, 0}),
                                       tensor("layers.1.selected", none, {2, 12, 0})}),
             ContainsSubstring("K from 1 to 1048576 is expected"));

  std::string bytes = file;
  bytes.back() ^= 1;
  write_bytes(path / kSelectedFile, bytes);
  CHECK_THAT(error_of([&] { open_verified_trace(path, 1); }),
             ContainsSubstring("selected.safetensors: is damaged"));
}

}  // namespace
}  // namespace kvlab::selections_test
