// Capture: what a decoder computes goes into a trace as it goes.
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
/// The header of a trace of a model that runs on `device` in float32, nothing rounded after RoPE;
/// without the hashes. `options`: how it is run, for the record.
TraceHeader trace_header(const ModelConfig& config, const std::string& device,
                         nlohmann::json options);
/// The header of a trace that the CPU decoder writes.
TraceHeader trace_header(const Model& model, nlohmann::json options);

/// Feeds a TraceWriter, which must outlive it. Watch a decoder whose policy is `full`: a trace is
/// of the whole cache.
class Capture final : public DecoderObserver {
 public:
  /// `progress` is called with the number of tokens written so far; may be empty.
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
  std::size_t tokens_ = 0;  // of the append
  std::function<void(std::uint32_t)> progress_;
};

// What a replay takes of a checkpoint: its output projections, whole or in 64 random directions, in
// which an error of attention's outputs goes into the residual stream.

inline constexpr std::uint64_t kSketchSeed = 1;  ///< of captures

/// The sketch of a checkpoint's output projections, from its files. Throws what ModelConfig and
/// Checkpoint throw.
OutputSketch output_sketch(const std::filesystem::path& directory, std::uint64_t seed,
                           unsigned threads);

/// One layer of a sketch, [inputs, 64], to be added to zeros: read_row(output, row) puts a row
/// [inputs] of W_o.
void add_layer_sketch(std::uint64_t seed, std::size_t layer, std::size_t hidden,
                      const std::function<void(std::size_t, float*)>& read_row,
                      std::span<float> sketch);

/// The output projections themselves, likewise.
OutputProjections read_output_projections(const std::filesystem::path& directory);

}  // namespace kvlab
