#include "sim/lanes/top_sums.hpp"

#include <algorithm>
#include <bit>
#include <functional>

namespace kvlab {
namespace {

constexpr std::uint32_t kMostBins = 2048;

/// The smallest shift that brings `range` into `bins` bins with an eighth to spare.
std::uint32_t shift_for(std::uint32_t range, std::uint32_t bins) {
  const auto wanted = static_cast<std::uint32_t>(std::bit_width(range + range / 8));
  const auto width = static_cast<std::uint32_t>(std::bit_width(bins - 1));
  return wanted > width ? wanted - width : 0;
}

}  // namespace

TopSums::TopSums(std::vector<std::uint32_t> budgets, std::uint32_t group)
    : budgets_(std::move(budgets)),
      levels_(budgets_.size()),
      range_(group, std::uint32_t{1} << 27),  // sixteen powers of two
      ends_(kMostBins) {}

void TopSums::begin_row(std::uint32_t query, const GroupRows& rows) {
  tokens_ = query + 1;
  stride_ = (tokens_ + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
  bits_.resize(stride_ * rows.heads());
  bin_.resize(bits_.size());
  order_.resize(stride_);
  const std::uint32_t bins = std::min(std::bit_ceil(tokens_), kMostBins);
  for (std::uint32_t quad = 0; quad < rows.quads(); ++quad) {
    std::uint32_t most[kQuad] = {}, shift[kQuad] = {};
    for (std::uint32_t h = 0; h < kQuad && quad * kQuad + h < rows.group(); ++h) {
      most[h] = std::bit_cast<std::uint32_t>(rows.most(query)[quad * kQuad + h]);
      shift[h] = shift_for(range_[quad * kQuad + h], bins);
    }
    row_loops().bin(rows.e(query, quad), tokens_, most, shift, bins - 1,
                    bits_.data() + quad * kQuad * stride_, bin_.data() + quad * kQuad * stride_,
                    stride_);
  }
}

/// Puts a head's row into the order of its bins.
void TopSums::scatter(std::uint32_t head) {
  const std::uint32_t* const bits = bits_.data() + head * stride_;
  const std::uint16_t* const bin = bin_.data() + head * stride_;
  const std::uint32_t bins = std::min(std::bit_ceil(tokens_), kMostBins);
  std::fill_n(ends_.begin(), bins, 0u);
  for (std::uint32_t i = 0; i < tokens_; ++i) ++ends_[bin[i]];
  std::uint32_t begin = 0;
  for (std::uint32_t b = 0; b < bins; ++b) {
    const std::uint32_t size = ends_[b];
    ends_[b] = begin;
    begin += size;
  }
  for (std::uint32_t i = 0; i < tokens_; ++i) order_[ends_[bin[i]]++] = bits[i];
}

/// Sorts the bin that the `index`-th largest lies in.
void TopSums::sort_bin_of(std::uint32_t index) {
  while (ends_[sorted_] <= index) ++sorted_;
  const auto at = [&](std::uint32_t i) { return order_.begin() + static_cast<std::ptrdiff_t>(i); };
  std::sort(at(sorted_ == 0 ? 0 : ends_[sorted_ - 1]), at(ends_[sorted_]), std::greater<>());
}

void TopSums::take(std::uint32_t head) {
  scatter(head);
  sorted_ = 0;
  double sum = 0;
  std::uint32_t done = 0, sorted_end = 0;
  for (std::size_t l = 0; l < budgets_.size() && budgets_[l] <= tokens_; ++l) {
    const std::uint32_t budget = budgets_[l];
    if (budget > sorted_end) {
      sort_bin_of(budget - 1);
      sorted_end = ends_[sorted_];
    }
    float part[4] = {};
    for (; done + 4 <= budget; done += 4)
      for (std::uint32_t s = 0; s < 4; ++s) part[s] += std::bit_cast<float>(order_[done + s]);
    for (; done < budget; ++done) part[0] += std::bit_cast<float>(order_[done]);
    sum += static_cast<double>((part[0] + part[1]) + (part[2] + part[3]));
    levels_[l] = {sum, std::bit_cast<float>(order_[budget - 1])};
    range_[head] = std::max(order_[0], order_[budget - 1]) - order_[budget - 1];
  }
}

}  // namespace kvlab
