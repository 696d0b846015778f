// Rows of attention over tokens as the rungs of ladders keep them.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "policies/rungs/ladder.hpp"
#include "sim/lanes/group_rows.hpp"

namespace kvlab {

/// A KV head's tokens, each as one rung keeps it: a code is a pure function of a token and the
/// forms that it comes down through, so all configurations share it.
struct RungRow {
  GroupRows rows;             ///< of coded keys
  std::vector<float> values;  ///< [token, dim], behind the butterflies
};

class RungRows {
 public:
  /// `view`'s data and `rope` must outlive this. Throws std::invalid_argument where heads are no
  /// whole blocks of channels.
  RungRows(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic);

  /// By rung of a ladder; null: its tokens are exact.
  std::vector<RungRow*> of(std::span<const RungSlots> ladder);
  /// The rows of queries [first, first + count), of all rungs that were asked for.
  void compute(std::uint32_t first, std::uint32_t count);

 private:
  std::unique_ptr<RungRow> code(const std::vector<const KvForm*>& way) const;

  HeadView view_;
  const RopeTable& rope_;
  HeadArithmetic arithmetic_;
  std::map<std::vector<const KvForm*>, std::unique_ptr<RungRow>> rows_;  // by the way down
};

}  // namespace kvlab
