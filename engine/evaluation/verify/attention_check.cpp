#include "engine/evaluation/verify/attention_check.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

constexpr double kFloatError = 1e-5;   // error of a float32 probability or output
constexpr double kOfPlain = 2;         // accepted error, as a multiple of a plain attention's error
constexpr double kManyProducts = 1e6;  // below this number of multiplications threads cost more
                                       // than they save

double larger_error(double worst, double error) {
  return std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
}

}  // namespace

double unit_error(std::optional<Dtype> dtype) {
  if (dtype == Dtype::bf16) return 0x1p-8;
  if (dtype == Dtype::f16) return 0x1p-11;
  return kFloatError;
}

AttentionCheck::AttentionCheck(const ModelConfig& config, const ResolvedConfig& cache,
                               std::optional<Dtype> rounding, unsigned threads)
    : config_(config),
      shape_(config.shape()),
      threshold16_(cache.threshold16()),
      rounding_(rounding),
      threads_(threads),
      outputs_(shape_.layers) {
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    const RowSpec& row = config_.rows[layer];
    attention_.emplace_back(row, shape_.head_size, cache.positions_of(layer));
    ropes_.emplace_back(row.rope);
  }
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer)
    for (std::uint32_t head = 0; head < shape_.kv_heads; ++head)
      tokens_.emplace_back(attention_[layer], ropes_[layer], shape_.group());
}

void AttentionCheck::append(std::uint32_t layer, const HeadTokens::Tensors& tensors) {
  for (std::uint32_t head = 0; head < shape_.kv_heads; ++head)
    tokens_[std::size_t{layer} * shape_.kv_heads + head].append(tensors, head);
}

void AttentionCheck::check(std::uint32_t layer, const Append& append,
                           std::span<const AttendingHead> heads, std::span<const float> out) {
  std::vector<HeadCheck> checks(heads.size());
  const double products = static_cast<double>(heads.front().live->size()) * append.tokens *
                          shape_.query_heads * shape_.head_size;
  parallel_for(heads.size(), products < kManyProducts ? 1 : threads_, [&](std::size_t h) {
    checks[h] = check_head(layer, static_cast<std::uint32_t>(h), append, *heads[h].live, out);
  });
  for (std::size_t h = 0; h < heads.size(); ++h) {
    outputs_[layer].add(checks[h].outputs);
    check_observations(heads[h], checks[h].expected);
  }
}

AttentionCheck::HeadCheck AttentionCheck::check_head(std::uint32_t layer, std::uint32_t kv_head,
                                                     const Append& append, const LiveSet& live,
                                                     std::span<const float> out) const {
  const AttendedRows rows = tokens(layer, kv_head).attend(live, append, rounding_);
  const AttendedRows plain = rounding_ ? rows.round_values(*rounding_) : AttendedRows{};
  HeadCheck check;
  if (live.needs() != Needs::nothing) check.expected.resize(live.size());
  for (std::uint32_t n = 0; n < append.tokens; ++n) {
    const Query query{append.first + n, append.tokens - 1 - n};
    const std::vector<CheckedRow> group = rows_of_query(layer, kv_head, live, query, rows, plain);
    for (std::uint32_t g = 0; g < group.size(); ++g) {
      const std::size_t row = std::size_t{n} * shape_.query_heads + kv_head * shape_.group() + g;
      check_output(group[g], out.subspan(row * shape_.head_size, shape_.head_size), check.outputs);
    }
    if (!check.expected.empty()) expect_from_query(live, query, group, check.expected);
  }
  return check;
}

/// The attention rows of all query heads of the group.
std::vector<AttentionCheck::CheckedRow> AttentionCheck::rows_of_query(
    std::uint32_t layer, std::uint32_t kv_head, const LiveSet& live, Query query,
    const AttendedRows& rows, const AttendedRows& plain) const {
  const Float64Attention& attention = attention_[layer];
  const std::uint32_t end = live.size() - query.younger;
  const std::size_t first = attention.first_visible(live, query.position);
  const float* const sinks = config_.rows[layer].sinks_of(kv_head, shape_.group());
  std::vector<CheckedRow> group;
  for (std::uint32_t g = 0; g < shape_.group(); ++g) {
    const float* const sink = sinks ? sinks + g : nullptr;
    std::vector<double> q =
        attention.query(tokens(layer, kv_head).query(query.position, g), query.position, end - 1);
    group.push_back({attention.row(q, rows, first, end, sink), {}});
    if (!rounding_) continue;
    round_all(*rounding_, std::span(q));
    group.back().plain = attention.row(q, plain, first, end, sink, rounding_);
  }
  return group;
}

void AttentionCheck::check_output(const CheckedRow& row, std::span<const float> out,
                                  OutputErrors& errors) {
  const double scale = row.exact.scale > 0 ? row.exact.scale : 1;
  ++errors.rows;
  for (std::size_t d = 0; d < out.size(); ++d) {
    const double wanted = row.exact.out[d];
    errors.worst = larger_error(errors.worst, std::fabs(out[d] - wanted) / scale);
    if (row.plain)
      errors.worst_plain =
          larger_error(errors.worst_plain, std::fabs(row.plain->out[d] - wanted) / scale);
  }
}

void AttentionCheck::OutputErrors::add(const OutputErrors& other) {
  rows += other.rows;
  worst = std::max(worst, other.worst);
  worst_plain = std::max(worst_plain, other.worst_plain);
}

void AttentionCheck::check_observations(const AttendingHead& head,
                                        std::span<const Expected> expected) {
  const double heads = shape_.group();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const Expected& e = expected[i];
    const Observation& seen = head.seen[i];
    ++observations_;
    if (needs_mass(head.live->needs())) {
      const double mass = std::ldexp(static_cast<double>(seen.mass), -32);
      const double rows = heads * std::max(1u, e.queries);
      worst_plain_mass_ = std::max(worst_plain_mass_, std::fabs(e.plain_mass - e.mass) / rows);
      worst_mass_ = larger_error(worst_mass_, std::fabs(mass - e.mass) / rows);
    }
    if (needs_requests(head.live->needs())) {
      const bool count_fits =
          seen.requests >= e.requests && seen.requests <= e.requests + e.unclear;
      const bool last_fits =
          e.unclear > 0 || seen.requests == 0 || seen.last_request == e.last_request;
      wrong_requests_ += !(count_fits && last_fits);
    }
    wrong_requests_ += seen.queries != e.queries;
  }
}

/// The relative error that a probability near the threshold may have.
double AttentionCheck::relative_error(const CheckedRow& row, double threshold) {
  double worst = 0;
  const std::vector<double>& exact = row.exact.p;
  for (std::size_t i = 0; row.plain && i < exact.size(); ++i)
    if (exact[i] > threshold / 2)
      worst = std::max(worst, std::fabs(row.plain->p[i] - exact[i]) / exact[i]);
  return std::max(kFloatError, 2 * worst);
}

/// Adds what the query contributes to each token's observation. The query sees all older tokens,
/// because layers with a window observe nothing.
void AttentionCheck::expect_from_query(const LiveSet& live, Query query,
                                       std::span<const CheckedRow> group,
                                       std::vector<Expected>& expected) const {
  const double threshold = threshold16_ / 65536.0;
  const double weight =
      query.younger < live.tail() ? static_cast<double>(live.weight(query.younger)) : 0.0;
  const std::size_t visible = group.front().exact.p.size();
  std::vector<std::uint8_t> sure(visible), unclear(visible);
  std::vector<double> mass(visible), plain_mass(visible);
  const bool by_largest = live.modifiers().group == Modifiers::Group::max;
  const auto give = [&](double& sum, double one) {
    sum = by_largest ? std::max(sum, one) : sum + one;
  };
  for (const CheckedRow& row : group) {
    const std::vector<double>& p = row.exact.p;
    const double largest = *std::max_element(p.begin(), p.end());
    const double relative = relative_error(row, threshold * largest);
    for (std::size_t i = 0; i < visible; ++i) {
      give(mass[i], weight * p[i]);
      give(plain_mass[i], weight * (row.plain ? row.plain->p[i] : p[i]));
      // The relative error of a probability, and the absolute error of its Q32.32 value.
      const double slack = relative * threshold * largest + 0x1p-31;
      sure[i] |= p[i] > threshold * largest + slack;
      unclear[i] |= std::fabs(p[i] - threshold * largest) <= slack;
    }
  }
  for (std::size_t i = 0; i < visible; ++i) {
    ++expected[i].queries;
    expected[i].mass += mass[i];
    expected[i].plain_mass += plain_mass[i];
    if (sure[i])
      ++expected[i].requests, expected[i].last_request = query.position;
    else
      expected[i].unclear += unclear[i];
  }
}

/// The result of the layer whose error is the largest share of its tolerance.
OutputCheck AttentionCheck::outputs() const {
  OutputCheck check;
  for (std::uint32_t layer = 0; layer < outputs_.size(); ++layer) {
    const OutputErrors& errors = outputs_[layer];
    if (errors.rows == 0) continue;
    const double tolerance = std::max(unit_error(rounding_), kOfPlain * errors.worst_plain);
    if (check.rows == 0 || errors.worst / tolerance > check.worst_error / check.tolerance)
      check.layer = layer, check.worst_error = errors.worst, check.tolerance = tolerance;
    check.rows += errors.rows;
  }
  return check;
}

void AttentionCheck::add_to(VerifyReport& report) const {
  report.observations = observations_;
  report.worst_mass = worst_mass_;
  report.wrong_requests = wrong_requests_;
  report.tolerance = std::max(report.tolerance, 2 * worst_plain_mass_);
  report.outputs = outputs();
}

}  // namespace kvlab
