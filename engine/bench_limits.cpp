#include "engine/bench_limits.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace kvlab {

double share_of_limit(const std::string& what, double rate, double limit, const char* unit) {
  const double share = rate / limit;
  if (!(share <= kMaxOfLimit))
    throw LimitExceeded(
        fmt::format("{}: {:.4g} {} is {:.0f}% of the limit of {:.4g} {} that this run measured, "
                    "which is impossible; check this build with `kvlab verify` on this GPU, and "
                    "make sure that nothing else runs on the GPU",
                    what, rate, unit, 100 * share, limit, unit));
  return share;
}

double attended_pairs(std::uint32_t tokens, std::uint32_t window, std::uint32_t append,
                      std::uint32_t budget) {
  const std::uint32_t chunk = append == 0 ? tokens : append;
  double pairs = 0;
  for (std::uint32_t token = 0; token < tokens; ++token) {
    const std::uint32_t first = token - token % chunk;
    const std::uint32_t kept = budget == 0 ? first : std::min(first, budget);
    const std::uint32_t visible = kept + (token - first) + 1;
    pairs += window == 0 ? visible : std::min(visible, window);
  }
  return pairs;
}

}  // namespace kvlab
