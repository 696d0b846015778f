// Capture: writes what a decoder computes to a trace, during decoding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <span>

#include "engine/decoder.hpp"
#include "policies/features/output_projections.hpp"
#include "traces/extras.hpp"
#include "traces/trace.hpp"

namespace kvlab {
/// Makes the header of a trace of a model that runs on `device` in float32, without rounding after
/// RoPE. The header contains no hashes. `options` records how the model is run.
TraceHeader trace_header(const ModelConfig& config, const std::string& device,
                         nlohmann::json options);
/// Makes the header of a trace that the CPU decoder writes.
TraceHeader trace_header(const Model& model, nlohmann::json options);

/// Writes what a decoder reports to a TraceWriter, which must outlive this object. The decoder's
/// policy must be `full`, because a trace contains the whole cache.
class Capture final : public DecoderObserver {
 public:
  /// `progress` gets the number of tokens written so far; may be empty.
  explicit Capture(TraceWriter& writer, std::function<void(std::uint32_t)> progress = {})
      : writer_(writer), progress_(std::move(progress)) {}

  void begin_append(std::span<const std::int32_t> ids, std::uint32_t first, SegmentKind kind,
                    bool new_segment) override;
  void layer(std::uint32_t layer, std::span<const float> q, std::span<const float> k,
             std::span<const float> v, std::span<const float> out,
             std::span<const float> lse) override;
  void residual(std::uint32_t layer, std::span<const float> x) override;
  void end_append() override;

 private:
  TraceWriter& writer_;
  std::size_t tokens_ = 0;  // tokens of the current append
  std::function<void(std::uint32_t)> progress_;
};

// Reads output projections from a checkpoint for a replay, either whole or as a sketch in 64 random
// directions. A replay uses them to compute how an error of the attention outputs changes the
// residual stream.

inline constexpr std::uint64_t kSketchSeed = 1;  ///< the seed that captures use

/// Computes the sketch of a checkpoint's output projections from its files. Throws as
/// load_model_config() and Checkpoint::open() do.
OutputSketch output_sketch(const std::filesystem::path& directory, std::uint64_t seed,
                           unsigned threads);

/// Adds one layer to `sketch` [inputs, 64], which the caller has filled with zeros.
/// `read_row(output, row)` must write row `output` of W_o [inputs] to `row`.
void add_layer_sketch(std::uint64_t seed, std::size_t layer, std::size_t hidden,
                      const std::function<void(std::size_t, float*)>& read_row,
                      std::span<float> sketch);

/// Reads the whole output projections. Throws as load_model_config() and Checkpoint::open() do.
OutputProjections read_output_projections(const std::filesystem::path& directory);

}  // namespace kvlab
