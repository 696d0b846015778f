// Which tokens a query requests of a live set: that depends on the largest exponential of the set
// and, but for rounding, on nothing else. So the tokens that a head requests are found once for
// each such largest one, as bits, and serve every configuration.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/lanes/group_rows.hpp"

namespace kvlab {

class RequestLevels {
 public:
  /// The tokens of `live` (bits; those behind the query do not count) that some head of the group
  /// requests, most[h] being a head's largest exponential there: bits, [query / 64 + 1]. Null where
  /// rounding decides or a head has next to nothing left. A query's calls come together.
  const std::uint64_t* ask(std::uint32_t query, GroupRows& rows, const float* most,
                           const std::uint64_t* live);

 private:
  /// What a head requests where `most` is the largest exponential.
  struct Level {
    float most;
    bool sure;
    std::vector<std::uint64_t> bits;
  };
  struct Head {
    std::vector<Level> levels;  // room: only `used` of them
    std::size_t used = 0;
  };
  void begin_row(std::uint32_t query, std::uint32_t group);
  static void add_whole(std::uint32_t query, std::uint32_t head, Head& own, GroupRows& rows);
  const Level& level(std::uint32_t query, std::uint32_t head, float most, GroupRows& rows);

  std::uint32_t query_ = ~std::uint32_t{0};
  std::vector<Head> heads_;  // [group]
  std::vector<std::uint64_t> asked_;
};

}  // namespace kvlab
