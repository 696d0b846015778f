#include "sim/lanes/output_chain.hpp"

#include <algorithm>
#include <bit>

namespace kvlab {
namespace {

/// Restart where what was added and taken away exceeds this many times what is left: rounding
/// errors grow with the former.
constexpr float kMostGross = 4;

}  // namespace

void OutputChain::begin(const SampledRows& rows, std::size_t i) {
  rows_ = &rows;
  index_ = i;
  words_ = rows.query(i) / 64 + 1;
  bits_.assign(words_, 0);
  gross_.assign(rows.heads(), 0.0f);
  step_.resize(rows.heads());
  used_ = 0;
}

void OutputChain::move_to(const std::uint64_t* bits, const float* sums) {
  const auto common = [&](const std::uint64_t* a, const std::uint64_t* b) {
    return row_loops().common(a, b, words_);
  };
  const std::uint64_t live = common(bits, bits), differ = live +
                                                          common(bits_.data(), bits_.data()) -
                                                          2 * common(bits, bits_.data());
  if (used_ == links_.size()) links_.emplace_back();
  Link& link = links_[used_++];
  list(bits, live < differ || used_ == 1, link);
  if (!link.fresh && is_coarse(sums)) list(bits, true, link);
  for (std::uint32_t h = 0; h < rows_->heads(); ++h)
    gross_[h] = (link.fresh ? 0.0f : gross_[h]) + step_[h];
  link.values.assign(rows_->heads() * rows_->view().head_size, 0.0f);
  std::copy(bits, bits + words_, bits_.begin());
}

/// Lists the tokens that differ with their signed exponentials.
void OutputChain::list(const std::uint64_t* bits, bool fresh, Link& link) {
  link.fresh = fresh;
  link.tokens.clear();
  for (std::size_t w = 0; w < words_; ++w)
    for (std::uint64_t left = bits[w] ^ (fresh ? 0 : bits_[w]); left; left &= left - 1)
      link.tokens.push_back(static_cast<std::uint32_t>(w * 64) +
                            static_cast<std::uint32_t>(std::countr_zero(left)));
  const std::size_t count = link.tokens.size();
  link.weights.resize(rows_->heads() * count);
  std::fill(step_.begin(), step_.end(), 0.0f);
  for (std::uint32_t quad = 0; quad < rows_->quads(); ++quad)
    row_loops().list_weights(rows_->e(index_, quad), link.tokens.data(), count, bits,
                             link.weights.data() + quad * count * kQuad,
                             step_.data() + quad * kQuad);
}

bool OutputChain::is_coarse(const float* sums) const {
  for (std::uint32_t h = 0; h < rows_->view().group; ++h)
    if (gross_[h] + step_[h] > kMostGross * sums[h]) return true;
  return false;
}

void OutputChain::list_jobs(std::size_t link, std::vector<ValueJob>& jobs) {
  Link& own = links_[link];
  const std::size_t count = own.tokens.size();
  for (std::uint32_t quad = 0; quad < rows_->quads(); ++quad)
    jobs.push_back({own.weights.data() + quad * count * kQuad, own.tokens.data(), count,
                    own.values.data() + quad * kQuad * rows_->view().head_size, 0,
                    rows_->view().heads_in(quad)});
}

void OutputChain::finish() {
  for (std::size_t i = 1; i < used_; ++i)
    if (!links_[i].fresh)
      for (std::size_t d = 0; d < links_[i].values.size(); ++d)
        links_[i].values[d] += links_[i - 1].values[d];
}

}  // namespace kvlab
