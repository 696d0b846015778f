#include "traces/selections.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <utility>

#include "traces/base/files.hpp"
#include "traces/manifest.hpp"
#include "traces/shard.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

/// The layers that have selections: policies act only on layers without a sliding window.
std::vector<std::uint32_t> selecting_layers(const TraceHeader& header) {
  std::vector<std::uint32_t> layers;
  for (std::uint32_t layer = 0; layer < header.shape.layers; ++layer)
    if (header.row(layer).window == 0) layers.push_back(layer);
  return layers;
}

std::string tensor_of(const TraceHeader& header, std::uint32_t layer) {
  return layer_tensor(header.shape.number(layer), kSelectedTensor);
}

/// Throws std::invalid_argument unless every row is a valid selection for its query.
void check_rows(const TraceHeader& header, std::span<const std::uint32_t> queries,
                const SelectionsToWrite& selections, std::uint32_t layer,
                std::span<const std::int32_t> rows) {
  std::vector<std::uint32_t> positions;
  for (std::size_t i = 0; i * selections.tokens < rows.size(); ++i) {
    const std::uint32_t query = queries[i % queries.size()];
    const auto row = rows.subspan(i * selections.tokens, selections.tokens);
    if (const std::string why = read_selection(row, query, positions); !why.empty())
      throw std::invalid_argument(fmt::format("{}: KV head {}, row {} (query {}): {}",
                                              tensor_of(header, layer), i / queries.size(),
                                              i % queries.size(), query, why));
  }
}

/// The tensors of the file, checked. They refer to the arrays of `selections`.
std::vector<TensorToWrite> tensors_of(const TraceHeader& header,
                                      const std::vector<Segment>& segments,
                                      const SelectionsToWrite& selections) {
  const std::vector<std::uint32_t> queries = query_positions(segments, selections.queries),
                                   layers = selecting_layers(header);
  if (queries.empty())
    throw std::invalid_argument(fmt::format(
        "selected: the trace has no {} queries; give the kind of the queries that selected",
        name_of(selections.queries)));
  if (selections.tokens == 0 || selections.tokens > kMaxSelected)
    throw std::invalid_argument(fmt::format("selected: a row has {} entries; 1 to {} are expected",
                                            selections.tokens, kMaxSelected));
  if (selections.layers.size() != layers.size())
    throw std::invalid_argument(
        fmt::format("selected: has {} layers; one for each of {} layers without a sliding window "
                    "is expected",
                    selections.layers.size(), layers.size()));
  std::vector<TensorToWrite> tensors;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const std::vector<std::size_t> shape{header.shape.kv_heads, queries.size(), selections.tokens};
    const std::span<const std::int32_t> rows = selections.layers[i];
    if (rows.size() != shape[0] * shape[1] * shape[2])
      throw std::invalid_argument(fmt::format("{}: has {} entries; [{}] are expected",
                                              tensor_of(header, layers[i]), rows.size(),
                                              fmt::join(shape, ", ")));
    check_rows(header, queries, selections, layers[i], rows);
    tensors.push_back({tensor_of(header, layers[i]), Dtype::i32, shape, std::as_bytes(rows)});
  }
  return tensors;
}

/// A new folder. The destructor removes it, unless keep() was called.
class NewFolder {
 public:
  explicit NewFolder(const fs::path& directory) : directory_(directory) {
    std::error_code error;
    if (fs::create_directory(directory, error)) return;
    throw std::runtime_error(
        error ? fmt::format("{}: cannot create the folder: {}", directory.string(), error.message())
              : fmt::format("{}: exists already; give a new directory", directory.string()));
  }
  ~NewFolder() {
    std::error_code ignored;
    if (!kept_) fs::remove_all(directory_, ignored);
  }
  void keep() { kept_ = true; }

 private:
  const fs::path& directory_;
  bool kept_ = false;
};

}  // namespace

std::vector<std::uint32_t> query_positions(const std::vector<Segment>& segments, Queries queries) {
  std::vector<std::uint32_t> positions;
  for (const Segment& segment : segments)
    for (std::uint32_t i = 0; i < segment.tokens; ++i)
      if (queries == Queries::all || segment.kind == SegmentKind::decode)
        positions.push_back(segment.start + i);
  return positions;
}

std::string read_selection(std::span<const std::int32_t> row, std::uint32_t query,
                           std::vector<std::uint32_t>& positions) {
  positions.clear();
  for (const std::int32_t entry : row) {
    if (entry == kNoToken) continue;
    if (entry < 0 || static_cast<std::uint32_t>(entry) > query)
      return fmt::format("has token {}; 0 to {}, the query's position, or -1 is expected", entry,
                         query);
    positions.push_back(static_cast<std::uint32_t>(entry));
  }
  std::ranges::sort(positions);
  const auto twice = std::ranges::adjacent_find(positions);
  if (twice == positions.end()) return "";
  return fmt::format("has token {} twice; list each token once, and fill the row with -1", *twice);
}

std::uint32_t check_selected_tensors(const SafetensorsFile& file, const TraceHeader& header,
                                     std::size_t queries) {
  const std::vector<std::uint32_t> layers = selecting_layers(header);
  if (layers.empty() || file.tensors().size() != layers.size())
    throw std::runtime_error(
        fmt::format("{}: {} tensors; one for each of {} layers without a sliding window is "
                    "expected",
                    file.path().string(), file.tensors().size(), layers.size()));
  const std::vector<std::size_t>& first = file.at(tensor_of(header, layers.front())).shape;
  const std::size_t tokens = first.size() == 3 ? first[2] : 0;
  if (tokens == 0 || tokens > kMaxSelected)
    throw std::runtime_error(
        fmt::format("{}: {} is [{}]; [KV heads, queries, K] with K from 1 to {} is expected",
                    file.path().string(), tensor_of(header, layers.front()), fmt::join(first, ", "),
                    kMaxSelected));
  for (const std::uint32_t layer : layers) {
    const std::size_t wanted[] = {header.shape.kv_heads, queries, tokens};
    file.at(tensor_of(header, layer), Dtype::i32, wanted);
  }
  return static_cast<std::uint32_t>(tokens);
}

void write_selections(const fs::path& directory, const SelectionsToWrite& selections) {
  const std::string path = (directory / kManifestFile).string();
  Manifest manifest = parse_manifest(read_text_file(path, kMaxManifestBytes), path);
  const auto tensors = tensors_of(manifest.header, manifest.segments, selections);
  const auto replace = [&] { write_file_atomically(path, manifest_text(manifest)); };
  // The manifest must not name a file that is being replaced. But a trace that contains only
  // selections would be invalid without them, so its manifest stays until the new file is written.
  const bool has_more = !manifest.shards.empty();
  if (std::exchange(manifest.extras.selections, std::nullopt) && has_more) replace();
  manifest.extras.selections = {selections.queries,
                                write_safetensors(directory / kSelectedFile, tensors, {})};
  replace();
}

void write_selections_trace(const fs::path& directory, TraceHeader header,
                            std::span<const std::int32_t> ids, const std::vector<Segment>& segments,
                            const SelectionsToWrite& selections) {
  header.simplify();
  check_header(header);
  Manifest manifest{.header = std::move(header),
                    .tokens = static_cast<std::uint32_t>(ids.size()),
                    .prompt_tokens = prompt_tokens_of(segments),
                    .segments = segments,
                    .shards = {},
                    .tokens_xxh3 = {},
                    .extras = {}};
  const auto tensors = tensors_of(manifest.header, segments, selections);
  NewFolder folder(directory);
  manifest.extras.selections = {selections.queries,
                                write_safetensors(directory / kSelectedFile, tensors, {})};
  manifest.tokens_xxh3 = write_tokens(directory, ids, manifest.header);
  const std::string text = manifest_text(manifest);
  parse_manifest(text, (directory / kManifestFile).string());  // checks ids and segments
  write_file_atomically(directory / kManifestFile, text);
  folder.keep();
}

}  // namespace kvlab
