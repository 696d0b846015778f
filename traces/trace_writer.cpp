#include <fcntl.h>
#include <fmt/core.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "traces/base/files.hpp"
#include "traces/manifest.hpp"
#include "traces/shard.hpp"
#include "traces/shard_buffer.hpp"
#include "traces/trace.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

/// Empties the folder of a capture that was killed before its first shard. Whether it is one.
bool take_unbegun(const fs::path& directory) {
  if (!is_unbegun_trace(directory)) return false;
  std::vector<fs::path> left;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory))
    left.push_back(entry.path());
  for (const fs::path& path : left) fs::remove(path);
  return true;
}

/// Makes the folder. Returns whether it was not there.
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
    lock_->require(fmt::format("{}: another trace is being written there; name another folder",
                               directory_.string()));
    if (!made_ && !take_unbegun(directory_))
      throw std::runtime_error(
          fmt::format("{}: exists already; a new folder is expected", directory_.string()));
  }

  ~Impl() {
    std::error_code ignored;
    // (Also one that was renamed before an error; it needs the ids.)
    if (!shards_.empty() || fs::exists(directory_ / shard_name(0), ignored)) return;
    fs::remove(directory_ / kTokensFile, ignored);
    fs::remove(directory_ / kSketchFile, ignored);
    if (made_) fs::remove(directory_, ignored);  // only if empty
  }

  void begin(std::span<const std::int32_t> ids, SegmentKind kind, bool new_segment) {
    require(state_ == State::ready, "begin() inside an admission, or after the end");
    require(!ids.empty(), "an admission without tokens");
    if (ids.size() > kMaxTraceTokens - tokens())
      throw std::runtime_error(
          fmt::format("{}: a trace holds at most {} tokens", directory_.string(), kMaxTraceTokens));
    for (const std::int32_t id : ids) require(id >= 0, "a negative token id");
    const auto count = static_cast<std::uint32_t>(ids.size());
    if (segments_.empty() || segments_.back().kind != kind || new_segment)
      segments_.push_back({tokens(), 0, kind});
    segments_.back().tokens += count;
    admission_ = tokens();
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    arrived_.assign(header_.shape.layers, false);
    residuals_.assign(header_.shape.layers, false);
    state_ = State::admitting;
    while (first_open() + buffers_.size() * std::size_t{kShardTokens} < ids_.size())
      buffers_.emplace_back(
          header_.shape, first_open() + static_cast<std::uint32_t>(buffers_.size()) * kShardTokens);
  }

  void layer(std::uint32_t index, const LayerRows& rows) {
    require(state_ == State::admitting, "layer() outside an admission");
    require(index < header_.shape.layers && !arrived_[index], "a layer that is not expected");
    check_sizes(rows);
    arrived_[index] = true;
    by_shard([&](ShardBuffer& buffer, std::uint32_t row, std::uint32_t first, std::uint32_t count) {
      buffer.put(index, row, count, rows.slice(header_.shape, first, count));
    });
  }

  void residual(std::uint32_t index, std::span<const float> norm2) {
    require(state_ == State::admitting, "residual() outside an admission");
    require(index < header_.shape.layers && !residuals_[index], "residuals that are not expected");
    require(norm2.size() == tokens() - admission_, "residuals of other tokens than were announced");
    residuals_[index] = true;
    by_shard([&](ShardBuffer& buffer, std::uint32_t row, std::uint32_t first, std::uint32_t count) {
      buffer.put_residual(index, row, norm2.subspan(first, count));
    });
  }

  void sketch(const OutputSketch& sketch) {
    require(state_ == State::ready && ids_.empty(), "sketch() after the first admission");
    extras_.sketch = write_sketch(directory_, header_.shape, sketch);
  }

  void end() {
    require(state_ == State::admitting, "end() outside an admission");
    require(std::find(arrived_.begin(), arrived_.end(), false) == arrived_.end(),
            "end() before every layer arrived");
    const auto residuals =
        static_cast<std::size_t>(std::count(residuals_.begin(), residuals_.end(), true));
    require(residuals == 0 || residuals == residuals_.size(),
            "residuals given for some layers only");
    if (admission_ == 0) extras_.residual_norm2 = residuals > 0;
    require(extras_.residual_norm2 == (residuals > 0), "residuals given for some tokens only");
    state_ = State::failed;  // unless all is sealed
    while (!buffers_.empty() && tokens() - first_open() >= kShardTokens) seal(kShardTokens);
    state_ = State::ready;
  }

  void finish() {
    require(state_ == State::ready && !ids_.empty(),
            "finish() inside an admission, or without tokens");
    state_ = State::failed;
    if (!buffers_.empty()) seal(tokens() - first_open());
    const Manifest manifest{header_,      tokens(), prompt_tokens_of(segments_), segments_, shards_,
                            tokens_xxh3_, extras_};
    write_file_atomically(directory_ / kManifestFile, manifest_text(manifest));
    state_ = State::finished;
  }

  std::uint32_t tokens() const { return static_cast<std::uint32_t>(ids_.size()); }

 private:
  enum class State { ready, admitting, failed, finished };

  /// Position of the first token that is in no sealed shard.
  std::uint32_t first_open() const {
    return static_cast<std::uint32_t>(shards_.size()) * kShardTokens;
  }

  /// Calls put(buffer, row of it, first, count) for each part of the announced tokens.
  template <class Put>
  void by_shard(Put put) {
    for (std::uint32_t position = admission_; position < tokens();) {
      const std::uint32_t row = position % kShardTokens;
      const std::uint32_t count = std::min(kShardTokens - row, tokens() - position);
      put(buffers_[(position - first_open()) / kShardTokens], row, position - admission_, count);
      position += count;
    }
  }

  void check_sizes(const LayerRows& rows) {
    const std::size_t n = tokens() - admission_, size = header_.shape.head_size;
    const std::size_t queries = n * header_.shape.query_heads, keys = n * header_.shape.kv_heads;
    require(rows.q.size() == queries * size && rows.k.size() == keys * size &&
                rows.v.size() == keys * size && rows.out.size() == queries * size &&
                (rows.lse.empty() || rows.lse.size() == queries),
            "a layer's tensors do not have the sizes of the announced tokens");
    if (!lse_known_) has_lse_ = !rows.lse.empty();
    lse_known_ = true;
    require(has_lse_ == !rows.lse.empty(), "lse given for some layers only");
  }

  /// Seals the oldest open shard. The ids go first: whatever shards a kill leaves, their ids are
  /// there.
  void seal(std::uint32_t count) {
    const std::uint32_t first = first_open(), end = first + count;
    tokens_xxh3_ = write_tokens(directory_, std::span(ids_).first(end), header_);
    const auto metadata = shard_metadata({header_, clipped(segments_, end), first, count});
    const std::string name = shard_name(shards_.size());
    const std::string hash = buffers_.front().write(directory_ / name, count, metadata);
    buffers_.pop_front();
    shards_.push_back({name, first, count, hash});
  }

  fs::path directory_;
  bool made_ = false;             // directory_ was not there
  std::optional<FileLock> lock_;  // of two writers one goes on
  TraceHeader header_;
  State state_ = State::ready;
  std::vector<std::int32_t> ids_;
  std::vector<Segment> segments_;
  std::uint32_t admission_ = 0;            // position of the first token announced last
  std::vector<bool> arrived_, residuals_;  // by layer
  bool lse_known_ = false, has_lse_ = false;
  std::deque<ShardBuffer> buffers_;  // the shards that are not sealed, oldest first
  std::vector<ShardInfo> shards_;    // the sealed ones
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

}  // namespace kvlab
