// A trace: the queries, keys and values of one sequence, as a decoder computed them. See
// docs/reference/trace-format.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
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

/// The latest trace format. kvlab also reads format 1, without extras and passages, and format 2,
/// without rows.
inline constexpr int kTraceFormat = 3;
inline constexpr std::uint32_t kShardTokens = 1024;
inline constexpr std::uint32_t kCheckRows = 16;

/// The attention shape of a model, and its dtype. Only layers with a KV cache count.
struct ModelShape {
  std::uint32_t layers = 0, query_heads = 0, kv_heads = 0, head_size = 0;
  Dtype dtype = Dtype::f32;  ///< dtype of q, k and v in the trace
  /// The model's layer numbers, ascending; empty: 0, 1, 2, … Tensor names and metrics use these.
  std::vector<std::uint32_t> numbers = {};

  std::uint32_t number(std::uint32_t layer) const {
    return numbers.empty() ? layer : numbers[layer];
  }
  /// The layer with this number; `layers` if there is none.
  std::uint32_t layer_of(std::uint32_t number) const;
  /// The layer numbers as text, such as "0 to 31" or "3, 7, 11", for messages.
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

/// A trace without its tensors.
struct TraceHeader {
  std::string model;  ///< name
  ModelShape shape;
  Rope rope;              ///< stored as data: inv_freq, factor
  JsonValue rope_config;  ///< type and parameters, for information only
  float softmax_scale = 0;
  std::vector<RowSpec> rows;  ///< by layer; empty: all layers use `rope` and `softmax_scale`
  Rounding rounding = Rounding::none;
  std::string weights_xxh3, tokenizer_xxh3;  ///< 16 hex digits, or empty
  JsonValue capture;                         ///< {"engine", "version", "device", "options"}
  std::vector<Passage> passages;

  RowSpec row(std::uint32_t layer) const;
  /// The lowest format that can store this header.
  int format() const { return rows.empty() ? 2 : 3; }
  /// Removes rows if no layer needs them.
  void simplify();
};

enum class Part { q, k, v };

/// The content of manifest.json. Its header's `rope` and `softmax_scale` are stored in
/// tokens.safetensors.
struct Manifest {
  TraceHeader header;
  std::uint32_t tokens = 0, prompt_tokens = 0;
  std::vector<Segment> segments;
  std::vector<ShardInfo> shards;
  std::string tokens_xxh3;
  TraceExtras extras;
};

/// A finished trace. Its files are memory-mapped and not copied.
class TraceReader {
 public:
  /// Checks the manifest and every shard's header, shapes and dtypes, but not the checksums. Throws
  /// std::runtime_error that names the file, what is wrong and what is expected, for example for a
  /// missing manifest (`kvlab trace seal` writes it), a later format, or a missing or wrong shard.
  static TraceReader open(const std::filesystem::path& directory);

  const std::filesystem::path& directory() const { return directory_; }
  const TraceHeader& header() const { return manifest_.header; }
  const ModelShape& shape() const { return header().shape; }
  /// A view of the trace with only `layers`, which must ascend. They keep their layer numbers.
  TraceReader select_layers(std::span<const std::uint32_t> layers) const;
  /// Returns the layers that have a sliding window (`with`) or those that have none. Policies act
  /// on the layers without a window.
  std::vector<std::uint32_t> layers_with_window(bool with) const;
  /// The parameters of a layer's attention.
  const RowSpec& row(std::uint32_t layer) const {
    return header().rows.empty() ? plain_row_ : header().rows[layer];
  }
  std::uint32_t tokens() const { return manifest_.tokens; }
  std::uint32_t prompt_tokens() const { return manifest_.prompt_tokens; }
  const std::vector<Segment>& segments() const { return manifest_.segments; }
  const std::vector<ShardInfo>& shards() const { return manifest_.shards; }
  const std::vector<std::int32_t>& ids() const { return ids_; }  // [tokens]
  /// XXH3-64 of the manifest. A run records it for each of its traces.
  const std::string& hash() const { return hash_; }

  /// Reads tokens [first, first + count) of one head as float32: to [count, head_size].
  void read(Part part, std::uint32_t layer, std::uint32_t head, std::uint32_t first,
            std::uint32_t count, float* to) const;

  /// Attention outputs that the decoder computed for some rows of shard `index`.
  struct CheckRows {
    std::vector<std::uint32_t> rows;  // [16], absolute positions
    std::vector<float> out;           // [query_heads, 16, head_size]
    std::vector<float> lse;           // [query_heads, 16], or empty
  };
  CheckRows check_rows(std::size_t index, std::uint32_t layer) const;
  const TraceExtras& extras() const { return manifest_.extras; }
  /// Reads the squared norms of the residual stream after a layer's attention output was added: to
  /// [tokens]. Throws std::logic_error if the trace has none.
  void residual_norm2(std::uint32_t layer, float* to) const;
  /// Returns the first `columns` columns of the sketch of W_o for a KV head's query heads: [group,
  /// head_size, columns]. They are rescaled so that they are a valid sketch without the other
  /// columns. Throws std::logic_error if the trace has no sketch.
  std::vector<float> sketch(std::uint32_t layer, std::uint32_t kv_head,
                            std::uint32_t columns) const;
  /// Whether both extras that the metric `residual_error` needs are present.
  bool has_residuals() const { return extras().residual_norm2 && extras().sketch; }
  /// Number of gradient samples; 0 if the trace has none.
  std::uint32_t gradient_samples() const {
    return extras().gradients ? extras().gradients->gradient_samples : 0;
  }
  /// Number of gradient samples that a replay over `queries` may use. It is 0 if the trace's
  /// gradients belong to a different set of queries. The two sets may differ only before the first
  /// query of `queries`, because the gradient at a query does not depend on earlier queries. For
  /// example, gradients of all queries are also valid for the decoded queries after a single
  /// prompt.
  std::uint32_t gradient_samples(Queries queries) const;
  /// Reads one gradient sample: the gradient with respect to a query head's output before the
  /// output projection, at each of `positions`. Each gradient has [head_size] floats, and they are
  /// `stride` floats apart in `to`. Throws std::logic_error if the trace has no gradients.
  void gradient(std::uint32_t layer, std::uint32_t query_head, std::uint32_t gradient_sample,
                std::span<const std::uint32_t> positions, float* to, std::size_t stride) const;
  bool has_feature(std::string_view name) const;
  /// Reads a feature of a KV head: to [tokens]. Throws std::logic_error if the trace does not have
  /// the feature.
  void feature(std::string_view name, std::uint32_t layer, std::uint32_t kv_head, float* to) const;
  /// Whether the trace has queries, keys and values, and not only selections. If not, read() throws
  /// std::runtime_error.
  bool has_tensors() const { return !shards().empty(); }
  /// The maximum number of tokens that a query selects; 0 if the trace has no selections.
  std::uint32_t max_selected() const { return max_selected_; }
  /// Calls each(position of the query, selected tokens) for each row of a KV head's selections, in
  /// order. The tokens ascend up to the query's position. Throws std::runtime_error that names the
  /// file, tensor and row if a row is not a valid selection, and std::logic_error if the trace has
  /// no selections.
  void selections(
      std::uint32_t layer, std::uint32_t kv_head,
      const std::function<void(std::uint32_t, std::span<const std::uint32_t>)>& each) const;
  std::span<const SafetensorsFile> feature_files() const { return feature_files_; }
  std::span<const SafetensorsFile> gradient_files() const { return gradient_files_; }
  const SafetensorsFile* sketch_file() const { return sketch_file_ ? &*sketch_file_ : nullptr; }
  const SafetensorsFile* selected_file() const {
    return selected_file_ ? &*selected_file_ : nullptr;
  }
  const SafetensorsFile& shard_file(std::size_t index) const { return files_[index]; }
  /// Drops the shard pages that have been read, so that they no longer occupy memory
  /// (MappedFile::release).
  void release() const {
    for (const SafetensorsFile& file : files_) file.release();
    for (const SafetensorsFile& file : gradient_files_) file.release();
    for (const SafetensorsFile& file : feature_files_) file.release();
    if (selected_file_) selected_file_->release();
  }
  const SafetensorsFile& tokens_file() const { return tokens_file_; }
  const std::string& tokens_xxh3() const { return manifest_.tokens_xxh3; }

 private:
  friend std::uint32_t seal_trace(const std::filesystem::path& directory);
  /// Whether tokens.safetensors may have more ids than the manifest has tokens. seal_trace()
  /// truncates them.
  enum class Ids { as_many_as_tokens, maybe_more };
  /// Does everything that open() does except reading the manifest.
  static TraceReader assemble(const std::filesystem::path& directory, Manifest manifest,
                              Ids ids = Ids::as_many_as_tokens);
  void open_extras();

  std::filesystem::path directory_;
  Manifest manifest_;  // its header includes the data of tokens.safetensors
  std::vector<std::int32_t> ids_;
  RowSpec plain_row_;                   // row of all layers if the header has no rows
  std::vector<SafetensorsFile> files_;  // by shard
  SafetensorsFile tokens_file_;
  std::optional<SafetensorsFile> sketch_file_;
  std::vector<SafetensorsFile> gradient_files_;  // by shard; empty if there are none
  std::vector<float> gradient_scales_;           // by shard; empty if there are none
  std::vector<SafetensorsFile> feature_files_;   // in the order of extras().features
  std::optional<SafetensorsFile> selected_file_;
  std::uint32_t max_selected_ = 0;
  std::string hash_;
};

/// The result of `trace verify`.
struct TraceCheck {
  bool ok = true;
  std::vector<std::string> problems;  ///< one line each, naming the shard, layer and head
  /// Largest errors of the sampled rows, see docs/reference/trace-format.md.
  double worst_out = 0, worst_lse = 0;
  double tolerance = 0;  ///< upper limit of both errors
  /// Number of compared rows: sampled rows x query heads x layers.
  std::uint64_t rows = 0;
  /// Number of checked selections: queries x KV heads x layers.
  std::uint64_t selections = 0;
};

/// Checks the XXH3-64 of every shard and recomputes the sampled rows from q, k and v.
TraceCheck verify_trace(const TraceReader& trace, unsigned threads);

/// Opens a trace and verifies it. Throws std::runtime_error with the first problem.
TraceReader open_verified_trace(const std::filesystem::path& directory, unsigned threads);

/// Converts an interrupted capture to a valid, shorter trace: keeps the complete shards from the
/// first on, removes .part files and writes the manifest. Returns the number of tokens kept. The
/// capture must have ended. Throws std::runtime_error if there is no complete shard, if one is
/// damaged, or if the trace is already finished.
std::uint32_t seal_trace(const std::filesystem::path& directory);

/// Writes a trace while a decoder computes it. A full shard is sealed when all layers of its tokens
/// have arrived. finish() seals the last shard.
class TraceWriter {
 public:
  /// Creates the directory. Throws std::runtime_error if it exists or cannot be created, and
  /// std::invalid_argument for a header that no reader would accept. A null rope_config stands for
  /// {"rope_type": "default"}, and a null capture for {}. Writes format 3 only if rows need it.
  TraceWriter(std::filesystem::path directory, TraceHeader header);
  /// If the trace is unfinished, keeps the sealed shards (for `kvlab trace seal`), or removes the
  /// folder if there are none.
  ~TraceWriter();
  TraceWriter(TraceWriter&&) noexcept;

  /// Announces the next tokens, all of one kind. Consecutive decode appends become one segment, and
  /// so do the chunks of a prompt. `new_segment` begins a new segment even if the kind is the same,
  /// for example because another prompt follows.
  void begin(std::span<const std::int32_t> ids, SegmentKind kind, bool new_segment = false);
  /// Adds what one layer computed, before RoPE, for the n tokens of the latest begin(): q [n,
  /// query_heads, head_size]; k and v [n, kv_heads, head_size]; out [n, query_heads, head_size],
  /// the attention output before the output projection; lse [n, query_heads], the natural logarithm
  /// of the sum of exponentials, which is empty in every call if the decoder does not compute it.
  /// Layers may come in any order.
  void layer(std::uint32_t index, std::span<const float> q, std::span<const float> k,
             std::span<const float> v, std::span<const float> out, std::span<const float> lse);
  /// Adds the squared norms [n] of the residual stream after that layer's attention output was
  /// added. Call it either for every layer of every append or not at all.
  void residual(std::uint32_t index, std::span<const float> norm2);
  /// Sets the sketch of the captured model. Call before the first append.
  void sketch(const OutputSketch& sketch);
  /// Call this when all layers of the announced tokens have arrived. Seals the shards that are now
  /// complete. Throws std::runtime_error if a file cannot be written (a full disk, for example);
  /// the writer is then unusable.
  void end();
  /// Seals the last shard and writes the manifest.
  void finish();
  std::uint32_t tokens() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvlab
