// What a benchmark's rates are held to: the limits that it measured in the same run.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvlab {

/// Times of a GPU vary by a few percent, those of the limit too: a share up to this is accepted.
constexpr double kMaxOfLimit = 1.05;

/// A metric that cannot be right.
class LimitExceeded : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// `rate` as a share of `limit`, both in `unit` (such as "bytes/s"). Throws LimitExceeded, which
/// names both, where it is more than kMaxOfLimit: then `what` did not do all its work, or one of
/// the two was disturbed.
double share_of_limit(const std::string& what, double rate, double limit, const char* unit);

/// Pairs of a query and a token that it sees in a prompt of `tokens`, which comes `append` at a
/// time (0: at once), into a cache that keeps `budget` tokens (0: all), with a sliding window (0:
/// none).
double attended_pairs(std::uint32_t tokens, std::uint32_t window, std::uint32_t append,
                      std::uint32_t budget);

}  // namespace kvlab
