// Chooses a storage format for the keys and the values of each layer, from traces.
//
// Losses of layers, and of keys and values, nearly add up: quantizing one of them changes the
// outputs of attention by a small error, and the squared errors of different layers are nearly
// uncorrelated. So one replay measures the loss of each layer's keys alone and values alone in each
// format, and the choice is a knapsack over those losses. A second replay measures the whole plan.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "policies/tiers/key_centre.hpp"
#include "policies/tiers/tier_plan.hpp"
#include "traces/trace.hpp"

namespace kvlab {

/// Which formats a layer's keys and values may have together. all: any two. equal: the same.
/// kernels: those of kvlab's kernels (kernel_format()).
enum class FormatPairs { all, equal, kernels };

/// What may differ within a plan.
struct PlanFreedom {
  bool by_layer = true;  ///< layers may have different formats
  FormatPairs pairs = FormatPairs::all;
};

/// The row formats among which a plan chooses, for an engine.
struct FormatSet {
  std::string_view name;
  std::vector<std::string_view> formats;  ///< names of row formats
  PlanFreedom freedom;
  bool quantizes_windows = false;  ///< whether layers with a sliding window are quantized, too
};
/// kvlab, cuda (kvlab's CUDA decoder, kvlab.hf and C library), vllm, llama.cpp, tensorrt-llm: what
/// each engine supports today.
std::span<const FormatSet> format_sets();

/// Parses the name of a set, or a list of row formats such as `16,8,4` with full freedom. Throws
/// std::invalid_argument.
FormatSet parse_format_set(const std::string& text);

/// Parses a mean number of bits per element, with scales and minima: `4.5bits`, or `25%bytes` of 16
/// bit. Throws std::invalid_argument unless it is above 0 and at most 16.
double parse_plan_bits(std::string_view text);

struct PlanRequest {
  FormatSet set;
  double bits = 0;  ///< mean over the elements of all planned layers
  KeyCentre centre = KeyCentre::none;
  Queries queries = Queries::decode;
  std::string metric;  ///< kl_estimate or residual_error; empty: the first that all traces have
  unsigned threads = 1;
  std::function<void(double)> progress;
};

/// A loss, with its standard error over the queries; of several traces, the mean, with the standard
/// error over the traces.
struct PlanLoss {
  double value = 0, standard_error = 0;  ///< the error is NaN if unknown
};

/// A choice of formats, and what it is expected to lose.
struct FormatChoice {
  TierPlan tier_plan;
  double bits = 0;   ///< mean per element, with scales and minima
  double added = 0;  ///< sum of the losses of its parts
  PlanLoss joint;    ///< loss of the whole plan: kl_estimate_joint or residual_error
};

struct FormatPlan {
  std::string metric;  ///< of the losses
  std::string model, weights_xxh3;
  bool has_windows = false;           ///< whether the model has layers with a sliding window, too
  std::vector<std::uint32_t> layers;  ///< numbers of the planned layers
  std::vector<const RowFormat*> formats = {};  ///< in order of decreasing precision
  /// Mean over traces: [planned layer][0: keys, 1: values][format].
  std::vector<std::array<std::vector<double>, 2>> losses = {};
  FormatChoice plan = {};
  /// The best formats that are the same in all layers, in at most as many bits as requested.
  FormatChoice uniform = {};
  /// The best plans of fewer and of more bits, by ascending bits; `joint` is not measured.
  std::vector<FormatChoice> frontier = {};
};

/// A part of a model that has one format in a plan: the keys or the values of some layers.
struct PlanPart {
  std::vector<double> losses;        ///< by format
  std::vector<std::uint32_t> bytes;  ///< by format; of one block of channels in all its layers
};

/// The format of each part with the least sum of losses in at most `bytes`, for all numbers of
/// bytes at once (a knapsack by dynamic programming, in parts x bytes x formats steps).
class FormatKnapsack {
 public:
  FormatKnapsack(std::span<const PlanPart> parts, std::uint32_t max_bytes);

  /// Whether anything fits into `bytes`.
  bool fits(std::uint32_t bytes) const;
  /// The least sum of losses; infinite if nothing fits.
  double loss(std::uint32_t bytes) const;
  /// The index of each part's format. `bytes` must fit.
  std::vector<std::size_t> formats(std::uint32_t bytes) const;

 private:
  std::vector<PlanPart> parts_;
  std::size_t width_;
  std::vector<double> loss_;          // [bytes + 1], of all parts
  std::vector<std::uint8_t> chosen_;  // [part, bytes + 1]
};

/// Measures losses on the traces and chooses. Throws std::invalid_argument if the traces are of
/// different models or have no layer without a window, if a trace lacks the metric, if no format of
/// the set fits the bits, and as replay() does.
FormatPlan plan_formats(std::span<const TraceReader* const> traces, const PlanRequest& request);

/// The plan as JSON, with all losses. `tiers` is the text that --tiers takes.
std::string plan_text(const FormatPlan& plan, const PlanRequest& request);

/// What engines need of such a file.
struct PlanFile {
  TierPlan tier_plan;
  KeyCentre centre = KeyCentre::none;
  std::vector<std::uint32_t> layers = {};  ///< numbers of the planned layers
  bool has_windows = false;  ///< whether the model has layers with a sliding window, too
};
/// Throws std::runtime_error that names the file.
PlanFile read_plan_file(const std::string& path);

}  // namespace kvlab
