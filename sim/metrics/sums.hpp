// The sums from which metrics are computed, with the same layout on the host and on the device.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvlab {

/// Maximum number of blocks of measured queries.
inline constexpr std::uint32_t kMaxQueryBlocks = 16;

enum class Sum : std::size_t {
#define SUM(name) name,
#include "sim/metrics/metrics.def"
  kept_of_named,  ///< kept mass of the first passage; after it come the total mass of that passage,
                  ///< then both masses of the next passage, and so on
};
constexpr Sum kept_of(std::size_t named) {
  return static_cast<Sum>(static_cast<std::size_t>(Sum::kept_of_named) + 2 * named);
}
constexpr Sum all_of(std::size_t named) {
  return static_cast<Sum>(static_cast<std::size_t>(kept_of(named)) + 1);
}

/// What one query of a query head sees in a cache.
struct QueryResult {
  double recall;           ///< share of the full cache's attention that the live tokens have
  std::uint32_t position;  ///< position of the query
  std::uint32_t live;      ///< number of tokens that the query attends to; position + 1: all
  std::uint32_t wanted;    ///< number of earlier tokens that the query requests
  std::uint32_t missed;    ///< number of requested tokens that are not live
};

/// The number of query sums, which are the first ones of Sum.
inline constexpr std::size_t kQuerySums = 0
#define QUERY_SUM(name, term) +1
#include "sim/metrics/metrics.def"
    ;
#define QUERY_SUM(name, term) \
  static_assert(Sum::name < Sum{kQuerySums}, "metrics.def must list query sums first");
#include "sim/metrics/metrics.def"

/// The smallest factor of a QUERY_LOG_SUM. nll_recall takes the logarithm of the recall or, if the
/// recall is smaller, of this bound.
inline constexpr double kMinFactor = 1e-9;

/// What one query adds to each query sum: the term or, if is_log_sum(), the factor whose negative
/// logarithm is the term.
struct SumTerms {
  double of[kQuerySums];
};
constexpr SumTerms terms_of(const QueryResult& at) {
  return {{
#define QUERY_SUM(name, term) static_cast<double>(term),
#include "sim/metrics/metrics.def"
  }};
}
constexpr bool is_log_sum(std::size_t query_sum) {
  constexpr bool kIsLogSum[] = {
#define QUERY_SUM(name, term) false,
#define QUERY_LOG_SUM(name, factor) true,
#include "sim/metrics/metrics.def"
  };
  return kIsLogSum[query_sum];
}

/// Layout: [Sum][query head, padded to whole head groups][block].
struct SumsShape {
  std::size_t head_groups, named;

  constexpr std::size_t size() const { return at(kept_of(named), 0, 0); }
  constexpr std::size_t at(Sum sum, std::size_t head, std::size_t block) const {
    return (static_cast<std::size_t>(sum) * 4 * head_groups + head) * kMaxQueryBlocks + block;
  }
};

}  // namespace kvlab
