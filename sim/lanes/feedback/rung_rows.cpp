#include "sim/lanes/feedback/rung_rows.hpp"

#include "sim/coded_rows.hpp"

namespace kvlab {

RungRows::RungRows(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic)
    : view_(view), rope_(rope), arithmetic_(arithmetic) {
  check_coded_heads(view.head_size);
  view_.projection = nullptr;  // changes are of the full cache's rows
}

std::vector<RungRow*> RungRows::of(std::span<const RungSlots> ladder) {
  std::vector<RungRow*> by_rung;
  for (std::size_t rung = 0; rung < ladder.size(); ++rung) {
    const auto way = way_down(ladder, -1, static_cast<int>(rung));
    auto& row = rows_[way];
    if (!row && !way.empty()) row = code(way);
    by_rung.push_back(row.get());
  }
  return by_rung;
}

std::unique_ptr<RungRow> RungRows::code(const std::vector<const KvForm*>& way) const {
  const std::size_t dim = view_.head_size;
  std::vector<float> keys(view_.tokens * dim), values(keys.size());
  for (std::uint32_t token = 0; token < view_.tokens; ++token) {
    const std::span<float> key = std::span(keys).subspan(token * dim, dim),
                           value = std::span(values).subspan(token * dim, dim);
    take_token(view_, rope_, arithmetic_, token, key, value);
    code_token(way, key, value);
  }
  return std::make_unique<RungRow>(
      RungRow{GroupRows(view_, rope_, arithmetic_, keys), std::move(values)});
}

void RungRows::compute(std::uint32_t first, std::uint32_t count) {
  for (const auto& [way, row] : rows_)
    if (row) row->rows.compute(first, count);
}

}  // namespace kvlab
