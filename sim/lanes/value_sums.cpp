#include "sim/lanes/value_sums.hpp"

#include <algorithm>

#include "traces/base/numeric/softmax.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kRange = 64;      // tokens whose values stay in cache
constexpr std::size_t kLeastInRange = 8;  // fewer do not pay for loading the sums

void add_part(const HeadView& view, const ValueJob& job, std::size_t begin, std::size_t end) {
  if (begin >= end) return;
  const float* const v = job.tokens ? view.v : view.v + (job.first + begin) * view.kv_token_stride;
  row_loops().accumulate(job.weights + begin * kQuad, job.tokens ? job.tokens + begin : nullptr,
                         end - begin, job.heads, v, view.kv_token_stride, view.head_size, job.y);
}

std::uint32_t last_token(const ValueJob& job) {
  return job.tokens ? job.tokens[job.count - 1]
                    : job.first + static_cast<std::uint32_t>(job.count - 1);
}

/// By ranges of tokens, all jobs in each.
void add_together(const HeadView& view, std::span<const ValueJob> jobs) {
  std::vector<std::size_t> next(jobs.size());
  std::uint32_t last = 0;
  for (const ValueJob& job : jobs) last = std::max(last, last_token(job));
  for (std::uint32_t end = kRange; end < last + 1 + kRange; end += kRange)
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      const ValueJob& job = jobs[i];
      const std::size_t begin = next[i];
      if (job.tokens)
        next[i] = static_cast<std::size_t>(
            std::lower_bound(job.tokens + begin,
                             job.tokens + std::min(begin + std::size_t{kRange}, job.count), end) -
            job.tokens);
      else if (end > job.first)
        next[i] = std::min<std::size_t>(end - job.first, job.count);
      add_part(view, job, begin, next[i]);
    }
}

}  // namespace

void add_values(const HeadView& view, std::span<const ValueJob> jobs) {
  std::vector<ValueJob> dense;
  for (const ValueJob& job : jobs) {
    if (job.count == 0) continue;
    if (job.count * kRange >= kLeastInRange * (std::size_t{last_token(job)} + 1) &&
        job.count >= kRange)
      dense.push_back(job);
    else
      add_part(view, job, 0, job.count);
  }
  add_together(view, dense);
}

void SampledRows::add(std::uint32_t query, const GroupRows& rows) {
  if (used_ == rows_.size()) rows_.emplace_back();
  Row& row = rows_[used_++];
  quads_ = rows.quads();
  row.query = query;
  row.e.clear();
  for (std::uint32_t quad = 0; quad < quads_; ++quad) {
    const float* const e = rows.e(query, quad);
    row.e.insert(row.e.end(), e, e + (query + std::size_t{1}) * kQuad);
  }
  row.sums.assign(rows.sums(query), rows.sums(query) + rows.heads());
  row.outputs.assign(rows.heads() * view_.head_size, 0.0f);
  row.norms2.assign(rows.heads(), 0.0);
}

void SampledRows::list_jobs(std::vector<ValueJob>& jobs) {
  for (std::size_t i = 0; i < used_; ++i)
    for (std::uint32_t quad = 0; quad < quads_; ++quad)
      jobs.push_back({e(i, quad), nullptr, rows_[i].query + std::size_t{1},
                      rows_[i].outputs.data() + quad * kQuad * view_.head_size, 0,
                      view_.heads_in(quad)});
}

void SampledRows::finish() {
  const std::size_t dim = view_.head_size;
  const std::vector<float> nothing(dim);
  for (std::size_t i = 0; i < used_; ++i)
    for (std::uint32_t head = 0; head < view_.group; ++head) {
      float* const out = rows_[i].outputs.data() + head * dim;
      divide(out, dim, rows_[i].sums[head], out);
      rows_[i].norms2[head] = row_loops().distance2(out, nothing.data(), 1.0f, dim);
    }
}

}  // namespace kvlab
