// A policy: pure functions on the state of one token.
//
// The functions are `constexpr` so that one source compiles for the host and for the device.
// `constexpr` rules out containers, I/O and loops over tokens through pointers, and nvcc compiles a
// constexpr function for host and device (--expt-relaxed-constexpr). Policy code is built without
// FMA contraction, so host and device agree bit for bit.
//
// A policy is a struct with these members:
//
//   static constexpr PolicyInfo kInfo{...};
//
//   struct Params {...};  // doubles; trivially copyable, may be empty
//   static constexpr Param<Params> kParams[]{...};  // one line per double; none if Params is empty
//   struct Slot {...};  // state of one token; trivially copyable, may be empty
//
//   // Called once, when the token is appended. Sets every member, because slots are reused.
//   static constexpr void append(Slot&, Token, const Params&, const Step&);
//
//   // Called after each append, for every live token. Present only if kInfo.needs is not nothing.
//   static constexpr void observe(Slot&, const Observation&, const Params&, const Step&);
//
//   // Called when tokens have to be evicted. The token with the lowest rank is evicted first; at
//   // equal rank, the older token. Returns std::uint64_t or double. Sums and averages of ranks
//   // (Modifiers) are computed in that type.
//   static constexpr std::uint64_t rank(const Slot&, Token, const Params&, const Step&);
//
//   // Present only if kInfo.weighted: the factor of a query's probabilities, where `age` is the
//   // number of younger queries in the same append. It is 0 from age tail() on.
//   static constexpr float weight(std::uint32_t age, const Params&);
//   static constexpr std::uint32_t tail(const Params&);
//
// If a member is missing or misspelt, policy_checks.hpp reports it at compile time.
//
// CUDA code includes this file, so it may not allocate, throw or call host-only library functions.
#pragma once

#include <cstdint>

#include "policies/modifiers/modifiers.hpp"

namespace kvlab {

/// The attention statistics that a policy observes. kvlab computes only these.
enum class Needs { nothing, mass, requests, both };
constexpr bool needs_mass(Needs needs) { return needs == Needs::mass || needs == Needs::both; }
constexpr bool needs_requests(Needs needs) {
  return needs == Needs::requests || needs == Needs::both;
}

/// nested: the rank of a token depends neither on the budget nor on earlier evictions, so a larger
/// budget keeps a superset of the tokens of a smaller one. feedback: the rank may depend on both.
enum class Order { nested, feedback };

/// The positions that RoPE uses. original: a key keeps its position in the sequence. cache: live
/// tokens are numbered 0, 1, 2, … from the oldest to the youngest (StreamingLLM's "positions within
/// the cache").
enum class Positions { original, cache };

/// A number of tokens, or a share of a total, which is a budget or a length. Shares are rounded
/// down to whole tokens.
struct Extent {
  std::uint32_t tokens = 0;
  std::uint32_t share_ppm = 0;  ///< parts per million of the total; used if is_share
  bool is_share = false;

  constexpr std::uint32_t resolve(std::uint32_t budget) const {
    if (!is_share) return tokens;
    return static_cast<std::uint32_t>(std::uint64_t{budget} * share_ppm / 1'000'000u);
  }
  constexpr bool operator==(const Extent&) const = default;
};
constexpr Extent tokens(std::uint32_t count) { return {.tokens = count}; }
constexpr Extent percent(std::uint32_t share) {
  return {.share_ppm = share * 10'000u, .is_share = true};
}

/// Maximum number of features of a policy.
inline constexpr std::uint32_t kMaxFeatures = 4;

/// Describes a policy. Write it with designated initializers in this order, so that a misspelt
/// field does not compile.
struct PolicyInfo {
  const char* name;      ///< name on the command line
  const char* summary;   ///< one line that says which token is evicted first
  const char* citation;  ///< paper, section, equation
  Needs needs = Needs::nothing;
  Order order = Order::feedback;
  bool oldest_first = false;  ///< rank() is the token's position; policy_checks.hpp checks it
  bool weighted = false;      ///< has weight() and tail()
  bool evicts = true;         ///< false: the policy takes no budget
  /// Default protected tokens; the command line can override them. The first `sinks` positions are
  /// evicted last. The `recent` youngest tokens, including the token to be appended, are evicted
  /// only after all unprotected tokens. Examples: tokens(4); percent(50) of the budget, rounded
  /// down; {} for none.
  Extent sinks = {}, recent = {};
  Modifiers modifiers = {};  ///< defaults; the command line can override them
  Positions positions = Positions::original;
  /// Names of the token's features: token.feature[i] is the i-th. A token gets its features when it
  /// is appended, and they never change. `name=NAME` stands for the feature that the setting `name`
  /// selects, NAME by default.
  const char* features[kMaxFeatures] = {};

  constexpr std::uint32_t feature_count() const {
    std::uint32_t count = 0;
    while (count < kMaxFeatures && features[count]) ++count;
    return count;
  }
};

/// One parameter of a policy: a member of its Params. All members are doubles (integers up to 2^53
/// are exact). A policy with parameters lists them in `static constexpr Param<Params> kParams[]`.
template <class Params>
struct Param {
  const char* name;
  const char* help;
  double Params::*member;
  double standard, min_value, max_value;
};
/// Whether `value` is in [min_value, max_value]. False for NaN.
constexpr bool in_range(double value, double min_value, double max_value) {
  return value >= min_value && value <= max_value;
}

struct Token {
  std::uint32_t position;            ///< index in the sequence, from 0
  float feature[kMaxFeatures] = {};  ///< in the order of PolicyInfo::features
};

struct Step {
  std::uint32_t now;     ///< position of the append's first token; in rank(), of the next append
  std::uint32_t budget;  ///< cache size during decoding, in tokens, including the query's own token
  /// Number of live tokens. In rank() it is the number before the eviction; in append() and
  /// observe() it includes the appended tokens.
  std::uint32_t live;
  std::uint32_t
      queries;  ///< number of tokens of the append; 0 in rank(), whose result may not depend on it
  std::uint64_t seed;
  std::uint32_t sequence, layer, kv_head;
};

/// The attention that one token received from the queries of one append.
struct Observation {
  /// Q32.32: sum of weight * p over the query heads of the group and the queries.
  std::uint64_t mass = 0;
  /// Number of queries in which at least one query head of the group requested the token.
  std::uint32_t requests = 0;
  std::uint32_t last_request = 0;  ///< position of the last such query; valid if requests > 0
  std::uint32_t queries = 0;       ///< number of queries that could see the token

  constexpr bool operator==(const Observation&) const = default;
};

inline constexpr std::uint32_t kNoTail = 0xffff'ffffu;

}  // namespace kvlab
