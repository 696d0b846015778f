// A RoPE table for a sequence whose length is not known in advance.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>

#include "traces/base/numeric/rope.hpp"

namespace kvlab {

/// A table of cos and sin that grows with the sequence, by doubling.
class GrowingRope {
 public:
  explicit GrowingRope(Rope rope) : rope_(std::move(rope)) {}

  const RopeTable& covering(std::uint32_t positions) {
    const std::uint32_t doubled = table_ ? 2 * table_->positions() : 1024;
    if (!table_ || table_->positions() < positions)
      table_.emplace(rope_, std::max(positions, doubled));
    return *table_;
  }

 private:
  Rope rope_;
  std::optional<RopeTable> table_;
};

}  // namespace kvlab
