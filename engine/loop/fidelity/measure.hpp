// One text in the open loop and in the closed loop, over the same ids.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/backend.hpp"
#include "engine/loop/eval.hpp"

namespace kvlab {

/// A text by its tokens, or a trace that was captured before, whose ids are the text.
struct LoopText {
  std::string name;
  std::vector<std::int32_t> ids;
  std::uint32_t prompt_tokens = 0;
  std::optional<TraceReader> trace;
};

/// Throws std::runtime_error unless the trace verifies, is of these weights, and holds one prompt
/// and then decoded tokens, two at least.
LoopText text_of_trace(const std::filesystem::path& directory, const std::string& weights_xxh3,
                       unsigned threads);

struct OpenLoopOptions {
  const OutputSketch& sketch;     ///< of the model's output projections, for captures
  std::filesystem::path capture;  ///< where a trace of the text goes, if it has none; a new folder
  bool every_output_error = false;
  unsigned threads = 1;
  HeadReplayer* device = nullptr;
  std::function<void(double)> capturing = {};  ///< the share that is captured; may be empty
  std::function<void(double)> progress = {};   ///< of the replay
};

/// Every figure of the replay by which policies may be put in order, and kv_bytes_mean and _peak:
/// [metric][configuration]; NaN where there is none.
using OpenLoopFigures = std::map<std::string, std::vector<double>>;
OpenLoopFigures run_open_loop(Backend& backend, const LoopText& text,
                              std::span<const CacheConfig> configs, const OpenLoopOptions& options);

/// What each configuration scored, and the full cache before them.
std::vector<LoopScores> closed_loop_scores(const Sweep& sweep, const LoopText& text,
                                           std::span<const CacheConfig> configs, unsigned threads,
                                           std::function<void(double)> progress);

/// KL to the full cache of each scored token, [configuration][token], of all but the first.
std::vector<std::vector<double>> kl_of(std::vector<LoopScores> scores);
/// Seconds that the closed loop takes for each token of a configuration, by a run of the full cache
/// over the beginning of a text: what its progress is reckoned from as long as nothing else is
/// known.
double closed_loop_rate(const Sweep& sweep, const LoopText& text, unsigned threads);

}  // namespace kvlab
