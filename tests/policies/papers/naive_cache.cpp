#include "tests/policies/papers/naive_cache.hpp"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "sim/shared_rows.hpp"
#include "tests/catch.hpp"
#include "traces/base/numeric/softmax.hpp"

namespace kvlab::papers {
namespace {

std::uint64_t fixed_point(double p) {
  return static_cast<std::uint64_t>(std::nearbyint(p * 4294967296.0));
}

/// Marks the tokens that the query heads request: those with at least `threshold` times the row's
/// largest probability.
void mark_requests(Query& query, double threshold) {
  const auto limit = static_cast<std::uint64_t>(std::lround(threshold * 65536));
  query.requested.assign(query.seen.size(), false);
  for (const auto& row : query.p) {
    const std::uint64_t row_max = fixed_point(*std::max_element(row.begin(), row.end()));
    for (std::size_t token = 0; token < row.size(); ++token)
      if (query.seen[token] && fixed_point(row[token]) * 65536 >= limit * row_max)
        query.requested[token] = true;
  }
}

class NaiveCache {
 public:
  NaiveCache(const Formula& formula, const TraceReader& trace, const CacheConfig& config,
             std::uint32_t budget, Moment at)
      : formula_(formula), trace_(trace), config_(config), budget_(budget), at_(at) {
    load();
  }

  std::vector<std::vector<std::uint32_t>> run() {
    const RopeTable rope(trace_.header().rope, trace_.tokens());
    SharedRows rows(view_, rope, arithmetic_);
    rows_ = &rows;
    for (const Segment& segment : trace_.segments()) {
      const std::uint32_t end = segment.start + segment.tokens;
      std::uint32_t step = 1;
      if (segment.kind == SegmentKind::prompt)
        step = config_.prefill.chunk ? config_.prefill.chunk : segment.tokens;
      for (std::uint32_t first = segment.start; first < end; first += step)
        append(first, std::min(step, end - first));
    }
    return kept_;
  }

 private:
  void load() {
    const auto& shape = trace_.shape();
    const std::size_t head = std::size_t{trace_.tokens()} * shape.head_size;
    q_.resize(shape.group() * head), k_.resize(head), v_.resize(head);
    for (std::uint32_t g = 0; g < shape.group(); ++g)
      trace_.read(Part::q, at_.layer, at_.kv_head * shape.group() + g, 0, trace_.tokens(),
                  q_.data() + g * head);
    trace_.read(Part::k, at_.layer, at_.kv_head, 0, trace_.tokens(), k_.data());
    trace_.read(Part::v, at_.layer, at_.kv_head, 0, trace_.tokens(), v_.data());
    view_ = {.tokens = trace_.tokens(),
             .group = shape.group(),
             .head_size = shape.head_size,
             .q = q_.data(),
             .q_head_stride = head,
             .q_token_stride = shape.head_size,
             .k = k_.data(),
             .v = v_.data(),
             .kv_token_stride = shape.head_size};
    arithmetic_.softmax_scale = trace_.header().softmax_scale;
    if (trace_.header().rounding == Rounding::model_dtype) arithmetic_.rounding = shape.dtype;
  }

  void append(std::uint32_t first, std::uint32_t count) {
    evict_to_budget(first);
    for (std::uint32_t t = first; t < first + count; ++t) {
      live_.push_back(t);
      attend(t);
    }
    history_.appends.push_back({first, count});
  }

  void evict_to_budget(std::uint32_t now) {
    if (live_.size() < budget_) return;
    const std::uint32_t sinks = config_.policy.sinks.resolve(budget_);
    const std::uint32_t recent = config_.policy.recent.resolve(budget_);
    at_.now = now, at_.live = static_cast<std::uint32_t>(live_.size());
    std::vector<std::tuple<int, Worth, std::uint32_t>> order;
    for (const std::uint32_t token : live_)
      order.emplace_back(token < sinks          ? 2
                         : token + recent > now ? 1
                                                : 0,
                         formula_(history_, token, at_), token);
    std::sort(order.begin(), order.end());
    live_.clear();
    for (std::size_t i = order.size() - (budget_ - 1); i < order.size(); ++i)
      live_.push_back(std::get<2>(order[i]));
    std::sort(live_.begin(), live_.end());
  }

  void attend(std::uint32_t t) {
    if (t >= block_end_) {
      const std::uint32_t count = std::min(rows_->block_queries(), trace_.tokens() - t);
      rows_->compute(t, count);
      block_end_ = t + count;
    }
    kept_.push_back(live_);
    Query& query = history_.queries.emplace_back();
    query.seen.resize(t + 1);
    for (const std::uint32_t token : live_) query.seen[token] = true;
    for (std::uint32_t head = 0; head < view_.group; ++head) {
      const std::span<const float> e = rows_->row(t, head).e;
      std::vector<float> p(live_.size());
      for (std::size_t i = 0; i < p.size(); ++i) p[i] = e[live_[i]];
      const float sum = lane_sum(p.data(), p.size());
      REQUIRE(sum >= kSharedSumFloor);  // if this fails, change the data
      divide(p.data(), p.size(), sum, p.data());
      auto& row = query.p.emplace_back(t + 1);
      for (std::size_t i = 0; i < p.size(); ++i) row[live_[i]] = p[i];
    }
    mark_requests(query, config_.threshold);
  }

  const Formula& formula_;
  const TraceReader& trace_;
  const CacheConfig& config_;
  std::uint32_t budget_;
  Moment at_;
  std::vector<float> q_, k_, v_;
  HeadView view_;
  HeadArithmetic arithmetic_;
  SharedRows* rows_ = nullptr;
  std::uint32_t block_end_ = 0;
  std::vector<std::uint32_t> live_;
  std::vector<std::vector<std::uint32_t>> kept_;
  History history_;
};

}  // namespace

std::uint64_t Query::mass(std::uint32_t token, float weight) const {
  std::uint64_t sum = 0;
  for (const auto& row : p)
    sum += fixed_point(static_cast<double>(weight) * static_cast<double>(row[token]));
  return sum;
}

std::vector<std::vector<std::uint32_t>> kept_by(const Formula& formula, const TraceReader& trace,
                                                std::uint32_t sequence, const CacheConfig& config,
                                                std::uint32_t layer, std::uint32_t kv_head) {
  const std::uint32_t budget = config.budget.resolve(trace.tokens(), trace.shape().head_size);
  return NaiveCache(formula, trace, config, budget,
                    {.now = 0,
                     .budget = budget,
                     .live = 0,
                     .seed = config.seed,
                     .sequence = sequence,
                     .layer = layer,
                     .kv_head = kv_head})
      .run();
}

}  // namespace kvlab::papers
