#include "sim/lanes/request_levels.hpp"

#include "traces/base/numeric/softmax.hpp"

namespace kvlab {

const std::uint64_t* RequestLevels::ask(std::uint32_t query, GroupRows& rows, const float* most,
                                        const std::uint64_t* live) {
  const std::size_t words = query / 64 + 1;
  if (query != query_) begin_row(query, rows.group());
  asked_.assign(words, 0);
  for (std::uint32_t head = 0; head < rows.group(); ++head) {
    if (most[head] < kSharedSumFloor) return nullptr;
    const Level& own = level(query, head, most[head], rows);
    if (!own.sure) return nullptr;
    for (std::size_t w = 0; w < words; ++w) asked_[w] |= own.bits[w] & live[w];
  }
  return asked_.data();
}

void RequestLevels::begin_row(std::uint32_t query, std::uint32_t group) {
  query_ = query;
  heads_.resize(group);
  for (Head& head : heads_) head.used = 0;
}

const RequestLevels::Level& RequestLevels::level(std::uint32_t query, std::uint32_t head,
                                                 float most, GroupRows& rows) {
  Head& own = heads_[head];
  if (own.used == 0) add_whole(query, head, own, rows);
  for (std::size_t l = 0; l < own.used; ++l)
    if (!(own.levels[l].most < most) && !(own.levels[l].most > most)) return own.levels[l];
  if (own.used == own.levels.size()) own.levels.emplace_back();
  Level& fresh = own.levels[own.used++];
  fresh.most = most;
  fresh.bits.resize(query / 64 + 1);
  fresh.sure = rows.flag_level(query, head, most, fresh.bits.data());
  return fresh;
}

/// The whole row's level, from what it requests.
void RequestLevels::add_whole(std::uint32_t query, std::uint32_t head, Head& own, GroupRows& rows) {
  if (own.levels.empty()) own.levels.emplace_back();
  Level& whole = own.levels[own.used++];
  const std::uint64_t* const bits = rows.request_bits(query) + head * rows.words();
  whole.most = rows.most(query)[head];
  whole.sure = rows.surely_requested(query, head);
  whole.bits.assign(bits, bits + query / 64 + 1);
  if (rows.requests_itself(query, head)) whole.bits.back() |= std::uint64_t{1} << query % 64;
}

}  // namespace kvlab
