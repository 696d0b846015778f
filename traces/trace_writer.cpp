#include <fcntl.h>
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "traces/base/files.hpp"
#include "traces/manifest.hpp"
#include "traces/selections.hpp"
#include "traces/shard.hpp"
#include "traces/trace.hpp"

namespace kvlab {
namespace {

// The buffer of one shard while a decoder fills it.

/// What one layer computed for consecutive tokens; see TraceWriter::layer().
struct LayerRows {
  std::span<const float> q, k, v, out, lse;

  /// Rows [first, first + count), for a model of this shape.
  LayerRows slice(const ModelShape& shape, std::size_t first, std::size_t count) const;
};

constexpr std::uint32_t kLatest = kCheckRows, kSlots = kCheckRows + 1;

/// Where one of the sixteen check rows of a shard comes from: `slot` is its index among the 17 kept
/// rows (see ShardBuffer::Layer), and `row` its index in the shard.
struct CheckSource {
  std::uint32_t slot, row;
};

/// Returns the sources of the check rows of a shard of `tokens` rows: the rows of kCheckGrid. If
/// the shard is too short to have a row of the grid, its last row replaces that row.
std::array<CheckSource, kCheckRows> check_sources(std::uint32_t tokens) {
  std::array<CheckSource, kCheckRows> sources{};
  for (std::uint32_t i = 0; i < kCheckRows; ++i)
    sources[i] =
        kCheckGrid[i] < tokens ? CheckSource{i, kCheckGrid[i]} : CheckSource{kLatest, tokens - 1};
  return sources;
}

/// Refuses values that are not finite, because attention cannot be computed from them. `tensor` is
/// [heads, tokens, dim], and its first token is at position `first`.
void refuse_not_finite(const std::filesystem::path& path, const TensorToWrite& tensor,
                       std::uint32_t first) {
  const std::size_t at = first_not_finite(tensor.dtype, tensor.data);
  if (at * bytes_of(tensor.dtype) == tensor.data.size()) return;
  throw std::runtime_error(
      fmt::format("{}: {} at position {} is not finite; the model's weights may be damaged, or too "
                  "large for {}",
                  path.string(), tensor.name, first + at / tensor.shape[2] % tensor.shape[1],
                  torch_name(tensor.dtype)));
}

/// Selects the 16 check rows from the 17 kept ones: [heads, 17, width] to [heads, 16, width].
std::vector<float> select_slots(const std::vector<float>& slots, std::uint32_t heads,
                                std::size_t width,
                                const std::array<CheckSource, kCheckRows>& sources) {
  std::vector<float> rows(std::size_t{heads} * kCheckRows * width);
  for (std::size_t h = 0; h < heads; ++h)
    for (std::size_t i = 0; i < kCheckRows; ++i)
      std::copy_n(slots.data() + (h * kSlots + sources[i].slot) * width, width,
                  rows.data() + (h * kCheckRows + i) * width);
  return rows;
}

LayerRows LayerRows::slice(const ModelShape& shape, std::size_t first, std::size_t count) const {
  const std::size_t query_row = std::size_t{shape.query_heads} * shape.head_size;
  const std::size_t kv_row = std::size_t{shape.kv_heads} * shape.head_size;
  const auto part = [&](std::span<const float> rows, std::size_t width) {
    return rows.empty() ? rows : rows.subspan(first * width, count * width);
  };
  return {part(q, query_row), part(k, kv_row), part(v, kv_row), part(out, query_row),
          part(lse, shape.query_heads)};
}

/// Queries, keys and values of up to 1,024 tokens, in the trace's dtype and the file's layout, and
/// the attention outputs of the check rows.
class ShardBuffer {
 public:
  ShardBuffer(const ModelShape& shape, std::uint32_t first)
      : shape_(shape), first_(first), layers_(shape.layers) {
    // The memory is not zeroed, so the pages of a short shard's unused rows are never touched.
    const auto allocate = [&](std::uint32_t heads) {
      return std::make_unique_for_overwrite<std::byte[]>(std::size_t{heads} * kShardTokens *
                                                         shape_.head_size * bytes_of(shape_.dtype));
    };
    for (Layer& layer : layers_) {
      layer.q = allocate(shape_.query_heads);
      layer.k = allocate(shape_.kv_heads);
      layer.v = allocate(shape_.kv_heads);
      layer.out.resize(std::size_t{shape_.query_heads} * kSlots * shape_.head_size);
    }
  }

  std::uint32_t first() const { return first_; }  ///< position of its first token
  /// Stores `count` tokens of one layer from row `row` of the shard on. Rows arrive in order.
  void put(std::uint32_t layer_index, std::uint32_t row, std::uint32_t count,
           const LayerRows& rows) {
    Layer& layer = layers_[layer_index];
    put_heads(layer.q.get(), shape_.query_heads, row, count, rows.q);
    put_heads(layer.k.get(), shape_.kv_heads, row, count, rows.k);
    put_heads(layer.v.get(), shape_.kv_heads, row, count, rows.v);
    if (!rows.lse.empty()) layer.lse.resize(std::size_t{shape_.query_heads} * kSlots);
    for (std::uint32_t slot = 0; slot < kCheckRows; ++slot)
      if (kCheckGrid[slot] >= row && kCheckGrid[slot] < row + count)
        keep_check_row(layer, slot, kCheckGrid[slot] - row, rows);
    keep_check_row(layer, kLatest, count - 1, rows);
  }
  /// Stores squared norms of the residual stream, one per row.
  void put_residual(std::uint32_t layer, std::uint32_t row, std::span<const float> norm2) {
    layers_[layer].residual.resize(kShardTokens);
    std::copy(norm2.begin(), norm2.end(), layers_[layer].residual.begin() + row);
  }
  /// Writes the first `tokens` rows to `path`. The buffer is then unusable. Returns the XXH3-64.
  std::string write(const std::filesystem::path& path, std::uint32_t tokens,
                    const std::map<std::string, std::string>& metadata) {
    const std::size_t n = tokens, heads = shape_.query_heads, kv_heads = shape_.kv_heads,
                      size = shape_.head_size;
    const auto sources = check_sources(tokens);
    std::array<std::int32_t, kCheckRows> rows{};
    for (std::size_t i = 0; i < kCheckRows; ++i)
      rows[i] = static_cast<std::int32_t>(first_ + sources[i].row);
    std::vector<TensorToWrite> tensors{
        {std::string(kCheckRowsTensor), Dtype::i32, {kCheckRows}, std::as_bytes(std::span(rows))}};
    std::vector<std::vector<float>> kept;
    kept.reserve(2 * layers_.size());
    const auto keep = [&](const std::vector<float>& slots, std::size_t width) {
      kept.push_back(select_slots(slots, shape_.query_heads, width, sources));
      return std::as_bytes(std::span(kept.back()));
    };
    for (std::uint32_t index = 0; index < shape_.layers; ++index) {
      const std::uint32_t l = shape_.number(index);
      Layer& layer = layers_[index];
      tensors.push_back({layer_tensor(l, "q"),
                         shape_.dtype,
                         {heads, n, size},
                         compact(layer.q, shape_.query_heads, tokens)});
      tensors.push_back({layer_tensor(l, "k"),
                         shape_.dtype,
                         {kv_heads, n, size},
                         compact(layer.k, shape_.kv_heads, tokens)});
      tensors.push_back({layer_tensor(l, "v"),
                         shape_.dtype,
                         {kv_heads, n, size},
                         compact(layer.v, shape_.kv_heads, tokens)});
      for (const TensorToWrite& tensor : std::span(tensors).last(3))
        refuse_not_finite(path, tensor, first_);
      tensors.push_back({layer_tensor(l, "check_out"),
                         Dtype::f32,
                         {heads, kCheckRows, size},
                         keep(layer.out, size)});
      if (!layer.residual.empty())
        tensors.push_back({layer_tensor(l, kResidualTensor),
                           Dtype::f32,
                           {n},
                           std::as_bytes(std::span(layer.residual).first(n))});
      if (!layer.lse.empty())
        tensors.push_back(
            {layer_tensor(l, "check_lse"), Dtype::f32, {heads, kCheckRows}, keep(layer.lse, 1)});
    }
    return write_safetensors(path, tensors, metadata);
  }

 private:
  using Bytes = std::unique_ptr<std::byte[]>;
  struct Layer {
    Bytes q, k, v;  // [head, 1024, head_size]
    // [query_heads, 16 + 1, head_size]: the check rows, and in slot 16 the latest row.
    std::vector<float> out;
    std::vector<float> lse;       // [query_heads, 16 + 1], or empty
    std::vector<float> residual;  // [1024], or empty
  };

  void put_heads(std::byte* to, std::uint32_t heads, std::uint32_t row, std::uint32_t count,
                 std::span<const float> from) const {
    const std::size_t size = shape_.head_size, row_bytes = size * bytes_of(shape_.dtype);
    for (std::size_t i = 0; i < count; ++i)
      for (std::size_t h = 0; h < heads; ++h)
        from_float(shape_.dtype, from.data() + (i * heads + h) * size, size,
                   to + (h * kShardTokens + row + i) * row_bytes);
  }
  void keep_check_row(Layer& layer, std::uint32_t slot, std::uint32_t index,
                      const LayerRows& rows) {
    const std::size_t heads = shape_.query_heads, size = shape_.head_size;
    for (std::size_t h = 0; h < heads; ++h) {
      std::copy_n(rows.out.data() + (index * heads + h) * size, size,
                  layer.out.data() + (h * kSlots + slot) * size);
      if (!rows.lse.empty()) layer.lse[h * kSlots + slot] = rows.lse[index * heads + h];
    }
  }
  /// Removes the unused rows between the heads of a short shard: [heads, 1024, head_size] to
  /// [heads, tokens, head_size].
  std::span<const std::byte> compact(Bytes& bytes, std::uint32_t heads,
                                     std::uint32_t tokens) const {
    const std::size_t row_bytes = shape_.head_size * bytes_of(shape_.dtype);
    const std::size_t head_bytes = tokens * row_bytes;
    if (tokens < kShardTokens)
      for (std::size_t h = 1; h < heads; ++h)
        std::memmove(bytes.get() + h * head_bytes, bytes.get() + h * kShardTokens * row_bytes,
                     head_bytes);
    return {bytes.get(), heads * head_bytes};
  }

  ModelShape shape_;
  std::uint32_t first_;
  std::vector<Layer> layers_;
};

namespace fs = std::filesystem;

/// Empties the folder if it was left by a capture that was killed before its first shard. Returns
/// whether it was.
bool take_unbegun(const fs::path& directory) {
  if (!is_unbegun_trace(directory)) return false;
  std::vector<fs::path> left;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory))
    left.push_back(entry.path());
  for (const fs::path& path : left) fs::remove(path);
  return true;
}

/// Creates the folder. Returns false if it existed before.
bool make_directory(const fs::path& directory) {
  std::error_code error;
  const bool is_new = fs::create_directory(directory, error);
  if (error)
    throw std::runtime_error(
        fmt::format("{}: cannot create the folder: {}", directory.string(), error.message()));
  if (is_new) sync_folder_of(directory);
  return is_new;
}

void require(bool condition, std::string_view text) {
  if (!condition) throw std::logic_error(fmt::format("trace writer: {}", text));
}

}  // namespace

bool is_unbegun_trace(const fs::path& directory) {
  if (!fs::is_directory(fs::symlink_status(directory))) return false;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename(), whole = finished_name(name);
    const bool is_part = whole != name;
    if (whole != kTokensFile && whole != kSketchFile && !(is_part && whole == shard_name(0)))
      return false;
  }
  return true;
}

class TraceWriter::Impl {
 public:
  Impl(fs::path directory, TraceHeader header)
      : directory_(std::move(directory)), header_(std::move(header)) {
    header_.simplify();
    check_header(header_);
    made_ = make_directory(directory_);
    lock_.emplace(directory_, O_RDONLY | O_DIRECTORY);
    lock_->require(fmt::format("{}: another trace is being written there; give another directory",
                               directory_.string()));
    if (!made_ && !take_unbegun(directory_))
      throw std::runtime_error(
          fmt::format("{}: exists already; give a new directory", directory_.string()));
  }

  ~Impl() {
    std::error_code ignored;
    // Keeps the ids if the folder contains a shard. Also looks for the first shard's file, because
    // after an error shards_ may lack a shard that has been written.
    if (!shards_.empty() || fs::exists(directory_ / shard_name(0), ignored)) return;
    fs::remove(directory_ / kTokensFile, ignored);
    fs::remove(directory_ / kSketchFile, ignored);
    if (made_) fs::remove(directory_, ignored);  // only if empty
  }

  void begin(std::span<const std::int32_t> ids, SegmentKind kind, bool new_segment) {
    require(state_ == State::ready, "begin() was called inside an append, or after the end");
    require(!ids.empty(), "begin() was called without tokens");
    if (ids.size() > kMaxTraceTokens - tokens())
      throw std::runtime_error(
          fmt::format("{}: a trace holds at most {} tokens", directory_.string(), kMaxTraceTokens));
    for (const std::int32_t id : ids) require(id >= 0, "a negative token id");
    const auto count = static_cast<std::uint32_t>(ids.size());
    if (segments_.empty() || segments_.back().kind != kind || new_segment)
      segments_.push_back({tokens(), 0, kind});
    segments_.back().tokens += count;
    append_ = tokens();
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    arrived_.assign(header_.shape.layers, false);
    residuals_.assign(header_.shape.layers, false);
    state_ = State::appending;
    while (first_open() + buffers_.size() * std::size_t{kShardTokens} < ids_.size())
      buffers_.emplace_back(
          header_.shape, first_open() + static_cast<std::uint32_t>(buffers_.size()) * kShardTokens);
  }

  void layer(std::uint32_t index, const LayerRows& rows) {
    require(state_ == State::appending, "layer() was called outside an append");
    require(index < header_.shape.layers && !arrived_[index],
            "layer() was called for an unexpected layer");
    check_sizes(rows);
    arrived_[index] = true;
    by_shard([&](ShardBuffer& buffer, std::uint32_t row, std::uint32_t first, std::uint32_t count) {
      buffer.put(index, row, count, rows.slice(header_.shape, first, count));
    });
  }

  void residual(std::uint32_t index, std::span<const float> norm2) {
    require(state_ == State::appending, "residual() was called outside an append");
    require(index < header_.shape.layers && !residuals_[index],
            "residual() was called for an unexpected layer");
    require(norm2.size() == tokens() - append_,
            "residual() got a different number of tokens than begin()");
    residuals_[index] = true;
    by_shard([&](ShardBuffer& buffer, std::uint32_t row, std::uint32_t first, std::uint32_t count) {
      buffer.put_residual(index, row, norm2.subspan(first, count));
    });
  }

  void sketch(const OutputSketch& sketch) {
    require(state_ == State::ready && ids_.empty(), "sketch() was called after the first append");
    extras_.sketch = write_sketch(directory_, header_.shape, sketch);
  }

  void end() {
    require(state_ == State::appending, "end() was called outside an append");
    require(std::find(arrived_.begin(), arrived_.end(), false) == arrived_.end(),
            "end() was called before every layer was written");
    const auto residuals =
        static_cast<std::size_t>(std::count(residuals_.begin(), residuals_.end(), true));
    require(residuals == 0 || residuals == residuals_.size(),
            "residual() was called for some layers only");
    if (append_ == 0) extras_.residual_norm2 = residuals > 0;
    require(extras_.residual_norm2 == (residuals > 0),
            "residual() was called for some tokens only");
    state_ = State::failed;  // changes back only if all shards are sealed
    while (!buffers_.empty() && tokens() - first_open() >= kShardTokens) seal(kShardTokens);
    state_ = State::ready;
  }

  void finish() {
    require(state_ == State::ready && !ids_.empty(),
            "finish() was called inside an append, or before any tokens were written");
    state_ = State::failed;
    if (!buffers_.empty()) seal(tokens() - first_open());
    const Manifest manifest{header_,      tokens(), prompt_tokens_of(segments_), segments_, shards_,
                            tokens_xxh3_, extras_};
    write_file_atomically(directory_ / kManifestFile, manifest_text(manifest));
    state_ = State::finished;
  }

  std::uint32_t tokens() const { return static_cast<std::uint32_t>(ids_.size()); }

 private:
  enum class State { ready, appending, failed, finished };

  /// Position of the first token that is not in a sealed shard.
  std::uint32_t first_open() const {
    return static_cast<std::uint32_t>(shards_.size()) * kShardTokens;
  }

  /// Calls put(buffer, row in the buffer, first, count) for each part of the announced tokens that
  /// lies in one shard.
  template <class Put>
  void by_shard(Put put) {
    for (std::uint32_t position = append_; position < tokens();) {
      const std::uint32_t row = position % kShardTokens;
      const std::uint32_t count = std::min(kShardTokens - row, tokens() - position);
      put(buffers_[(position - first_open()) / kShardTokens], row, position - append_, count);
      position += count;
    }
  }

  void check_sizes(const LayerRows& rows) {
    const std::size_t n = tokens() - append_, size = header_.shape.head_size;
    const std::size_t queries = n * header_.shape.query_heads, keys = n * header_.shape.kv_heads;
    require(rows.q.size() == queries * size && rows.k.size() == keys * size &&
                rows.v.size() == keys * size && rows.out.size() == queries * size &&
                (rows.lse.empty() || rows.lse.size() == queries),
            "a layer's tensors do not have the number of tokens given to begin()");
    if (!lse_known_) has_lse_ = !rows.lse.empty();
    lse_known_ = true;
    require(has_lse_ == !rows.lse.empty(), "lse was given for some layers only");
  }

  /// Seals the oldest open shard. Writes the ids first, so that every shard on the disk has its ids
  /// even if the process is killed.
  void seal(std::uint32_t count) {
    const std::uint32_t first = first_open(), end = first + count;
    tokens_xxh3_ = write_tokens(directory_, std::span(ids_).first(end), header_);
    const auto metadata = shard_metadata({header_, clip(segments_, end), first, count});
    const std::string name = shard_name(shards_.size());
    const std::string hash = buffers_.front().write(directory_ / name, count, metadata);
    buffers_.pop_front();
    shards_.push_back({name, first, count, hash});
  }

  fs::path directory_;
  bool made_ = false;             // directory_ is new
  std::optional<FileLock> lock_;  // so that only one of two writers continues
  TraceHeader header_;
  State state_ = State::ready;
  std::vector<std::int32_t> ids_;
  std::vector<Segment> segments_;
  std::uint32_t append_ = 0;               // position of the first token of the latest begin()
  std::vector<bool> arrived_, residuals_;  // by layer
  bool lse_known_ = false, has_lse_ = false;
  std::deque<ShardBuffer> buffers_;  // shards that are not sealed, oldest first
  std::vector<ShardInfo> shards_;    // the sealed shards
  std::string tokens_xxh3_;
  TraceExtras extras_;
};

TraceWriter::TraceWriter(fs::path directory, TraceHeader header)
    : impl_(std::make_unique<Impl>(std::move(directory), std::move(header))) {}
TraceWriter::~TraceWriter() = default;
TraceWriter::TraceWriter(TraceWriter&&) noexcept = default;

void TraceWriter::begin(std::span<const std::int32_t> ids, SegmentKind kind, bool new_segment) {
  impl_->begin(ids, kind, new_segment);
}
void TraceWriter::layer(std::uint32_t index, std::span<const float> q, std::span<const float> k,
                        std::span<const float> v, std::span<const float> out,
                        std::span<const float> lse) {
  impl_->layer(index, {q, k, v, out, lse});
}
void TraceWriter::residual(std::uint32_t index, std::span<const float> norm2) {
  impl_->residual(index, norm2);
}
void TraceWriter::sketch(const OutputSketch& sketch) { impl_->sketch(sketch); }
void TraceWriter::end() { impl_->end(); }
void TraceWriter::finish() { impl_->finish(); }
std::uint32_t TraceWriter::tokens() const { return impl_->tokens(); }

namespace {

namespace fs = std::filesystem;

/// The complete shards that an interrupted capture left, and their description of the trace.
struct Rescued {
  std::vector<ShardInfo> shards;
  ShardMetadata last;
  bool has_residuals = false;  ///< whether the first shard has residual norms

  std::uint32_t tokens() const { return last.first + last.tokens; }
};

Rescued rescue_shards(const fs::path& directory) {
  Rescued rescued;
  for (;;) {
    const std::size_t index = rescued.shards.size();
    const fs::path path = directory / shard_name(index);
    const bool ended = index > 0 && rescued.last.tokens < kShardTokens;
    if (ended || !fs::exists(path)) break;
    const auto file = SafetensorsFile::open(path);
    ShardMetadata metadata = parse_shard_metadata(file);
    if (metadata.first != index * kShardTokens)
      throw std::runtime_error(
          fmt::format("{}: begins with token {}, but should begin with token {}", path.string(),
                      metadata.first, index * kShardTokens));
    if (index > 0 && !same_description(metadata.header, rescued.last.header))
      throw std::runtime_error(
          fmt::format("{}: model or config differ from the shard before it", path.string()));
    rescued.shards.push_back(
        {shard_name(index), metadata.first, metadata.tokens, xxh3_hex(file.bytes())});
    rescued.last = std::move(metadata);
    if (index == 0)
      rescued.has_residuals =
          file.contains(layer_tensor(rescued.last.header.shape.number(0), kResidualTensor));
  }
  if (rescued.shards.empty())
    throw std::runtime_error(
        fmt::format("{}: no complete shard to keep (a shard has {} tokens); capture it again",
                    directory.string(), kShardTokens));
  return rescued;
}

void remove_parts(const fs::path& directory) {
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    const bool ours = name.starts_with("shard-") || name.starts_with(kTokensFile) ||
                      name.starts_with(kSketchFile) || name.starts_with(kManifestFile) ||
                      name.starts_with("grad-") || name.starts_with("column-") ||
                      name.starts_with(kSelectedFile);
    if (ours && name.ends_with(".part")) fs::remove(entry.path());
  }
}

/// The sketch that the capture left, for the manifest of the sealed trace.
TraceExtras::Sketch rescued_sketch(const fs::path& directory, const ModelShape& shape) {
  const auto file = SafetensorsFile::open(directory / kSketchFile);
  if (!file.metadata().contains("seed"))
    throw std::runtime_error(fmt::format("{}: __metadata__ has no seed, which the manifest needs",
                                         file.path().string()));
  return {check_sketch(file, shape), xxh3_hex(file.bytes())};
}

}  // namespace

std::uint32_t seal_trace(const fs::path& directory) {
  if (!fs::is_directory(directory))
    throw std::runtime_error(fmt::format("{}: no such directory", directory.string()));
  if (fs::exists(directory / kManifestFile))
    throw std::runtime_error(fmt::format(
        "{}: the trace is finished already (it has a manifest.json)", directory.string()));
  Rescued rescued = rescue_shards(directory);
  const std::uint32_t tokens = rescued.tokens();
  Manifest manifest;
  manifest.header = std::move(rescued.last.header);
  manifest.tokens = tokens;
  manifest.segments = std::move(rescued.last.segments);
  manifest.prompt_tokens = prompt_tokens_of(manifest.segments);
  manifest.shards = std::move(rescued.shards);
  manifest.header.passages = clip(manifest.header.passages, tokens);
  manifest.extras.residual_norm2 = rescued.has_residuals;
  if (fs::exists(directory / kSketchFile))
    manifest.extras.sketch = rescued_sketch(directory, manifest.header.shape);
  // All checks that may refuse the trace come before the first write.
  const TraceReader trace =
      TraceReader::assemble(directory, manifest, TraceReader::Ids::maybe_more);
  manifest.tokens_xxh3 = xxh3_hex(trace.tokens_file().bytes());
  parse_manifest(manifest_text(manifest), (directory / kManifestFile).string());
  manifest.tokens_xxh3 = write_tokens(directory, trace.ids(), trace.header());
  remove_parts(directory);
  write_file_atomically(directory / kManifestFile, manifest_text(manifest));
  return tokens;
}

}  // namespace kvlab
