// Attention over tokens that a ladder keeps in codes: the readable reference.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "policies/live_set.hpp"
#include "sim/head_view.hpp"
#include "sim/shared_rows.hpp"

namespace kvlab {

/// One KV head of one configuration. A code is a pure function of a token and its rung: it is made
/// through the codes of the rungs above, when it is first looked at.
class CodedRows {
 public:
  /// `view`'s data and `rope` must outlive this. Throws std::invalid_argument where heads are no
  /// whole blocks of channels.
  CodedRows(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic);

  /// Before a query attends: the live tokens, the oldest `visible` of which it sees, all of
  /// `exact_from` on in 16 bit.
  void place(const LiveSet& live, std::uint32_t visible, std::uint32_t exact_from);
  /// Whether no token that the query sees is coded.
  bool all_exact() const { return coded_.empty(); }
  /// To [visible], by age.
  void logits(std::uint32_t query, std::uint32_t head, SharedRows& rows, float* to);
  /// Adds p [visible] times the values to `out` [dim].
  void accumulate(std::span<const float> p, std::span<float> out);

 private:
  struct Code {
    std::vector<float> key, value;  // [dim], behind the butterflies
  };
  const Code& code_of(std::uint32_t position, std::size_t rung);

  HeadView view_;
  const RopeTable& rope_;
  HeadArithmetic arithmetic_;
  std::span<const RungSlots> ladder_;
  std::vector<std::map<std::uint32_t, Code>> codes_;       // [rung], by position
  std::vector<std::uint32_t> exact_, exact_ages_, coded_;  // positions; ages
  std::vector<const Code*> code_;                          // as coded_
  std::vector<float> some_;
};

}  // namespace kvlab
