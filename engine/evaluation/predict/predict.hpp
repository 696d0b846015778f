// What decoding with keys and values in host memory would cost, and when it is faster than the full
// cache: the results of `kvlab predict`.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/evaluation/predict/decode_cost.hpp"
#include "sim/run/results.hpp"

namespace kvlab {

/// Predicted times are expected to be within this share of measured ones (docs/guides/predict.md),
/// so smaller differences mean nothing.
inline constexpr double kPredictionError = 0.10;

/// A whole number as text: 64, 4,096.
std::string count_text(std::uint32_t count);

/// A buffer of tokens on the device, and how often it misses.
struct BufferChoice {
  std::string policy;        ///< which tokens the buffer holds; empty: not known
  std::uint32_t buffer = 0;  ///< tokens for each sequence and KV head
  double fetch_rate = 0;     ///< share of the selected tokens that are fetched
  /// 95% confidence interval of the fetch rate; NaN: unknown.
  double low = std::numeric_limits<double>::quiet_NaN(),
         high = std::numeric_limits<double>::quiet_NaN();
  bool is_oracle = false;  ///< knows the future, so it cannot be deployed
};

/// The fetch rates of a replay: one for each policy and budget, averaged over the traces, without
/// the full cache. A budget that is a share of the length has the tokens of the longest trace.
/// `rows` must be those of `kvlab replay --refetch`. Throws std::invalid_argument if there are
/// none.
std::vector<BufferChoice> buffers_of(std::span<const ResultRow> rows);

/// What a replay measured its fetch rates on; all 0 if there was none.
struct ReplayedSelection {
  std::uint32_t tokens = 0;    ///< of the shortest trace
  std::uint32_t selected = 0;  ///< tokens that a query selected
};

struct PredictRequest {
  RefetchSetup setup;
  std::vector<std::uint32_t> batches;
  std::vector<BufferChoice> buffers;
  double device_bytes = 0;  ///< device memory for weights, keys and values; 0: not given
  double host_bytes = 0;    ///< host memory for keys and values; 0: not given
  ReplayedSelection replayed;
};

/// The full cache at one batch. Rates are in tokens per second over the whole batch.
struct FullPrediction {
  std::uint32_t batch = 0;
  double rate = 0;
  std::optional<double> break_even;  ///< see DecodeCost::break_even()
};

/// One buffer at one batch.
struct RefetchPrediction {
  std::uint32_t batch = 0;
  double serial = 0, overlapped = 0;
  /// The serial rate at the ends of the fetch rate's confidence interval; NaN: unknown.
  double low = 0, high = 0;
  double host_bytes = 0;  ///< keys and values in host memory
};

struct BufferPrediction {
  BufferChoice buffer;
  std::vector<RefetchPrediction> batches;         ///< [batch of the request]
  std::optional<RefetchPrediction> largest = {};  ///< if device memory is given and a sequence fits
};

struct Prediction {
  std::vector<FullPrediction> full;            ///< [batch of the request]
  std::optional<FullPrediction> largest_full;  ///< if device memory is given and a sequence fits
  std::vector<BufferPrediction> buffers;       ///< [buffer of the request]
};

/// Throws std::invalid_argument if the request contradicts itself (a selection that is not smaller
/// than the context, or not smaller than a buffer), or if not even one sequence fits.
Prediction predict(const DecodeCost& cost, const PredictRequest& request);

/// Which buffer to use. Buffers are compared at the largest batch that fits the device memory or,
/// if no device memory is given, at the largest batch of the request.
struct BufferRecommendation {
  std::size_t choice = 0;                ///< index of the buffer
  std::optional<std::size_t> runner_up;  ///< the best buffer of another size
  bool pays = false;                     ///< whether refetch is faster than the full cache
  /// Whether `pays` would be the same if the prediction were wrong by kPredictionError and the
  /// fetch rate were at the unfavourable end of its interval.
  bool is_sure = false;
  /// Sentences: the choice, how sure it is, and what was not measured.
  std::string text;
};
/// nullopt if there is no buffer that can be deployed, or none fits.
std::optional<BufferRecommendation> recommend_buffer(const Prediction& prediction,
                                                     const PredictRequest& request);

nlohmann::ordered_json prediction_json(const Prediction& prediction, const DecodeCost& cost,
                                       const PredictRequest& request);

}  // namespace kvlab
