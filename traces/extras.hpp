// Extras of a trace: what the metrics beyond attention need. All are optional. See
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

#include "traces/base/safetensors.hpp"

namespace kvlab {

struct ModelShape;

inline constexpr std::string_view kSketchFile = "output.safetensors";
inline constexpr std::uint32_t kSketchColumns = 64;
inline constexpr std::uint32_t kMaxGradientSamples = 64;  ///< of gradients

/// A file that holds some of a trace's tokens.
struct ShardInfo {
  std::string file;
  std::uint32_t first, tokens;
  std::string xxh3;
};

/// Which queries count: those of decode segments, or all.
enum class Queries { decode, all };
std::string_view name_of(Queries queries);
/// Throws std::invalid_argument unless decode or all.
Queries parse_queries(std::string_view text);

/// Some tokens of a trace under a name: `passage_recall` is measured over them.
struct Passage {
  std::string name;
  std::uint32_t start, tokens;
  bool operator==(const Passage&) const = default;
};

/// A sketch of a model's output projections: W_o^T R for each layer, R [hidden, 64] Gaussian of
/// variance 1/64, so that ||R^T W_o x|| estimates ||W_o x||.
struct OutputSketch {
  std::uint64_t seed = 0;     ///< of R, see sketch_normal()
  std::vector<float> values;  // [layer, query_heads * head_size, 64]
};

/// Element (layer, row, column) of R, before its variance of 1/64: normal, by Box and Muller, from
/// SplitMix64 of the seed and the element's index in [layer, hidden, 64].
double sketch_normal(std::uint64_t seed, std::uint64_t index);

/// What the manifest says of a trace's extras.
struct TraceExtras {
  bool residual_norm2 = false;  ///< in the shards
  struct Sketch {
    std::uint64_t seed;
    std::string xxh3;
  };
  std::optional<Sketch> sketch;
  /// How the log-likelihood of tokens that the model itself drew depends on each head's output.
  struct Gradients {
    std::uint32_t gradient_samples;
    std::uint64_t seed;
    Queries queries;               ///< the queries whose tokens' log-likelihoods were summed
    std::vector<ShardInfo> files;  ///< beside the shards
  };
  std::optional<Gradients> gradients;
  /// Numbers that a program has given each token, for the policies that read them.
  struct Feature {
    std::string name, xxh3;
  };
  std::vector<Feature> features;  ///< in files of their own, feature_file()
};

/// column-NAME.safetensors
std::string feature_file(std::string_view name);
/// layers.3.column.NAME
std::string feature_tensor(std::uint32_t layer, std::string_view name);
/// What a feature may be called: up to 64 letters, digits, '_', '-' and '.'.
bool is_trace_feature_name(std::string_view name);
/// Throws std::runtime_error unless the file holds a feature of a trace of this shape, and nothing
/// else.
void check_feature_tensors(const SafetensorsFile& file, const ModelShape& shape,
                           std::uint32_t tokens, std::string_view name);

/// Writes DIRECTORY/output.safetensors, in bf16.
TraceExtras::Sketch write_sketch(const std::filesystem::path& directory, const ModelShape& shape,
                                 const OutputSketch& sketch);
/// The seed that the file names. Throws std::runtime_error for tensors of another shape.
std::uint64_t check_sketch(const SafetensorsFile& file, const ModelShape& shape);

// Extras that a finished trace is given.

/// Adds a feature whose values come from `value(layer, KV head, token)`, in that order; one of that
/// name is replaced. Throws std::runtime_error where a value is not finite.
void write_feature(const std::filesystem::path& directory, const std::string& name,
                   const std::function<float(std::uint32_t, std::uint32_t, std::uint32_t)>& value);

/// Puts what a layer's gradients of a shard are once they are divided by the file's scale:
/// [gradient samples, query_heads, tokens of the shard, head_size].
using FillGradient = std::function<void(const ShardInfo&, std::uint32_t layer, std::span<float>)>;

/// Adds `gradients`, whose files are written here; those that the trace has are replaced. `scale`
/// gives that of each file.
void write_gradients(const std::filesystem::path& directory, TraceExtras::Gradients gradients,
                     const std::function<float(std::size_t)>& scale, const FillGradient& fill);

/// Adds `draws` synthetic gradients, whose elements come from `next`, in the order of the files,
/// the layers and the tensors, as those of the `queries`. The scale of file i is (i + 1)
/// / 4.
void write_gradients(const std::filesystem::path& directory, std::uint32_t gradient_samples,
                     const std::function<float()>& next, Queries queries = Queries::decode);

}  // namespace kvlab
