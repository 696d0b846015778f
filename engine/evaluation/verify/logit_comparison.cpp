#include "engine/evaluation/verify/logit_comparison.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/evaluation/verify/attention_check.hpp"

namespace kvlab {
namespace {

constexpr double kOfPlainPass = 3;  // accepted error, as a multiple of a plain forward pass's error

double squares(std::span<const float> values) {
  double sum = 0;
  for (const float x : values) sum += double{x} * double{x};
  return sum;
}

double squared_distance(std::span<const float> found, std::span<const float> wanted) {
  constexpr double infinite = std::numeric_limits<double>::infinity();
  if (found.size() != wanted.size()) return infinite;
  double sum = 0;
  for (std::size_t i = 0; i < found.size(); ++i)
    sum += std::pow(double{found[i]} - double{wanted[i]}, 2);
  return std::isnan(sum) ? infinite : sum;
}

}  // namespace

LogitComparison::LogitComparison(const Model& reference, const ResolvedConfig& cache,
                                 std::optional<Dtype> rounding, unsigned threads)
    : rounding_(rounding), exact_(reference, cache, std::nullopt, threads) {
  if (rounding) plain_.emplace(reference, cache, rounding, threads);
}

void LogitComparison::begin(std::span<const std::int32_t> ids, std::uint32_t first) {
  exact_.begin(ids, first);
  if (plain_) plain_->begin(ids, first);
}

void LogitComparison::layer(std::uint32_t layer, const ForcedDecoder::LiveSets& live,
                            std::span<const float> k, std::span<const float> v) {
  exact_.layer(layer, live, k, v);
  if (plain_) plain_->layer(layer, live, k, v);
  const std::vector<float>& wanted = exact_.own_keys_and_values();
  if (wanted.empty()) return;
  keys_and_values_.size += squares(wanted);
  keys_and_values_.found += squared_distance(k, std::span(wanted).first(k.size())) +
                            squared_distance(v, std::span(wanted).subspan(k.size()));
  if (plain_) keys_and_values_.plain += squared_distance(plain_->own_keys_and_values(), wanted);
}

void LogitComparison::compare(std::span<const float> watched, std::span<const float> alone) {
  const std::vector<float> wanted = exact_.logits();
  const double size = squares(wanted),
               plain = plain_ ? squared_distance(plain_->logits(), wanted) : 0;
  ++rows_;
  watched_.size += size, alone_.size += size;
  watched_.plain += plain, alone_.plain += plain;
  watched_.found += squared_distance(watched, wanted);
  alone_.found += squared_distance(alone, wanted);
}

double LogitComparison::Squares::relative(double squares) const {
  return size > 0 ? std::sqrt(squares / size) : 0;
}

LogitCheck LogitComparison::Squares::check(std::uint64_t rows,
                                           std::optional<Dtype> rounding) const {
  return {.rows = rows,
          .error = relative(found),
          .tolerance = std::max(unit_error(rounding), kOfPlainPass * relative(plain))};
}

LogitCheck LogitComparison::result() const {
  const auto excess = [](const LogitCheck& check) { return check.error / check.tolerance; };
  std::vector<LogitCheck> checks;
  for (const Squares* one : {&watched_, &alone_, &keys_and_values_})
    checks.push_back(one->check(rows_, rounding_));
  return *std::ranges::max_element(checks, {}, excess);
}

}  // namespace kvlab
