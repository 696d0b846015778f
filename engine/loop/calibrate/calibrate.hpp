// `kvlab calibrate`: how far the next token's distribution moves when one query head's output does,
// measured by noise, without gradients. See docs/calibration.md.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/checkpoint/model.hpp"
#include "sim/calibration.hpp"

namespace kvlab {

struct CalibrateOptions {
  double noise = 0.1;  ///< its root mean square, by that of the head's own output
  std::uint64_t seed = 1;
  unsigned threads = 1;
  std::function<void(double)> progress;  ///< may be empty
};

/// What the second size of noise says, half the first, at one head of each layer.
struct QuadraticCheck {
  double ratio = 1;         ///< of the sums of sensitivities, half the noise by the whole
  double worst = 1;         ///< the one of a head that is furthest from 1
  std::uint32_t layer = 0;  ///< of that head
};

struct CalibrateResult {
  Calibration calibration;  ///< without how it was measured
  QuadraticCheck check;
  std::uint64_t tokens = 0, blocks = 0;  ///< that were scored
};

/// Runs each sequence with the full cache, and again with Gaussian noise in one query head's output
/// (before the output projection) at every position, for every head; layers above are exact. A
/// head's sensitivity is 2 KL / E‖noise‖², its standard error one over blocks of 64 tokens. The
/// result does not depend on the number of threads. Throws std::invalid_argument: fewer than two
/// blocks of tokens, a noise that is not in (0, 1].
CalibrateResult calibrate(const Model& model,
                          const std::vector<std::vector<std::int32_t>>& sequences,
                          const CalibrateOptions& options);

}  // namespace kvlab
