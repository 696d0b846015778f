// A model's calibration: how sensitive its predictions are to the output of each query head, which
// `kvlab calibrate` measures and `calibrated_error` is made of. See docs/calibration.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "traces/trace.hpp"

namespace kvlab {

struct Calibration {
  std::string model, weights_xxh3;
  std::uint32_t layers = 0, query_heads = 0;
  /// [layer, query head]: half of it times the squared norm of an error is nats; and its error.
  std::vector<double> sensitivity, standard_error;
  JsonValue measured;      ///< how, for people
  std::string path, xxh3;  ///< of the file that it was read from

  std::span<const double> of_layer(std::uint32_t layer) const {
    return std::span(sensitivity).subspan(std::size_t{layer} * query_heads, query_heads);
  }
};

std::string calibration_text(const Calibration& calibration);
/// Throws std::runtime_error that names the file: missing, not valid, a later format, a number that
/// is not finite or negative, as many heads as it does not say.
Calibration read_calibration(const std::filesystem::path& path);
/// Throws std::invalid_argument unless the trace is of the calibration's model.
void check_calibration(const Calibration& calibration, const TraceReader& trace);

}  // namespace kvlab
