// Chooses a storage format for the keys and the values of each layer, from traces.
//
// The loss of a plan is nearly the sum of the losses of its parts (the keys or the values of a
// layer), because quantizing a part changes the outputs of attention by a small error, and the
// errors of different layers are nearly uncorrelated. So one replay measures the loss of each part
// alone in each format, and the choice is a knapsack problem over those losses. A second replay
// measures the whole plan.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "policies/tiers/centre_setting.hpp"
#include "policies/tiers/tier_plan.hpp"
#include "traces/trace.hpp"

namespace kvlab {

/// Which pairs of formats the keys and the values of a layer may have. all: any pair. equal: the
/// same format for both. kernels: the pairs that kvlab's kernels support (kernel_format()).
enum class FormatPairs { all, equal, kernels };

/// Which formats of a plan may differ.
struct PlanFreedom {
  bool by_layer = true;  ///< layers may have different formats
  FormatPairs pairs = FormatPairs::all;
};

/// The row formats from which a plan may choose, for one engine.
struct FormatSet {
  std::string_view name;
  std::vector<std::string_view> formats;  ///< names of row formats
  PlanFreedom freedom;
  bool quantizes_windows = false;  ///< whether layers with a sliding window are quantized, too
  /// Whether the engine rotates rows as llama.cpp does. If the head size allows it, formats of the
  /// set then mean the variants whose name ends in `_rot`.
  bool rotates = false;
};
/// The sets kvlab, cuda (kvlab's CUDA decoder, kvlab.hf and C library), vllm, llama.cpp,
/// tensorrt-llm and transformers, with the formats that each engine supports today.
std::span<const FormatSet> format_sets();

/// Parses the name of a set, or a list of row formats such as `16,8,4`. With a list, keys and
/// values may have any pair of its formats, and each layer may have a different pair. Throws
/// std::invalid_argument for any other text.
FormatSet parse_format_set(const std::string& text);

/// The row formats of a set for heads of this size, in order of decreasing precision. If the engine
/// rotates rows and the head size allows it, these are the formats whose name ends in `_rot`.
std::vector<const RowFormat*> row_formats(const FormatSet& set, std::uint32_t head_size);

/// Parses a mean number of bits per element, which includes scales and minima: `4.5bits`, or
/// `25%bytes`, a share of the bytes in 16 bit. Throws std::invalid_argument unless it is above 0
/// and at most 16.
double parse_plan_bits(std::string_view text);

struct PlanRequest {
  FormatSet set;
  double bits = 0;            ///< mean bits per element, over all planned layers
  CentreSetting centre = {};  ///< its file must have been read
  Queries queries = Queries::decode;
  /// kl_estimate or residual_error; empty: the first of these that all traces have.
  std::string metric;
  unsigned threads = 1;
  std::function<void(double)> progress;
};

/// A loss. For one trace, the standard error is over its queries. For several traces, the value is
/// the mean over the traces, and the standard error is over the traces.
struct PlanLoss {
  double value = 0, standard_error = 0;  ///< the error is NaN if unknown
};

/// A choice of formats, and its expected loss.
struct FormatChoice {
  TierPlan tier_plan;
  double bits = 0;   ///< mean bits per element, including scales and minima
  double added = 0;  ///< sum of the losses of the parts
  PlanLoss joint;    ///< loss of the whole plan together: kl_estimate_joint or residual_error
  /// KL in an end-to-end evaluation (`kvlab plan --confirm`). NaN if there was none.
  PlanLoss measured = {std::numeric_limits<double>::quiet_NaN(),
                       std::numeric_limits<double>::quiet_NaN()};
};

struct FormatPlan {
  std::string metric;  ///< the metric of the losses
  std::string model, weights_xxh3;
  bool has_windows = false;           ///< whether the model has layers with a sliding window, too
  std::vector<std::uint32_t> layers;  ///< numbers of the planned layers
  std::vector<const RowFormat*> formats = {};  ///< in order of decreasing precision
  /// Losses, means over the traces: [planned layer][0: keys, 1: values][format].
  std::vector<std::array<std::vector<double>, 2>> losses = {};
  FormatChoice plan = {};
  /// The best plan whose formats are the same in all layers, with at most the requested bits.
  FormatChoice uniform = {};
  /// The best plans for smaller and larger numbers of bits, by ascending bits. Their `joint` is not
  /// measured.
  std::vector<FormatChoice> frontier = {};

  /// The choice for the plan file: `plan`, or `uniform` if its measured KL is lower.
  const FormatChoice& chosen() const {
    return uniform.measured.value < plan.measured.value ? uniform : plan;
  }
};

/// A part of a model that has one format in a plan: the keys or the values of some layers.
struct PlanPart {
  std::vector<double> losses;  ///< by format
  /// By format: bytes of one block of channels of a token, summed over the layers of the part.
  std::vector<std::uint32_t> bytes;
};

/// Chooses the format of each part so that the sum of the losses is minimal and the parts take at
/// most `bytes` bytes. Solves this for all numbers of bytes at once, by dynamic programming, in
/// parts x bytes x formats steps.
class FormatKnapsack {
 public:
  FormatKnapsack(std::span<const PlanPart> parts, std::uint32_t max_bytes);

  /// Whether there is a choice of formats that fits into `bytes`.
  bool fits(std::uint32_t bytes) const;
  /// The minimal sum of losses within `bytes`; infinite if there is no choice that fits.
  double loss(std::uint32_t bytes) const;
  /// The choice within `bytes`: the index of each part's format. fits(bytes) must be true.
  std::vector<std::size_t> formats(std::uint32_t bytes) const;

 private:
  std::vector<PlanPart> parts_;
  std::size_t width_;
  std::vector<double> loss_;          // [bytes + 1]: minimal loss of all parts
  std::vector<std::uint8_t> chosen_;  // [part, bytes + 1]: index of the format
};

/// Measures the losses on the traces and chooses the formats. Throws std::invalid_argument if the
/// traces are of different models or have no layer without a window, if a trace lacks the metric,
/// or if even the smallest formats of the set take more than the requested bits. Also throws as
/// replay() does.
FormatPlan plan_formats(std::span<const TraceReader* const> traces, const PlanRequest& request);

/// The plan as JSON, with all losses, for a file in `folder`. The value of its key `tiers` can be
/// used with --tiers.
std::string plan_text(const FormatPlan& plan, const PlanRequest& request,
                      const std::filesystem::path& folder);

/// The contents of a plan file that engine_options() needs.
struct PlanFile {
  TierPlan tier_plan;
  CentreSetting centre = {};               ///< its file has not been read
  std::vector<std::uint32_t> layers = {};  ///< numbers of the planned layers
  bool has_windows = false;  ///< whether the model has layers with a sliding window, too
};
/// Reads a file with the text of plan_text(). Throws std::runtime_error that names the file.
PlanFile read_plan_file(const std::string& path);
/// The same for a file that is already parsed.
PlanFile plan_file_of(const nlohmann::json& top, const std::string& path);

}  // namespace kvlab
