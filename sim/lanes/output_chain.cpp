#include "sim/lanes/output_chain.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace kvlab {
namespace {

/// Restart where what was added and taken away exceeds this many times what is left: rounding
/// errors grow with the former.
constexpr float kMostGross = 4;

}  // namespace

void OutputChain::begin(std::uint32_t query, const GroupRows& rows) {
  rows_ = &rows;
  query_ = query;
  words_ = query / 64 + 1;
  bits_.assign(words_, 0);
  sum_.assign(rows.heads() * rows.view().head_size, 0.0f);
  gross_.assign(rows.heads(), 0.0f);
  step_.resize(rows.heads());
}

const float* OutputChain::move_to(const std::uint64_t* bits, const float* sums) {
  std::size_t differ = 0, live = 0;
  for (std::size_t w = 0; w < words_; ++w) {
    differ += static_cast<std::size_t>(std::popcount(bits[w] ^ bits_[w]));
    live += static_cast<std::size_t>(std::popcount(bits[w]));
  }
  list(bits, live < differ);
  if (live >= differ && is_coarse(sums)) list(bits, true);
  apply();
  std::copy(bits, bits + words_, bits_.begin());
  return sum_.data();
}

/// Lists the step's tokens with their signed exponentials.
void OutputChain::list(const std::uint64_t* bits, bool from_nothing) {
  if (from_nothing) {
    std::fill(bits_.begin(), bits_.end(), std::uint64_t{0});
    std::fill(sum_.begin(), sum_.end(), 0.0f);
    std::fill(gross_.begin(), gross_.end(), 0.0f);
  }
  tokens_.clear();
  for (std::size_t w = 0; w < words_; ++w)
    for (std::uint64_t left = bits[w] ^ bits_[w]; left; left &= left - 1)
      tokens_.push_back(static_cast<std::uint32_t>(w * 64) +
                        static_cast<std::uint32_t>(std::countr_zero(left)));
  const std::size_t count = tokens_.size();
  weights_.resize(rows_->heads() * count);
  std::fill(step_.begin(), step_.end(), 0.0f);
  for (std::uint32_t quad = 0; quad < rows_->quads(); ++quad) {
    const float* e = rows_->e(query_, quad);
    float* to = weights_.data() + quad * count * kQuad;
    float* magnitude = step_.data() + quad * kQuad;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t token = tokens_[i];
      const bool joins = bits[token / 64] >> token % 64 & 1;
      for (std::size_t h = 0; h < kQuad; ++h) {
        const float x = e[token * kQuad + h];
        to[i * kQuad + h] = joins ? x : -x;
        magnitude[h] += x;
      }
    }
  }
}

bool OutputChain::is_coarse(const float* sums) {
  for (std::uint32_t h = 0; h < rows_->group(); ++h)
    if (gross_[h] + step_[h] > kMostGross * sums[h]) return true;
  return false;
}

void OutputChain::apply() {
  const HeadView& view = rows_->view();
  const std::size_t count = tokens_.size();
  for (std::uint32_t quad = 0; quad < rows_->quads(); ++quad)
    row_loops().accumulate(weights_.data() + quad * count * kQuad, tokens_.data(), count, view.v,
                           view.kv_token_stride, view.head_size,
                           sum_.data() + quad * kQuad * view.head_size);
  for (std::uint32_t h = 0; h < rows_->heads(); ++h) gross_[h] += step_[h];
}

}  // namespace kvlab
