#include "sim/config_batches/topk_config_batch.hpp"

#include <algorithm>
#include <bit>
#include <functional>

namespace kvlab {
namespace {

constexpr std::uint32_t kMaxBins = 2048;

/// The smallest right shift by which 9/8 of `range` becomes less than `bins`, a power of two. The
/// additional eighth is a margin.
std::uint32_t shift_for(std::uint32_t range, std::uint32_t bins) {
  const auto wanted = static_cast<std::uint32_t>(std::bit_width(range + range / 8));
  const auto width = static_cast<std::uint32_t>(std::bit_width(bins - 1));
  return wanted > width ? wanted - width : 0;
}

/// Uses insertion sort for few elements, because bins usually have few.
void sort_descending(std::uint32_t* x, std::size_t count) {
  constexpr std::size_t kFew = 24;
  if (count > kFew) return std::sort(x, x + count, std::greater<>());
  for (std::size_t i = 1; i < count; ++i) {
    const std::uint32_t own = x[i];
    std::size_t to = i;
    for (; to > 0 && x[to - 1] < own; --to) x[to] = x[to - 1];
    x[to] = own;
  }
}

std::vector<std::uint32_t> budgets_of(const BatchedConfigs& configs) {
  std::vector<std::uint32_t> budgets;
  for (const ResolvedConfig* config : configs) budgets.push_back(config->budget_tokens);
  std::sort(budgets.begin(), budgets.end());
  budgets.erase(std::unique(budgets.begin(), budgets.end()), budgets.end());
  return budgets;
}

}  // namespace

TopSums::TopSums(std::vector<std::uint32_t> budgets)
    : budgets_(std::move(budgets)), levels_(budgets_.size()), ends_(kMaxBins + kRestBins) {}

void TopSums::begin_row(std::uint32_t query, const GroupRows& rows) {
  tokens_ = query + 1;
  stride_ = whole_blocks(tokens_);
  bins_ = std::min(std::bit_ceil(tokens_), kMaxBins);
  bits_.resize(stride_ * rows.heads());
  bin_.resize(bits_.size());
  order_.resize(stride_);
  largest_.assign(rows.heads(), 0);
  shift_.assign(rows.heads(), 0);
  for (std::uint32_t h = 0; h < rows.group(); ++h) {
    largest_[h] = std::bit_cast<std::uint32_t>(rows.max_exponentials(query)[h]);
    shift_[h] = shift_for(
        range_of(rows.e(query, h / kHeadGroupSize) + h % kHeadGroupSize, largest_[h]), bins_);
  }
  for (std::uint32_t head_group = 0; head_group < rows.head_groups(); ++head_group)
    row_loops().bin(rows.e(query, head_group), tokens_,
                    largest_.data() + head_group * kHeadGroupSize,
                    shift_.data() + head_group * kHeadGroupSize, bins_,
                    bits_.data() + head_group * kHeadGroupSize * stride_,
                    bin_.data() + head_group * kHeadGroupSize * stride_, stride_);
}

/// Estimates the difference between the bit patterns, as integers, of the largest exponential and
/// of the smallest one that a budget includes. Reads only a sample of the tokens, so it adds a
/// margin.
std::uint32_t TopSums::range_of(const float* e, std::uint32_t max_word) const {
  constexpr std::size_t kSample = 32;
  constexpr double kMargin = 0.16, kMax = 0.98;  // shares of the tokens
  std::uint32_t sample[kSample];
  for (std::size_t i = 0; i < kSample; ++i)
    sample[i] = std::bit_cast<std::uint32_t>(e[i * tokens_ / kSample * kHeadGroupSize]);
  const auto above = std::upper_bound(budgets_.begin(), budgets_.end(), tokens_);
  const double requested = above == budgets_.begin() ? 0 : *(above - 1),
               share = std::min(requested / tokens_ + kMargin, kMax);
  const auto index = static_cast<std::ptrdiff_t>(share * (kSample - 1));
  std::nth_element(sample, sample + index, sample + kSample, std::greater<>());
  return max_word - sample[index];
}

/// Sorts the exponentials of a head's row by bin.
void TopSums::scatter(std::uint32_t head) {
  const std::uint32_t* const bits = bits_.data() + head * stride_;
  const std::uint16_t* const bin = bin_.data() + head * stride_;
  const std::uint32_t bins = bins_ + static_cast<std::uint32_t>(kRestBins);
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

/// Sorts the bin that contains the `index`-th largest value, and returns the index at which the bin
/// ends. All values that are too small for the bins count as one bin.
std::uint32_t TopSums::sort_bin_of(std::uint32_t head, std::uint32_t index) {
  const std::uint32_t bin = (largest_[head] - order_[index]) >> shift_[head];
  const std::uint32_t begin = bin == 0 ? 0 : ends_[std::min(bin, bins_) - 1],
                      end = bin < bins_ ? ends_[bin] : tokens_;
  sort_descending(order_.data() + begin, end - begin);
  return end;
}

void TopSums::take(std::uint32_t head) {
  scatter(head);
  double sum = 0;
  std::uint32_t done = 0, sorted_end = 0;
  for (std::size_t l = 0; l < budgets_.size() && budgets_[l] <= tokens_; ++l) {
    const std::uint32_t budget = budgets_[l];
    if (budget > sorted_end) sorted_end = sort_bin_of(head, budget - 1);
    float part[4] = {};
    for (; done + 4 <= budget; done += 4)
      for (std::uint32_t s = 0; s < 4; ++s) part[s] += std::bit_cast<float>(order_[done + s]);
    for (; done < budget; ++done) part[0] += std::bit_cast<float>(order_[done]);
    sum += static_cast<double>((part[0] + part[1]) + (part[2] + part[3]));
    levels_[l] = {sum, std::bit_cast<float>(order_[budget - 1])};
  }
}

TopkConfigBatch::TopkConfigBatch(BatchedConfigs configs, std::uint32_t group,
                                 const MeasuredQueries& measured)
    : configs_(std::move(configs)),
      measure_(&measured, configs_.size(), {.group = group}),
      sums_(budgets_of(configs_)) {
  const auto& budgets = sums_.budgets();
  for (const ResolvedConfig* config : configs_)
    level_.push_back(static_cast<std::size_t>(
        std::lower_bound(budgets.begin(), budgets.end(), config->budget_tokens) - budgets.begin()));
}

void TopkConfigBatch::attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) {
  for (std::uint32_t query = first; query < first + count; ++query)
    if (wants_row(query)) attend_query(query, rows);
}

void TopkConfigBatch::attend_query(std::uint32_t query, GroupRows& rows) {
  measure_.begin_query(query);
  bool cut = false;
  for (std::size_t c = 0; c < configs_.size(); ++c) cut |= !keeps_all(c, query);
  if (cut) sums_.begin_row(query, rows);
  for (std::uint32_t head = 0; head < rows.group(); ++head) {
    if (cut) sums_.take(head);
    measure(query, head, rows);
  }
}

/// A token is requested if its exponential is at least a threshold, so requested tokens come first
/// in the sorted row. The query's own token does not count as requested, but if its exponential is
/// at least the threshold, it is among these first tokens.
void TopkConfigBatch::measure(std::uint32_t query, std::uint32_t head, GroupRows& rows) {
  const float own =
      rows.e(query, head / kHeadGroupSize)[query * kHeadGroupSize + head % kHeadGroupSize];
  const auto full = static_cast<double>(rows.sums(query)[head]);
  const GroupRows::Requests wanted = rows.requests(query);
  const bool own_asks = own >= wanted.request_threshold[head];
  const std::uint32_t leading = wanted.count[head] + (own_asks ? 1 : 0);
  for (std::size_t c = 0; c < configs_.size(); ++c) {
    QueryResult result{.recall = 1,
                       .position = query,
                       .live = query + 1,
                       .wanted = wanted.count[head],
                       .missed = 0};
    if (!keeps_all(c, query)) {
      const TopSums::Level& level = sums_.level(level_[c]);
      result.recall = std::min(1.0, level.sum / full);
      result.live = configs_[c]->budget_tokens;
      const bool keeps_own = own_asks && own >= level.min_exponential;
      result.missed = result.wanted - (std::min(leading, result.live) - (keeps_own ? 1 : 0));
    }
    measure_.add(c, head, result);
  }
}

std::vector<HeadOutcome> TopkConfigBatch::outcomes() {
  std::vector<HeadOutcome> all;
  for (HeadStats& stats : measure_.take()) all.push_back({std::move(stats)});
  return all;
}

}  // namespace kvlab
