// A trace: the queries, keys and values of one sequence, as a decoder computed them. See
// docs/reference/trace-format.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "traces/base/json_value.hpp"
#include "traces/base/numeric/rope.hpp"
#include "traces/base/safetensors.hpp"
#include "traces/extras.hpp"
#include "traces/row_spec.hpp"

namespace kvlab {

inline constexpr int kTraceFormat =
    3;  ///< 1, without extras and passages, and 2, without rows, too
inline constexpr std::uint32_t kShardTokens = 1024;
inline constexpr std::uint32_t kCheckRows = 16;

/// The attention shape of a model, and its dtype. Layers are those that have a KV cache.
struct ModelShape {
  std::uint32_t layers = 0, query_heads = 0, kv_heads = 0, head_size = 0;
  Dtype dtype = Dtype::f32;  ///< of q, k and v in the trace
  /// What the model calls its layers, ascending; empty: 0, 1, 2, … Names and metrics have these.
  std::vector<std::uint32_t> numbers = {};

  std::uint32_t number(std::uint32_t layer) const {
    return numbers.empty() ? layer : numbers[layer];
  }
  /// Which layer has this number; `layers`: none.
  std::uint32_t layer_of(std::uint32_t number) const;
  /// 0 to 31, or 3, 7, 11: what may be requested.
  std::string numbers_text() const;

  std::uint32_t group() const { return query_heads / kv_heads; }
  bool operator==(const ModelShape&) const = default;
};

/// Whether q and k were rounded to the model's dtype after RoPE at original positions.
enum class Rounding { model_dtype, none };
std::string_view name_of(Rounding rounding);

enum class SegmentKind { prompt, decode };
std::string_view name_of(SegmentKind kind);
struct Segment {
  std::uint32_t start, tokens;
  SegmentKind kind;
  bool operator==(const Segment&) const = default;
};

/// All of a trace but its tensors.
struct TraceHeader {
  std::string model;  ///< name
  ModelShape shape;
  Rope rope;              ///< written as data: inv_freq, factor
  JsonValue rope_config;  ///< type and parameters, for people
  float softmax_scale = 0;
  std::vector<RowSpec> rows;  ///< by layer; empty: `rope` and `softmax_scale` say all
  Rounding rounding = Rounding::none;
  std::string weights_xxh3, tokenizer_xxh3;  ///< 16 hex digits, or empty
  JsonValue capture;                         ///< {"engine", "version", "device", "options"}
  std::vector<Passage> passages;

  RowSpec row(std::uint32_t layer) const;
  int format() const { return rows.empty() ? 2 : 3; }  ///< that a writer needs
  /// The least that says the same: rows only where some layer needs one.
  void simplify();
};

enum class Part { q, k, v };

/// What manifest.json holds. Of the header, `rope` and `softmax_scale` are in tokens.safetensors.
struct Manifest {
  TraceHeader header;
  std::uint32_t tokens = 0, prompt_tokens = 0;
  std::vector<Segment> segments;
  std::vector<ShardInfo> shards;
  std::string tokens_xxh3;
  TraceExtras extras;
};

/// Opens a finished trace; memory-mapped, no copy.
class TraceReader {
 public:
  /// Checks the manifest, every shard's header, shapes and dtypes; not the checksums.
  /// Throws std::runtime_error that names the file, what is wrong and what would be right: a
  /// missing manifest (unfinished: `kvlab trace seal`), a later format, a missing or wrong shard, …
  static TraceReader open(const std::filesystem::path& directory);

  const std::filesystem::path& directory() const { return directory_; }
  const TraceHeader& header() const { return manifest_.header; }
  const ModelShape& shape() const { return header().shape; }
  /// The same trace as if it had these layers alone, ascending; they keep their numbers.
  TraceReader of_layers(std::span<const std::uint32_t> layers) const;
  /// Layers with a window, or those without: policies act on the latter.
  std::vector<std::uint32_t> layers_with_window(bool with) const;
  /// How a layer's queries attend.
  const RowSpec& row(std::uint32_t layer) const {
    return header().rows.empty() ? plain_row_ : header().rows[layer];
  }
  std::uint32_t tokens() const { return manifest_.tokens; }
  std::uint32_t prompt_tokens() const { return manifest_.prompt_tokens; }
  const std::vector<Segment>& segments() const { return manifest_.segments; }
  const std::vector<ShardInfo>& shards() const { return manifest_.shards; }
  const std::vector<std::int32_t>& ids() const { return ids_; }  // [tokens]
  /// XXH3-64 of the manifest: what a run records of its traces.
  const std::string& hash() const { return hash_; }

  /// Tokens [first, first + count) of one head, widened to float32: to [count, head_size].
  void read(Part part, std::uint32_t layer, std::uint32_t head, std::uint32_t first,
            std::uint32_t count, float* to) const;

  /// The rows of shard `index` that the decoder itself computed.
  struct CheckRows {
    std::vector<std::uint32_t> rows;  // [16], absolute positions
    std::vector<float> out;           // [query_heads, 16, head_size]
    std::vector<float> lse;           // [query_heads, 16], or empty
  };
  CheckRows check_rows(std::size_t index, std::uint32_t layer) const;
  const TraceExtras& extras() const { return manifest_.extras; }
  /// Squared norms of the residual stream after a layer's attention output was added, to [tokens].
  /// Throws std::logic_error where the trace has none.
  void residual_norm2(std::uint32_t layer, float* to) const;
  /// The first `columns` of the sketch of W_o for the query heads of a KV head, scaled to be a
  /// sketch by themselves: [group, head_size, columns]. Throws std::logic_error likewise.
  std::vector<float> sketch(std::uint32_t layer, std::uint32_t kv_head,
                            std::uint32_t columns) const;
  /// What can be said of `residual_error`: both extras are there.
  bool has_residuals() const { return extras().residual_norm2 && extras().sketch; }
  /// Gradient samples; 0: the trace has none.
  std::uint32_t gradient_samples() const {
    return extras().gradients ? extras().gradients->gradient_samples : 0;
  }
  /// Those that serve a replay over `queries`; 0 also where the gradients are of other queries:
  /// from the first of `queries` on, both have to be the same. (A gradient at a query knows of no
  /// earlier ones. So those of all queries serve the one answer to a prompt.)
  std::uint32_t gradient_samples(Queries queries) const;
  /// One gradient sample's gradient with respect to a query head's output before the output
  /// projection, at `positions`: each [head_size], `stride` floats behind the one before. Throws
  /// std::logic_error where the trace has none.
  void gradient(std::uint32_t layer, std::uint32_t query_head, std::uint32_t gradient_sample,
                std::span<const std::uint32_t> positions, float* to, std::size_t stride) const;
  bool has_feature(std::string_view name) const;
  /// A feature of a KV head, to [tokens]. Throws std::logic_error where the trace has it not.
  void feature(std::string_view name, std::uint32_t layer, std::uint32_t kv_head, float* to) const;
  std::span<const SafetensorsFile> feature_files() const { return feature_files_; }
  std::span<const SafetensorsFile> gradient_files() const { return gradient_files_; }
  const SafetensorsFile* sketch_file() const { return sketch_file_ ? &*sketch_file_ : nullptr; }
  const SafetensorsFile& shard_file(std::size_t index) const { return files_[index]; }
  /// Lets go of the shards' pages that have been read (MappedFile::release).
  void release() const {
    for (const SafetensorsFile& file : files_) file.release();
    for (const SafetensorsFile& file : gradient_files_) file.release();
    for (const SafetensorsFile& file : feature_files_) file.release();
  }
  const SafetensorsFile& tokens_file() const { return tokens_file_; }
  const std::string& tokens_xxh3() const { return manifest_.tokens_xxh3; }

 private:
  friend std::uint32_t seal_trace(const std::filesystem::path& directory);
  /// Whether tokens.safetensors may have more ids than the manifest has tokens: seal_trace() cuts
  /// them.
  enum class Ids { as_many_as_tokens, maybe_more };
  /// All of open() but reading the manifest.
  static TraceReader assemble(const std::filesystem::path& directory, Manifest manifest,
                              Ids ids = Ids::as_many_as_tokens);
  void open_extras();

  std::filesystem::path directory_;
  Manifest manifest_;  // and of tokens.safetensors what belongs to its header
  std::vector<std::int32_t> ids_;
  RowSpec plain_row_;                   // of all layers, where the header has no rows
  std::vector<SafetensorsFile> files_;  // by shard
  SafetensorsFile tokens_file_;
  std::optional<SafetensorsFile> sketch_file_;
  std::vector<SafetensorsFile> gradient_files_;  // by shard, or none
  std::vector<float> gradient_scales_;           // likewise
  std::vector<SafetensorsFile> feature_files_;   // as extras().features
  std::string hash_;
};

/// What `trace verify` found.
struct TraceCheck {
  bool ok = true;
  std::vector<std::string> problems;  ///< one line each, naming the shard, layer and head
  double worst_out = 0,
         worst_lse = 0;  ///< largest errors of the sampled rows, see docs/reference/trace-format.md
  double tolerance = 0;  ///< what both may be at most
  std::uint64_t rows = 0;  ///< sampled rows x query heads x layers compared
};

/// Checks every shard's XXH3-64 and recomputes the sampled rows from q, k and v.
TraceCheck verify_trace(const TraceReader& trace, unsigned threads);

/// Opens a trace and throws std::runtime_error, the first problem found, unless it verifies.
TraceReader open_verified_trace(const std::filesystem::path& directory, unsigned threads);

/// Makes a killed capture a shorter, valid trace: keeps the whole sealed shards from the first on,
/// removes .part files, writes the manifest. Returns the tokens kept. The capture must have ended.
/// Throws std::runtime_error if there is no whole shard, if one is damaged, or if the trace is
/// finished already.
std::uint32_t seal_trace(const std::filesystem::path& directory);

/// Writes a trace as a decoder computes it. Each shard is sealed when its last layer has arrived.
class TraceWriter {
 public:
  /// Creates the directory. Throws std::runtime_error if it exists or cannot be made, and
  /// std::invalid_argument for a header that no reader would accept. A null rope_config or capture
  /// stands for {"rope_type": "default"} and {}. Format 3 is written only where rows need it.
  TraceWriter(std::filesystem::path directory, TraceHeader header);
  /// Unfinished: leaves the sealed shards (for `trace seal`), or nothing at all if there are none.
  ~TraceWriter();
  TraceWriter(TraceWriter&&) noexcept;

  /// Announces the next tokens, all of one kind; contiguous decode appends become one segment,
  /// and so do the chunks of a prompt unless `new_segment` says that another turn begins.
  void begin(std::span<const std::int32_t> ids, SegmentKind kind, bool new_segment = false);
  /// What one layer computed for the tokens announced last, n of them, before RoPE:
  /// q [n, query_heads, head_size], k and v [n, kv_heads, head_size], out [n, query_heads,
  /// head_size] (attention output before the output projection), lse [n, query_heads] natural
  /// logarithm, or empty if the decoder cannot tell (then always). Layers may come in any order.
  void layer(std::uint32_t index, std::span<const float> q, std::span<const float> k,
             std::span<const float> v, std::span<const float> out, std::span<const float> lse);
  /// Squared norms [n] of the residual stream after that layer's attention output was added: for
  /// every layer of every append, or for none.
  void residual(std::uint32_t index, std::span<const float> norm2);
  /// Before the first append; of the model that is captured.
  void sketch(const OutputSketch& sketch);
  /// All layers of the announced tokens have arrived: seals what is full. Throws std::runtime_error
  /// if a file cannot be written (a full disk, say); the writer is of no more use then.
  void end();
  /// Seals the last shard, writes the manifest.
  void finish();
  std::uint32_t tokens() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvlab
