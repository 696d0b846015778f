// Compares the rates that a benchmark measures with limits of the GPU from the same run.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvlab {

/// A measured rate may exceed its limit by this factor, because both measurements vary by a few
/// percent.
constexpr double kMaxOfLimit = 1.05;

/// Thrown if a measured rate exceeds its limit, because such a rate cannot be right.
class LimitExceeded : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Returns `rate` / `limit`, both in `unit` (such as "bytes/s"). Throws LimitExceeded with both
/// numbers if the share is above kMaxOfLimit. In that case, either `what` did not do all its work,
/// or one of the two measurements was disturbed.
double share_of_limit(const std::string& what, double rate, double limit, const char* unit);

/// The number of pairs of a query and a token that the query sees, in a prompt of `tokens` tokens.
/// The prompt is appended `append` tokens at a time (0: all at once) to a cache that keeps `budget`
/// tokens (0: all). `window` is the length of the sliding window (0: none).
double attended_pairs(std::uint32_t tokens, std::uint32_t window, std::uint32_t append,
                      std::uint32_t budget);

}  // namespace kvlab
