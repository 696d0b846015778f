#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "traces/manifest.hpp"
#include "traces/selections.hpp"
#include "traces/shard.hpp"
#include "traces/trace.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

void require_manifest(const fs::path& directory) {
  if (!fs::is_directory(directory))
    throw std::runtime_error(fmt::format(
        "{}: no such directory; a trace is a directory with a manifest.json", directory.string()));
  if (fs::exists(directory / kManifestFile)) return;
  if (fs::exists(directory / shard_name(0)))
    throw std::runtime_error(
        fmt::format("{}: the trace is unfinished (no manifest.json); `kvlab trace seal {}` makes a "
                    "shorter trace of its complete shards",
                    directory.string(), directory.string()));
  throw std::runtime_error(
      fmt::format("{}: is not a trace, because it has neither manifest.json nor a complete shard",
                  directory.string()));
}

SafetensorsFile open_shard(const fs::path& path, const TraceHeader& header, const ShardInfo& shard,
                           bool has_residuals) {
  SafetensorsFile file = SafetensorsFile::open(path);
  const ShardMetadata metadata = parse_shard_metadata(file);
  if (metadata.first != shard.first || metadata.tokens != shard.tokens)
    throw std::runtime_error(
        fmt::format("{}: holds {} tokens from position {} on, but the manifest says {} from "
                    "position {} on (were shards swapped?)",
                    path.string(), metadata.tokens, metadata.first, shard.tokens, shard.first));
  if (!same_description(metadata.header, header))
    throw std::runtime_error(fmt::format(
        "{}: model or config differ from the manifest, so the shard belongs to another trace",
        path.string()));
  check_shard_tensors(file, header.shape, shard, has_residuals);
  return file;
}

std::string_view name_of(Part part) { return part == Part::q ? "q" : part == Part::k ? "k" : "v"; }

/// Whether `queries` and `other` select the same queries from the first query of `queries` on.
bool agree_from_first(const std::vector<Segment>& segments, Queries queries, Queries other) {
  const auto in = [](Queries which) {
    return [=](const Segment& s) { return which == Queries::all || s.kind == SegmentKind::decode; };
  };
  const auto first = std::ranges::find_if(segments, in(queries));
  return std::all_of(first, segments.end(),
                     [&](const Segment& s) { return in(queries)(s) == in(other)(s); });
}

}  // namespace

TraceReader TraceReader::open(const fs::path& directory) {
  require_manifest(directory);
  const fs::path path = directory / kManifestFile;
  const std::string text = read_text_file(path, kMaxManifestBytes);
  TraceReader trace = assemble(directory, parse_manifest(text, path.string()));
  trace.hash_ = xxh3_hex(text);
  return trace;
}

TraceReader TraceReader::assemble(const fs::path& directory, Manifest manifest, Ids ids) {
  TraceReader trace;
  trace.directory_ = directory;
  trace.tokens_file_ = SafetensorsFile::open(directory / kTokensFile);
  trace.ids_ = read_tokens(trace.tokens_file_, manifest.header);
  if (ids == Ids::maybe_more && trace.ids_.size() > manifest.tokens)
    trace.ids_.resize(manifest.tokens);
  if (trace.ids_.size() != manifest.tokens)
    throw std::runtime_error(fmt::format("{}: has {} ids, but the trace has {} tokens",
                                         trace.tokens_file_.path().string(), trace.ids_.size(),
                                         manifest.tokens));
  check_rope_and_scale(manifest.header, trace.tokens_file_.path().string());
  trace.manifest_ = std::move(manifest);
  trace.plain_row_ = trace.header().row(0);
  for (const ShardInfo& shard : trace.shards())
    trace.files_.push_back(
        open_shard(directory / shard.file, trace.header(), shard, trace.extras().residual_norm2));
  trace.open_extras();
  return trace;
}

TraceReader TraceReader::select_layers(std::span<const std::uint32_t> layers) const {
  TraceReader some = *this;
  TraceHeader& header = some.manifest_.header;
  header.shape.layers = static_cast<std::uint32_t>(layers.size());
  header.shape.numbers.clear();
  header.rows.clear();
  for (const std::uint32_t layer : layers) {
    header.shape.numbers.push_back(shape().number(layer));
    header.rows.push_back(row(layer));
  }
  return some;
}

std::vector<std::uint32_t> TraceReader::layers_with_window(bool with) const {
  std::vector<std::uint32_t> layers;
  for (std::uint32_t layer = 0; layer < shape().layers; ++layer)
    if ((row(layer).window > 0) == with) layers.push_back(layer);
  return layers;
}

std::uint32_t TraceReader::gradient_samples(Queries queries) const {
  const auto& gradients = extras().gradients;
  return gradients && agree_from_first(segments(), queries, gradients->queries)
             ? gradients->gradient_samples
             : 0;
}

void TraceReader::open_extras() {
  if (const auto& sketch = extras().sketch) {
    sketch_file_ = SafetensorsFile::open(directory_ / kSketchFile);
    const std::uint64_t seed = check_sketch(*sketch_file_, shape());
    if (sketch_file_->metadata().contains("seed") && seed != sketch->seed)
      throw std::runtime_error(fmt::format("{}: its seed differs from {}, the seed in the manifest",
                                           sketch_file_->path().string(), sketch->seed));
  }
  if (const auto& gradients = extras().gradients)
    for (const ShardInfo& info : gradients->files) {
      gradient_files_.push_back(SafetensorsFile::open(directory_ / info.file));
      gradient_scales_.push_back(check_gradient_tensors(gradient_files_.back(), shape(), info,
                                                        gradients->gradient_samples));
    }
  for (const TraceExtras::Feature& feature : extras().features) {
    feature_files_.push_back(SafetensorsFile::open(directory_ / feature_file(feature.name)));
    check_feature_tensors(feature_files_.back(), shape(), tokens(), feature.name);
  }
  if (const auto& selections = extras().selections) {
    selected_file_ = SafetensorsFile::open(directory_ / kSelectedFile);
    max_selected_ = check_selected_tensors(*selected_file_, header(),
                                           query_positions(segments(), selections->queries).size());
  }
}

void TraceReader::selections(
    std::uint32_t layer, std::uint32_t kv_head,
    const std::function<void(std::uint32_t, std::span<const std::uint32_t>)>& each) const {
  if (!selected_file_) throw std::logic_error("the trace has no selections");
  const std::string name = layer_tensor(shape().number(layer), kSelectedTensor);
  const std::span<const std::byte> all = selected_file_->at(name).data;
  const std::size_t row_bytes = max_selected_ * sizeof(std::int32_t),
                    head_bytes = all.size() / shape().kv_heads;
  std::vector<std::int32_t> row(max_selected_);
  std::vector<std::uint32_t> tokens;
  const std::byte* from = all.data() + kv_head * head_bytes;
  std::size_t index = 0;
  for (const std::uint32_t query : query_positions(segments(), extras().selections->queries)) {
    std::memcpy(row.data(), from + index * row_bytes, row_bytes);
    if (const std::string why = read_selection(row, query, tokens); !why.empty())
      throw std::runtime_error(fmt::format("{}: {}: KV head {}, row {} (query {}): {}",
                                           selected_file_->path().string(), name, kv_head, index,
                                           query, why));
    each(query, tokens);
    ++index;
  }
}

bool TraceReader::has_feature(std::string_view name) const {
  return std::ranges::any_of(
      extras().features, [&](const TraceExtras::Feature& feature) { return feature.name == name; });
}

void TraceReader::feature(std::string_view name, std::uint32_t layer, std::uint32_t kv_head,
                          float* to) const {
  for (std::size_t i = 0; i < feature_files_.size(); ++i) {
    if (extras().features[i].name != name) continue;
    const TensorView& tensor = feature_files_[i].at(feature_tensor(shape().number(layer), name));
    const std::size_t bytes = std::size_t{tokens()} * sizeof(float);
    return to_float(Dtype::f32, tensor.data.data() + kv_head * bytes, tokens(), to);
  }
  throw std::logic_error(fmt::format("the trace has no feature {}", name));
}

void TraceReader::read(Part part, std::uint32_t layer, std::uint32_t head, std::uint32_t first,
                       std::uint32_t count, float* to) const {
  if (!has_tensors())
    throw std::runtime_error(
        fmt::format("{}: has only selections and no queries, keys and values; replay it with "
                    "--refetch logged, or give a trace that has them",
                    directory_.string()));
  const std::uint32_t heads = part == Part::q ? shape().query_heads : shape().kv_heads;
  if (layer >= shape().layers || head >= heads || first > tokens() || count > tokens() - first)
    throw std::out_of_range(
        fmt::format("the trace has no tokens [{}, {} + {}) of layer {}, head {}", first, first,
                    count, layer, head));
  const std::string tensor = layer_tensor(shape().number(layer), name_of(part));
  const std::size_t row = shape().head_size, row_bytes = row * bytes_of(shape().dtype);
  while (count > 0) {
    const std::size_t index = first / kShardTokens;
    const ShardInfo& shard = shards()[index];
    const std::uint32_t offset = first - shard.first, here = std::min(count, shard.tokens - offset);
    const std::size_t start = head * shard.tokens + offset;
    to_float(shape().dtype, files_[index].at(tensor).data.data() + start * row_bytes, here * row,
             to);
    to += here * row;
    first += here;
    count -= here;
  }
}

void TraceReader::gradient(std::uint32_t layer, std::uint32_t query_head,
                           std::uint32_t gradient_sample, std::span<const std::uint32_t> positions,
                           float* to, std::size_t stride) const {
  if (gradient_sample >= gradient_samples())
    throw std::logic_error(fmt::format("gradient sample {} does not exist; the trace has {}",
                                       gradient_sample, gradient_samples()));
  if (layer >= shape().layers || query_head >= shape().query_heads ||
      std::ranges::any_of(positions, [&](std::uint32_t p) { return p >= tokens(); }))
    throw std::out_of_range(
        fmt::format("gradients of layer {}, query head {}: one of the indices or positions is too "
                    "large; the trace has {} layers, {} query heads and {} tokens",
                    layer, query_head, shape().layers, shape().query_heads, tokens()));
  const std::size_t size = shape().head_size, row_bytes = size * bytes_of(shape().dtype);
  const std::string name = layer_tensor(shape().number(layer), kGradientTensor);
  std::size_t shard = gradient_files_.size();
  const std::byte* rows = nullptr;  // rows of the shard for the gradient sample and the head
  for (const std::uint32_t position : positions) {
    if (position / kShardTokens != shard) {
      shard = position / kShardTokens;
      const std::size_t head = std::size_t{gradient_sample} * shape().query_heads + query_head;
      rows =
          gradient_files_[shard].at(name).data.data() + head * shards()[shard].tokens * row_bytes;
    }
    to_float(shape().dtype, rows + (position - shards()[shard].first) * row_bytes, size, to);
    for (std::size_t d = 0; d < size; ++d) to[d] *= gradient_scales_[shard];
    to += stride;
  }
}

void TraceReader::residual_norm2(std::uint32_t layer, float* to) const {
  if (!extras().residual_norm2) throw std::logic_error("the trace has no residual norms");
  for (std::size_t i = 0; i < files_.size(); ++i)
    to_float(Dtype::f32,
             files_[i].at(layer_tensor(shape().number(layer), kResidualTensor)).data.data(),
             shards()[i].tokens, to + shards()[i].first);
}

std::vector<float> TraceReader::sketch(std::uint32_t layer, std::uint32_t kv_head,
                                       std::uint32_t columns) const {
  if (!sketch_file_) throw std::logic_error("the trace has no sketch of the output projections");
  const std::size_t rows = std::size_t{shape().group()} * shape().head_size;
  const TensorView& all = sketch_file_->at(layer_tensor(shape().number(layer), "sketch"));
  std::vector<float> wide(rows * kSketchColumns), sketch;
  to_float(Dtype::bf16, all.data.data() + kv_head * wide.size() * bytes_of(Dtype::bf16),
           wide.size(), wide.data());
  const float factor = std::sqrt(static_cast<float>(kSketchColumns) / static_cast<float>(columns));
  for (std::size_t row = 0; row < rows; ++row)
    for (std::size_t c = 0; c < columns; ++c)
      sketch.push_back(factor * wide[row * kSketchColumns + c]);
  return sketch;
}

TraceReader::CheckRows TraceReader::check_rows(std::size_t index, std::uint32_t layer) const {
  const SafetensorsFile& file = files_.at(index);
  const auto floats = [&](const std::string& name) {
    const TensorView& tensor = file.at(name);
    std::vector<float> values(tensor.elements());
    to_float(Dtype::f32, tensor.data.data(), values.size(), values.data());
    return values;
  };
  CheckRows check;
  check.rows.resize(kCheckRows);
  std::memcpy(check.rows.data(), file.at(kCheckRowsTensor).data.data(), 4 * kCheckRows);
  check.out = floats(layer_tensor(shape().number(layer), "check_out"));
  const std::string lse = layer_tensor(shape().number(layer), "check_lse");
  if (file.contains(lse)) check.lse = floats(lse);
  return check;
}

}  // namespace kvlab
