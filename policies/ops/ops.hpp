// A policy with its types erased: one table, made the same way for a line of the registry and for a
// header that is compiled at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "policies/policy.hpp"
#include "policies/rank.hpp"

namespace kvlab {

/// One parameter, without its struct.
struct ParamInfo {
  std::string_view name, help;
  double standard, least, most;
};

/// Some tokens, by age, as their hooks see them.
struct Tokens {
  const std::uint32_t* positions;
  const float* features;  ///< [token, feature_count()]; null of a policy that has none

  Tokens from(std::size_t age, std::size_t feature_count) const {
    return {positions + age, features ? features + age * feature_count : nullptr};
  }
};

/// What some tokens, by age, received in one append: arrays, for vector loops.
struct Seen {
  const std::uint64_t* mass = nullptr;          ///< where the policy needs mass
  const std::uint32_t* requests = nullptr;      ///< where it needs requests
  const std::uint32_t* last_request = nullptr;  ///< null: `query` for all
  std::uint32_t query = 0;                      ///< the append's last
  std::uint32_t queries = 1;  ///< of the append; the last `queries` tokens are its own
};

/// What a policy says of itself, and its hooks as loops over tokens whose states lie one after
/// another: the policy's own text, inlined into loops that are compiled for each instruction set.
/// `slots` points to the states, `params` to what write_params() wrote.
struct PolicyOps {
  PolicyInfo info;
  std::span<const ParamInfo> params;
  std::size_t slot_bytes;                ///< of one state; 0: none
  std::size_t params_bytes;              ///< of Params; 0: none
  RankType rank_type = RankType::whole;  ///< of a policy that is a struct

  /// Bytes that a live token costs beside its key and value: state and features.
  std::size_t token_bytes() const { return slot_bytes + info.feature_count() * sizeof(float); }

  /// Writes params_bytes: one value for each parameter. False: one is out of its range.
  bool (*write_params)(std::span<const double> values, std::byte* to);

  void (*append)(void* slots, Tokens tokens, std::size_t count, const void* params,
                 const Step& step);
  /// No-ops for a policy that needs nothing: of arrays, and of one observation for each token.
  void (*observe)(void* slots, const Seen& seen, std::size_t count, const void* params,
                  const Step& step);
  void (*observe_each)(void* slots, const Observation* seen, std::size_t count, const void* params,
                       const Step& step);
  /// Writes keys (policies/rank.hpp), and says of what.
  RankType (*rank)(const void* slots, Tokens tokens, std::size_t count, const void* params,
                   const Step& step, std::uint64_t* ranks);
  /// The first of the lowest ranks in [begin, end), begin < end.
  std::size_t (*first_least)(const void* slots, Tokens tokens, std::size_t begin, std::size_t end,
                             const void* params, const Step& step);
  float (*weight)(std::uint32_t age, const void* params);  ///< 1 without the hook
  std::uint32_t (*tail)(const void* params);               ///< kNoTail without the hook
  /// Makes the padding of one state zeros, where the compiler can.
  void (*clear_padding)(void* slot);
  /// Where a policy looks at each query head: observe_each() with the heads' own masses, [head,
  /// token]. Null: it does not.
  void (*observe_heads)(void* slots, const Observation* seen, std::span<const std::uint64_t> heads,
                        std::size_t count, const void* params, const Step& step) = nullptr;
};

/// The registry's tables, in its order, for this machine's instruction set.
std::span<const PolicyOps> registry_ops();
/// The registry's tables for one instruction set; empty where this build or machine has it not.
std::span<const PolicyOps> registry_ops_base();
std::span<const PolicyOps> registry_ops_avx2();
std::span<const PolicyOps> registry_ops_avx512();

}  // namespace kvlab
