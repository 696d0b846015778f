// Who is taken of those that cannot be told apart: one rule for deploy, its confirmation and tune.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace kvlab {

/// A contender for deployment.
struct Candidate {
  bool ties;        ///< with the first
  double kv_bytes;  ///< keys and values that it really kept: live at a replay's end
  bool last_resort = false;
};

/// Whether it is chosen only where no other ties: `random`, which knows nothing.
inline bool is_last_resort(std::string_view policy) { return policy == "random"; }

/// Index of the one to take, of candidates with the best first: of those that tie with the first
/// the one that keeps least, and of equals the earlier. A last resort only where no other ties.
std::size_t preferred(std::span<const Candidate> candidates);

/// "keeps 3.1 × the bytes" where `kv_bytes` is more than `least`, which others at this budget keep;
/// else nothing.
std::string kept_more(double kv_bytes, double least);

}  // namespace kvlab
