// A policy as a table of functions, independent of its types. It is built in the same way for a
// policy of the registry and for a header that is compiled at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "policies/order_hooks.hpp"
#include "policies/policy.hpp"
#include "policies/rank.hpp"

namespace kvlab {

/// A parameter of a policy, independent of the type Params.
struct ParamInfo {
  std::string_view name, help;
  double standard, min_value, max_value;
};

/// Tokens by age, as hooks receive them.
struct Tokens {
  const std::uint32_t* positions;
  const float* features;  ///< [token, feature_count()]; null if the policy has none

  Tokens from(std::size_t age, std::size_t feature_count) const {
    return {positions + age, features ? features + age * feature_count : nullptr};
  }
};

/// The attention statistics of the live tokens from the queries of one append. Each is an array by
/// age, for vector loops.
struct Seen {
  const std::uint64_t* mass = nullptr;          ///< set if the policy needs mass
  const std::uint32_t* requests = nullptr;      ///< set if it needs requests
  const std::uint32_t* last_request = nullptr;  ///< null: it is `query` for all tokens
  std::uint32_t query = 0;                      ///< position of the append's last query
  std::uint32_t queries = 1;  ///< queries of the append; the last `queries` tokens belong to it
};

/// A policy's description, and its hooks as loops over tokens whose states are contiguous in
/// memory. The hooks are inlined into loops that are compiled for each instruction set. `slots`
/// points to the states, `params` to the output of write_params().
struct PolicyOps {
  PolicyInfo info;
  std::span<const ParamInfo> params;
  std::size_t slot_bytes;                ///< bytes of one state; 0: none
  std::size_t params_bytes;              ///< bytes of Params; 0: none
  RankType rank_type = RankType::whole;  ///< return type of the policy struct's rank()

  /// Bytes of a live token beside its key and value: state and features.
  std::size_t token_bytes() const { return slot_bytes + info.feature_count() * sizeof(float); }

  /// Writes params_bytes from one value per parameter. Returns false if a value is out of range.
  bool (*write_params)(std::span<const double> values, std::byte* to);

  void (*append)(void* slots, Tokens tokens, std::size_t count, const void* params,
                 const Step& step);
  /// observe() and observe_each() call the policy's hook observe() for all tokens. The first reads
  /// the statistics from arrays, the second from one observation per token. Both do nothing for a
  /// policy that needs no observations.
  void (*observe)(void* slots, const Seen& seen, std::size_t count, const void* params,
                  const Step& step);
  void (*observe_each)(void* slots, const Observation* seen, std::size_t count, const void* params,
                       const Step& step);
  /// Writes keys (policies/rank.hpp) and returns their type.
  RankType (*rank)(const void* slots, Tokens tokens, std::size_t count, const void* params,
                   const Step& step, std::uint64_t* ranks);
  /// Index in [begin, end) of the lowest rank; of equal ranks, the first one. Requires begin < end.
  std::size_t (*find_min_rank)(const void* slots, Tokens tokens, std::size_t begin, std::size_t end,
                               const void* params, const Step& step);
  float (*weight)(std::uint32_t age, const void* params);  ///< 1 if the policy has no such hook
  std::uint32_t (*tail)(const void* params);  ///< kNoTail if the policy has no such hook
  /// Sets the padding of one state to zero, if the compiler supports it.
  void (*clear_padding)(void* slot);
  /// Like observe_each(), with masses by query head, [head, token]. Null if the policy does not
  /// observe each head.
  void (*observe_heads)(void* slots, const Observation* seen, std::span<const std::uint64_t> heads,
                        std::size_t count, const void* params, const Step& step) = nullptr;
  /// The hooks evicted() and reorder() for tokens whose states are contiguous. `order` [token].
  /// Null if the policy has no such hook.
  void (*evicted)(void* slots, std::size_t count, const Eviction& eviction,
                  const void* params) = nullptr;
  void (*reorder)(void* slots, const std::uint32_t* order, std::size_t count, const void* params,
                  const Step& step) = nullptr;

  /// Whether the policy has a hook that only executors on the CPU call.
  bool has_order_hooks() const { return evicted || reorder; }
};

/// The tables of the registry's policies, in its order, for this machine's instruction set.
std::span<const PolicyOps> registry_ops();
/// The same tables for one instruction set; empty if this build or machine does not support it.
std::span<const PolicyOps> registry_ops_base();
std::span<const PolicyOps> registry_ops_avx2();
std::span<const PolicyOps> registry_ops_avx512();

}  // namespace kvlab
