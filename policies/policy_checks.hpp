// Checks at compile time that a type is a policy (policies/policy.hpp). If it is not, the
// compiler's message names the hook that is wrong.
//
// CUDA code includes this file, so it may not allocate, throw or call host-only library functions.
#pragma once

#include <concepts>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <type_traits>

#include "policies/policy.hpp"
#include "policies/rank.hpp"

namespace kvlab {

namespace hooks {
template <class P>
concept HasInfo = requires {
  requires std::same_as<std::remove_cvref_t<decltype(P::kInfo)>, PolicyInfo>;
};
template <class P>
concept HasTypes = requires {
  requires std::is_trivially_copyable_v<typename P::Params>;
  requires std::is_trivially_copyable_v<typename P::Slot>;
};
template <class P>
concept HasAppend = requires(typename P::Slot& slot, Token t, const typename P::Params& p,
                             const Step& s) {
  { P::append(slot, t, p, s) } -> std::same_as<void>;
};
template <class P>
concept HasObserve = requires(typename P::Slot& slot, const Observation& o,
                              const typename P::Params& p, const Step& s) {
  { P::observe(slot, o, p, s) } -> std::same_as<void>;
};
template <class P>
concept HasRank = requires(const typename P::Slot& slot, Token t, const typename P::Params& p,
                           const Step& s) {
  requires std::same_as<decltype(P::rank(slot, t, p, s)), std::uint64_t> ||
      std::same_as<decltype(P::rank(slot, t, p, s)), double>;
};
template <class P>
concept HasWeight = requires(std::uint32_t age, const typename P::Params& p) {
  { P::weight(age, p) } -> std::same_as<float>;
};
template <class P>
concept HasTail = requires(const typename P::Params& p) {
  { P::tail(p) } -> std::same_as<std::uint32_t>;
};
template <class P>
concept HasParamList = std::is_empty_v<typename P::Params> || requires {
  { P::kParams[0] } -> std::convertible_to<Param<typename P::Params>>;
};
}  // namespace hooks

/// A complete policy. Optional hooks must exist if kInfo declares them, and only then.
template <class P>
concept Policy = hooks::HasInfo<P> && hooks::HasTypes<P> && hooks::HasParamList<P> &&
                 hooks::HasAppend<P> && hooks::HasRank<P> &&
                 (hooks::HasObserve<P> == (P::kInfo.needs != Needs::nothing)) &&
                 (hooks::HasWeight<P> == P::kInfo.weighted) &&
                 (hooks::HasTail<P> == P::kInfo.weighted);

/// Whether P's rank() returns whole numbers or doubles.
template <class P>
inline constexpr RankType kRankType =
    std::same_as<decltype(P::rank({}, {}, {}, {})), double> ? RankType::real : RankType::whole;

/// P's parameters at their default values.
template <class P>
constexpr typename P::Params standard_params() {
  typename P::Params params{};
  if constexpr (!std::is_empty_v<typename P::Params>)
    for (const auto& param : P::kParams) params.*(param.member) = param.standard;
  return params;
}

namespace hooks {
/// Runs every hook once. Slots are reused, so append() has to set every member that the other hooks
/// read. Running the hooks on an uninitialized slot in a constant expression shows whether it does.
template <class P>
constexpr bool run_once(typename P::Slot& slot) {
  const typename P::Params params = standard_params<P>();
  const Step step{.now = 1, .budget = 2, .live = 1, .queries = 1};
  P::append(slot, Token{}, params, step);
  if constexpr (P::kInfo.needs != Needs::nothing)
    P::observe(slot, Observation{.queries = 1}, params, step);
  if constexpr (P::kInfo.weighted) static_cast<void>(P::weight(P::tail(params), params));
  static_cast<void>(P::rank(slot, Token{}, params, step));
  return true;
}
// Each of the next functions runs one hook on a zeroed slot. Their names let the compiler report
// which hook is not constexpr.
template <class P>
constexpr bool run_append() {
  typename P::Slot slot{};
  P::append(slot, Token{}, standard_params<P>(),
            Step{.now = 1, .budget = 2, .live = 1, .queries = 1});
  return true;
}
template <class P>
constexpr bool run_observe() {
  if constexpr (P::kInfo.needs != Needs::nothing) {
    typename P::Slot slot{};
    P::observe(slot, Observation{.queries = 1}, standard_params<P>(),
               Step{.now = 1, .budget = 2, .live = 1, .queries = 1});
  }
  return true;
}
template <class P>
constexpr bool run_rank() {
  const typename P::Slot slot{};
  static_cast<void>(P::rank(slot, Token{}, standard_params<P>(),
                            Step{.now = 1, .budget = 2, .live = 1, .queries = 1}));
  return true;
}
template <class P>
constexpr bool run_tail() {
  if constexpr (P::kInfo.weighted) static_cast<void>(P::tail(standard_params<P>()));
  return true;
}
template <class P>
constexpr bool run_weight() {
  if constexpr (P::kInfo.weighted) static_cast<void>(P::weight(1, standard_params<P>()));
  return true;
}
template <class P>
constexpr bool run_on_zeros() {
  typename P::Slot slot{};
  return run_once<P>(slot);
}
template <class P>
constexpr bool run_on_nothing() {
  typename P::Slot slot;
  return run_once<P>(slot);
}
/// Whether rank() is the token's position for any observation, as kInfo.oldest_first declares.
template <class P>
constexpr bool ranks_by_position() {
  const typename P::Params params = standard_params<P>();
  const Step step{.now = 9, .budget = 4, .live = 3, .queries = 1};
  for (const std::uint32_t position : {0u, 1u, 8u}) {
    typename P::Slot slot{};
    P::append(slot, Token{position}, params, step);
    if constexpr (P::kInfo.needs != Needs::nothing)
      P::observe(slot, Observation{.mass = 5, .requests = 1, .last_request = 9, .queries = 1},
                 params, step);
    if (P::rank(slot, Token{position}, params, step) != position) return false;
  }
  return true;
}
template <class P>
concept IsAppendConstexpr = requires {
  typename std::bool_constant<run_append<P>()>;
};
template <class P>
concept IsObserveConstexpr = requires {
  typename std::bool_constant<run_observe<P>()>;
};
template <class P>
concept IsRankConstexpr = requires {
  typename std::bool_constant<run_rank<P>()>;
};
template <class P>
concept IsTailConstexpr = requires {
  typename std::bool_constant<run_tail<P>()>;
};
template <class P>
concept IsWeightConstexpr = requires {
  typename std::bool_constant<run_weight<P>()>;
};
template <class P>
concept AreConstexpr = requires {
  typename std::bool_constant<run_on_zeros<P>()>;
};
template <class P>
concept AppendSetsSlot = requires {
  typename std::bool_constant<run_on_nothing<P>()>;
};
}  // namespace hooks

/// The checks of check_policy() for a type that already has kInfo, Params and Slot.
template <class P>
consteval void check_hooks() {
  static_assert(hooks::HasParamList<P>,
                "policy: a Params with members needs `static constexpr Param<Params> kParams[]`");
  static_assert(
      hooks::HasAppend<P>,
      "policy: needs `static constexpr void append(Slot&, Token, const Params&, const Step&)`");
  static_assert(
      hooks::HasRank<P>,
      "policy: needs `static constexpr std::uint64_t rank(const Slot&, Token, const Params&, "
      "const Step&)`, or the same with double");
  static_assert(P::kInfo.needs == Needs::nothing || hooks::HasObserve<P>,
                "policy: kInfo.needs requests observations, so it needs `static constexpr void "
                "observe(Slot&, const Observation&, const Params&, const Step&)`");
  static_assert(P::kInfo.needs != Needs::nothing || !hooks::HasObserve<P>,
                "policy: has observe(), but kInfo.needs is nothing; set Needs::mass, "
                "Needs::requests or Needs::both");
  static_assert(
      !P::kInfo.weighted || (hooks::HasWeight<P> && hooks::HasTail<P>),
      "policy: kInfo.weighted needs `static constexpr float weight(std::uint32_t age, const "
      "Params&)` and `static constexpr std::uint32_t tail(const Params&)`");
  static_assert(P::kInfo.weighted || (!hooks::HasWeight<P> && !hooks::HasTail<P>),
                "policy: has weight() or tail(), but kInfo.weighted is false");
  if constexpr (Policy<P>) {
    static_assert(hooks::IsAppendConstexpr<P>,
                  "policy: append() must be constexpr, and call only constexpr functions, so that "
                  "one text compiles for host and device");
    static_assert(hooks::IsObserveConstexpr<P>,
                  "policy: observe() must be constexpr, and call only constexpr functions, so "
                  "that one text compiles for host and device");
    static_assert(hooks::IsRankConstexpr<P>,
                  "policy: rank() must be constexpr, and call only constexpr functions, so that "
                  "one text compiles for host and device");
    static_assert(hooks::IsTailConstexpr<P>,
                  "policy: tail() must be constexpr, and call only constexpr functions, so that "
                  "one text compiles for host and device");
    static_assert(hooks::IsWeightConstexpr<P>,
                  "policy: weight() must be constexpr, and call only constexpr functions, so that "
                  "one text compiles for host and device");
    static_assert(
        !hooks::AreConstexpr<P> || hooks::AppendSetsSlot<P>,
        "policy: append() must set every member of Slot that observe() and rank() read, because "
        "slots are reused");
    if constexpr (P::kInfo.oldest_first && hooks::AreConstexpr<P>)
      static_assert(
          hooks::ranks_by_position<P>(),
          "policy: kInfo.oldest_first is set, so rank() must return the token's position");
  }
}

/// Explains, hook by hook, why P is not a Policy. The registry calls it for each policy.
template <class P>
consteval bool check_policy() {
  static_assert(hooks::HasInfo<P>, "policy: needs `static constexpr PolicyInfo kInfo{...}`");
  static_assert(hooks::HasTypes<P>, "policy: needs trivially copyable types Params and Slot");
  if constexpr (hooks::HasInfo<P> && hooks::HasTypes<P>) check_hooks<P>();
  return true;
}

/// The type of the registry.
template <class... P>
struct PolicyList {};

template <class... P>
consteval bool names_differ() {
  const std::string_view names[]{P::kInfo.name...};
  for (const auto& name : names)
    for (const auto* other = &name + 1; other != std::end(names); ++other)
      if (name == *other) return false;
  return true;
}

/// Checks every policy of the registry, and that their names differ.
template <class... P>
consteval bool check_registry(PolicyList<P...>) {
  static_assert((check_policy<P>() && ...));
  if constexpr ((Policy<P> && ...))
    static_assert(names_differ<P...>(), "registry: two policies have the same name");
  return true;
}

}  // namespace kvlab
