#include "engine/loop/deploy/candidates.hpp"

#include <fmt/format.h>

#include <tuple>

namespace kvlab {

std::size_t preferred(std::span<const Candidate> candidates) {
  const auto key = [&](std::size_t i) {
    const Candidate& candidate = candidates[i];
    return std::tuple(!candidate.ties, candidate.last_resort, candidate.kv_bytes);
  };
  std::size_t best = 0;
  for (std::size_t i = 1; i < candidates.size(); ++i)
    if (key(i) < key(best)) best = i;
  return best;
}

std::string kept_more(double kv_bytes, double least) {
  if (!(kv_bytes > least)) return "";
  return fmt::format("keeps {:.3g} × the bytes", kv_bytes / least);
}

}  // namespace kvlab
