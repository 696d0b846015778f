#include "sim/config_batches/output_chain.hpp"

#include <algorithm>
#include <bit>

namespace kvlab {
namespace {

/// The chain restarts from the empty set if the magnitudes that were added and subtracted since the
/// last restart sum to more than this multiple of the current sum. The rounding error grows with
/// the sum of these magnitudes.
constexpr float kMaxGross = 4;

}  // namespace

const float* OutputChain::move_to(std::uint32_t query, const GroupRows& rows,
                                  const std::uint64_t* bits, const float* sums) {
  const HeadView& view = rows.view();
  const std::size_t words = query / 64 + 1, size = rows.heads() * std::size_t{view.head_size};
  const bool first = query != query_;
  if (first) {
    query_ = query;
    bits_.assign(words, 0);
    gross_.assign(rows.heads(), 0.0f);
    step_.resize(rows.heads());
  }
  next_.assign(bits, bits + words);
  next_.back() &= ~std::uint64_t{0} >> (63 - query % 64);
  const auto common = [&](const auto& a, const auto& b) {
    return row_loops().common(a.data(), b.data(), words);
  };
  const std::uint64_t live = common(next_, next_),
                      differ = live + common(bits_, bits_) - 2 * common(next_, bits_);
  bool fresh = live < differ || first;
  list(rows, fresh);
  if (!fresh && is_coarse(rows, sums)) list(rows, fresh = true);
  for (std::uint32_t h = 0; h < rows.heads(); ++h)
    gross_[h] = (fresh ? 0.0f : gross_[h]) + step_[h];
  difference_.assign(size, 0.0f);
  for (std::uint32_t head_group = 0; head_group < rows.head_groups(); ++head_group)
    row_loops().accumulate(weights_.data() + head_group * tokens_.size() * kHeadGroupSize,
                           tokens_.data(), tokens_.size(), view.heads_in(head_group), view.v,
                           view.kv_token_stride, view.head_size,
                           difference_.data() + head_group * kHeadGroupSize * view.head_size);
  if (fresh) sums_.assign(size, 0.0f);
  for (std::size_t d = 0; d < size; ++d) sums_[d] += difference_[d];
  bits_.swap(next_);
  return sums_.data();
}

/// Lists the tokens that are in only one of two sets, the previous and the next, and their
/// exponentials. The exponentials of tokens to remove are negative. If `fresh` is true, the
/// previous set is treated as empty.
void OutputChain::list(const GroupRows& rows, bool fresh) {
  tokens_.clear();
  for (std::size_t w = 0; w < next_.size(); ++w)
    for (std::uint64_t left = next_[w] ^ (fresh ? 0 : bits_[w]); left; left &= left - 1)
      tokens_.push_back(static_cast<std::uint32_t>(w * 64) +
                        static_cast<std::uint32_t>(std::countr_zero(left)));
  weights_.resize(rows.heads() * tokens_.size());
  std::fill(step_.begin(), step_.end(), 0.0f);
  for (std::uint32_t head_group = 0; head_group < rows.head_groups(); ++head_group)
    row_loops().list_weights(rows.e(query_, head_group), tokens_.data(), tokens_.size(),
                             next_.data(),
                             weights_.data() + head_group * tokens_.size() * kHeadGroupSize,
                             step_.data() + head_group * kHeadGroupSize);
}

bool OutputChain::is_coarse(const GroupRows& rows, const float* sums) const {
  for (std::uint32_t h = 0; h < rows.group(); ++h)
    if (gross_[h] + step_[h] > kMaxGross * sums[h]) return true;
  return false;
}

}  // namespace kvlab
