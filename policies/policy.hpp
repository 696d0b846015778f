// What a policy is: pure functions on one token's state, and nothing else.
//
// `constexpr` is the mark that makes one text compile for the host and for the device: it rules out
// loops over tokens through pointers, containers and I/O, and nvcc compiles a constexpr function
// for both sides (--expt-relaxed-constexpr). Policy code is built without FMA contraction, so that
// host and device agree bit for bit.
//
// A policy is a struct with
//
//   static constexpr PolicyInfo kInfo{...};
//
//   struct Params {...};  // doubles; trivially copyable, may be empty
//   static constexpr Param<Params> kParams[]{...};  // a line for each double; none where empty
//   struct Slot {...};  // one token's state; trivially copyable, may be empty
//
//   // Once, as the token comes in. Sets every member, because slots are reused.
//   static constexpr void append(Slot&, Token, const Params&, const Step&);
//
//   // After each append, for every live token; where kInfo.needs requests something.
//   static constexpr void observe(Slot&, const Observation&, const Params&, const Step&);
//
//   // When tokens have to be evicted: the lowest is evicted first, at equal rank the older. Whole numbers, or
//   // double: the return type says which, and the rule adds and averages them as such.
//   static constexpr std::uint64_t rank(const Slot&, Token, const Params&, const Step&);
//
//   // Where kInfo.weighted: what the probabilities of a query with `age` younger ones in its
//   // append are scaled by; 0 from `tail` on.
//   static constexpr float weight(std::uint32_t age, const Params&);
//   static constexpr std::uint32_t tail(const Params&);
//
// and policy_checks.hpp says, while compiling, which of them is missing or misspelt.
//
// Included by CUDA code: nothing here may allocate, throw or use the host's library.
#pragma once

#include <cstdint>

#include "policies/modifiers/modifiers.hpp"

namespace kvlab {

/// What a policy observes. Only that is computed; the rest costs nothing.
enum class Needs { nothing, mass, requests, both };
constexpr bool needs_mass(Needs needs) { return needs == Needs::mass || needs == Needs::both; }
constexpr bool needs_requests(Needs needs) {
  return needs == Needs::requests || needs == Needs::both;
}

/// nested: the rank of a token depends neither on the budget nor on what was evicted before, so the
/// kept sets of two budgets are nested. feedback: it may depend on both.
enum class Order { nested, feedback };

/// original: a key keeps its true position. cache: the live tokens are numbered 0, 1, 2, … by age.
enum class Positions { original, cache };

/// A number of tokens, or a share of the budget (rounded down).
struct Extent {
  std::uint32_t tokens = 0;
  std::uint32_t share_ppm = 0;  ///< parts per million of the budget; used where is_share
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

/// How many features a policy may have.
inline constexpr std::uint32_t kMaxFeatures = 4;

/// A policy's description of itself. Written with designated initialisers, in this order, so that a
/// misspelt field does not compile.
struct PolicyInfo {
  const char* name;      ///< as written on the command line
  const char* summary;   ///< one line: what is evicted first
  const char* citation;  ///< paper, section, equation
  Needs needs = Needs::nothing;
  Order order = Order::feedback;
  bool oldest_first = false;  ///< rank() is the position, which is checked: all who need to know
                              ///< ask here
  bool weighted = false;      ///< has weight() and tail()
  bool evicts = true;         ///< false: takes no budget
  /// Default protected tokens, which a command line overrides: how many positions from 0 on are
  /// evicted last, and how many of the youngest, the one to come included, are evicted before those
  /// alone. tokens(4), or percent(50) of the budget, rounded down; {}: none.
  Extent sinks = {}, recent = {};
  Modifiers modifiers = {};  ///< likewise
  Positions positions = Positions::original;
  /// Numbers that a token brings when it is appended and that never change: token.feature[i] is the
  /// i-th of these. `name=NAME`: the one that the setting `name` requests, NAME by default.
  const char* features[kMaxFeatures] = {};

  constexpr std::uint32_t feature_count() const {
    std::uint32_t count = 0;
    while (count < kMaxFeatures && features[count]) ++count;
    return count;
  }
};

/// One parameter of a policy: a member of its Params, all of which are doubles (an integer up to
/// 2^53 is exact). A policy with parameters lists them in
/// `static constexpr Param<Params> kParams[]`.
template <class Params>
struct Param {
  const char* name;
  const char* help;
  double Params::*member;
  double standard, least, most;
};
/// Whether a parameter whose range is [least, most] may be `value`.
constexpr bool in_range(double value, double least, double most) {
  return value >= least && value <= most;
}

struct Token {
  std::uint32_t position;            ///< counts tokens of the sequence from 0
  float feature[kMaxFeatures] = {};  ///< what it brings, in the order of PolicyInfo::features
};

struct Step {
  std::uint32_t now;     ///< position of the first token of the append (to come, in rank)
  std::uint32_t budget;  ///< tokens that a decoded query may span, itself included
  std::uint32_t
      live;  ///< live tokens: before the eviction (rank), with the appended (append, observe)
  std::uint32_t queries;  ///< tokens appended together; 0 in rank, which may not depend on it
  std::uint64_t seed;
  std::uint32_t sequence, layer, kv_head;
};

/// What one token received from the queries of one append.
struct Observation {
  std::uint64_t mass = 0;      ///< Q32.32: sum over the group's heads and the queries of weight * p
  std::uint32_t requests = 0;  ///< queries in which some query head of the group requested it
  std::uint32_t last_request = 0;  ///< position of the last such query; meaningful if requests > 0
  std::uint32_t queries = 0;       ///< queries that could see the token

  constexpr bool operator==(const Observation&) const = default;
};

inline constexpr std::uint32_t kNoTail = 0xffff'ffffu;

}  // namespace kvlab
