// Optional extras of a trace, which some metrics need. See docs/reference/trace-format.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "traces/base/safetensors.hpp"

namespace kvlab {

struct ModelShape;

inline constexpr std::string_view kSketchFile = "output.safetensors";
inline constexpr std::uint32_t kSketchColumns = 64;
inline constexpr std::uint32_t kMaxGradientSamples = 64;  ///< maximum for one trace

/// A file that holds some of a trace's tokens.
struct ShardInfo {
  std::string file;
  std::uint32_t first, tokens;
  std::string xxh3;
};

/// The measured queries: those of decode segments, or all.
enum class Queries { decode, all };
std::string_view name_of(Queries queries);
/// Throws std::invalid_argument unless `text` is decode or all.
Queries parse_queries(std::string_view text);

/// A named range of a trace's tokens, for the metric `passage_recall`.
struct Passage {
  std::string name;
  std::uint32_t start, tokens;
  bool operator==(const Passage&) const = default;
};

/// A sketch of a model's output projections: W_o^T R for each layer, where R [hidden, 64] is
/// Gaussian with variance 1/64, so that ||R^T W_o x|| estimates ||W_o x||.
struct OutputSketch {
  std::uint64_t seed = 0;     ///< seed of R, see sketch_normal()
  std::vector<float> values;  // [layer, query_heads * head_size, 64]
};

/// Returns the element of R at the flat index `index` of [layer, hidden, 64], before it is scaled
/// to variance 1/64: a number from the standard normal distribution, computed from SplitMix64 of
/// `seed` and `index` by the Box-Muller method.
double sketch_normal(std::uint64_t seed, std::uint64_t index);

/// The extras that the manifest lists.
struct TraceExtras {
  bool residual_norm2 = false;  ///< stored in the shards
  struct Sketch {
    std::uint64_t seed;
    std::string xxh3;
  };
  std::optional<Sketch> sketch;
  /// The gradients of the log-likelihood of tokens that the model itself sampled, with respect to
  /// each head's output.
  struct Gradients {
    std::uint32_t gradient_samples;
    std::uint64_t seed;
    /// The queries at which the log-likelihood of a sampled next token was part of the sum.
    Queries queries;
    std::vector<ShardInfo> files;  ///< files beside the shards
  };
  std::optional<Gradients> gradients;
  /// A token feature: one number per token, layer and KV head, which a program has computed and
  /// which policies may read.
  struct Feature {
    std::string name, xxh3;
  };
  std::vector<Feature> features;  ///< each is stored in feature_file(name)
  /// The tokens that an engine with sparse attention selected (traces/selections.hpp).
  struct Selections {
    Queries queries;  ///< the queries for which tokens were selected
    std::string xxh3;
  };
  std::optional<Selections> selections;
};

/// Returns the file name column-NAME.safetensors.
std::string feature_file(std::string_view name);
/// Returns the name of a layer's tensor, such as layers.3.column.NAME.
std::string feature_tensor(std::uint32_t layer, std::string_view name);
/// Whether `name` is a valid feature name: up to 64 letters, digits, '_', '-' and '.'.
bool is_trace_feature_name(std::string_view name);
/// Throws std::runtime_error unless the file holds exactly the feature `name` of a trace with this
/// shape and number of tokens.
void check_feature_tensors(const SafetensorsFile& file, const ModelShape& shape,
                           std::uint32_t tokens, std::string_view name);

/// Writes DIRECTORY/output.safetensors, in bf16.
TraceExtras::Sketch write_sketch(const std::filesystem::path& directory, const ModelShape& shape,
                                 const OutputSketch& sketch);
/// Returns the seed that the file states. Throws std::runtime_error for tensors of another shape.
std::uint64_t check_sketch(const SafetensorsFile& file, const ModelShape& shape);

// Functions that add extras to a finished trace.

/// Adds a feature. Its values come from `value(layer, KV head, token)`, which is called for layers,
/// then heads, then tokens in ascending order. Replaces a feature of the same name. Throws
/// std::runtime_error if a value is not finite.
void write_feature(const std::filesystem::path& directory, const std::string& name,
                   const std::function<float(std::uint32_t, std::uint32_t, std::uint32_t)>& value);

/// Fills the span [gradient samples, query_heads, tokens of the shard, head_size] with the
/// gradients of one layer and shard, divided by the scale of the shard's gradient file.
using FillGradient = std::function<void(const ShardInfo&, std::uint32_t layer, std::span<float>)>;

/// Adds `gradients` and writes their files. Replaces the gradients that the trace has.
/// `scale(index)` returns the scale of the file with that index.
void write_gradients(const std::filesystem::path& directory, TraceExtras::Gradients gradients,
                     const std::function<float(std::size_t)>& scale, const FillGradient& fill);

/// Adds synthetic gradients: `gradient_samples` samples, with `queries` recorded as their queries.
/// `next` returns the tensor elements one by one, file after file and layer after layer. The scale
/// of file i is (i + 1) / 4.
void write_gradients(const std::filesystem::path& directory, std::uint32_t gradient_samples,
                     const std::function<float()>& next, Queries queries = Queries::decode);

}  // namespace kvlab
