// What a policy is: pure functions on one token's state, and nothing else.
//
// `constexpr` is the mark that makes one text compile for the host and for the device: it rules out
// loops over tokens through pointers, containers and I/O, and nvcc compiles a constexpr function
// for both sides (--expt-relaxed-constexpr). Policy code is built without FMA contraction, so that
// host and device agree bit for bit.
//
// Included by CUDA code: nothing here may allocate, throw or use the host's library.
#pragma once

#include <concepts>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <type_traits>

namespace kvlab {

/// What a policy observes. Only that is computed; the rest costs nothing.
enum class Needs { nothing, mass, requests };

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

/// A policy's description of itself. Written with designated initialisers, so that a misspelt field
/// does not compile.
struct PolicyInfo {
  const char* name;      ///< as written on the command line
  const char* summary;   ///< one line: what leaves first
  const char* citation;  ///< paper, section, equation
  Needs needs = Needs::nothing;
  Order order = Order::feedback;
  bool oldest_first = false;  ///< rank() is the position: sinks stay, and a run of the newest
  bool weighted = false;      ///< has weight() and tail()
  bool evicts = true;         ///< false: takes no budget
  Extent sinks = {};          ///< default guards
  Extent recent = {};
  Positions positions = Positions::original;
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

struct Token {
  std::uint32_t position;  ///< counts tokens of the sequence from 0
};

struct Step {
  std::uint32_t now;     ///< position of the first token of the admission (to come, in rank)
  std::uint32_t budget;  ///< tokens that a decoded query may span, itself included
  std::uint32_t live;    ///< live tokens: before leaving (rank), with the admitted (admit, observe)
  std::uint32_t queries;  ///< tokens admitted together; 0 in rank, which may not depend on it
  std::uint64_t seed;
  std::uint32_t sequence, layer, kv_head;
};

/// What one token received from the queries of one admission.
struct Observation {
  std::uint64_t mass = 0;      ///< Q32.32: sum over the group's heads and the queries of weight * p
  std::uint32_t requests = 0;  ///< queries in which some query head of the group requested it
  std::uint32_t last_request = 0;  ///< position of the last such query; meaningful if requests > 0
  std::uint32_t queries = 0;       ///< queries that could see the token

  constexpr bool operator==(const Observation&) const = default;
};

inline constexpr std::uint32_t kNoTail = 0xffff'ffffu;

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
concept HasAdmit = requires(typename P::Slot& slot, Token t, const typename P::Params& p,
                            const Step& s) {
  { P::admit(slot, t, p, s) } -> std::same_as<void>;
};
template <class P>
concept HasObserve = requires(typename P::Slot& slot, const Observation& o,
                              const typename P::Params& p, const Step& s) {
  { P::observe(slot, o, p, s) } -> std::same_as<void>;
};
template <class P>
concept HasRank = requires(const typename P::Slot& slot, Token t, const typename P::Params& p,
                           const Step& s) {
  { P::rank(slot, t, p, s) } -> std::same_as<std::uint64_t>;
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

/// A complete policy. Hooks and declarations must match both ways: a hook that is declared must be
/// there, and one that is not declared must not.
template <class P>
concept Policy = hooks::HasInfo<P> && hooks::HasTypes<P> && hooks::HasParamList<P> &&
                 hooks::HasAdmit<P> && hooks::HasRank<P> &&
                 (hooks::HasObserve<P> == (P::kInfo.needs != Needs::nothing)) &&
                 (hooks::HasWeight<P> == P::kInfo.weighted) &&
                 (hooks::HasTail<P> == P::kInfo.weighted);

/// P's parameters from one value for each line of kParams.
template <class P>
constexpr typename P::Params params_from(const double* values) {
  typename P::Params params{};
  if constexpr (!std::is_empty_v<typename P::Params>)
    for (const auto& param : P::kParams) params.*(param.member) = *values++;
  return params;
}

/// P's parameters at their standard values.
template <class P>
constexpr typename P::Params standard_params() {
  typename P::Params params{};
  if constexpr (!std::is_empty_v<typename P::Params>)
    for (const auto& param : P::kParams) params.*(param.member) = param.standard;
  return params;
}

namespace hooks {
/// Runs every hook once. Slots are reused, so admit() has to set all that the others read: a slot
/// that starts without a value shows whether it does.
template <class P>
constexpr bool run_once(typename P::Slot& slot) {
  const typename P::Params params = standard_params<P>();
  const Step step{.now = 1, .budget = 2, .live = 1, .queries = 1};
  P::admit(slot, Token{}, params, step);
  if constexpr (P::kInfo.needs != Needs::nothing)
    P::observe(slot, Observation{.queries = 1}, params, step);
  if constexpr (P::kInfo.weighted) static_cast<void>(P::weight(P::tail(params), params));
  static_cast<void>(P::rank(slot, Token{}, params, step));
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
/// Whether rank() is the token's position, whatever the token received.
template <class P>
constexpr bool ranks_by_position() {
  const typename P::Params params = standard_params<P>();
  const Step step{.now = 9, .budget = 4, .live = 3, .queries = 1};
  for (const std::uint32_t position : {0u, 1u, 8u}) {
    typename P::Slot slot{};
    P::admit(slot, Token{position}, params, step);
    if constexpr (P::kInfo.needs != Needs::nothing)
      P::observe(slot, Observation{.mass = 5, .requests = 1, .last_request = 9, .queries = 1},
                 params, step);
    if (P::rank(slot, Token{position}, params, step) != position) return false;
  }
  return true;
}
template <class P>
concept AreConstexpr = requires {
  typename std::bool_constant<run_on_zeros<P>()>;
};
template <class P>
concept AdmitSetsSlot = requires {
  typename std::bool_constant<run_on_nothing<P>()>;
};
}  // namespace hooks

/// What check_policy() asks of a type that has kInfo, Params and Slot.
template <class P>
consteval void check_hooks() {
  static_assert(hooks::HasParamList<P>,
                "policy: a Params with members needs `static constexpr Param<Params> kParams[]`");
  static_assert(
      hooks::HasAdmit<P>,
      "policy: needs `static constexpr void admit(Slot&, Token, const Params&, const Step&)`");
  static_assert(
      hooks::HasRank<P>,
      "policy: needs `static constexpr std::uint64_t rank(const Slot&, Token, const Params&, "
      "const Step&)`");
  static_assert(P::kInfo.needs == Needs::nothing || hooks::HasObserve<P>,
                "policy: kInfo.needs asks for observations, so it needs `static constexpr void "
                "observe(Slot&, const Observation&, const Params&, const Step&)`");
  static_assert(
      P::kInfo.needs != Needs::nothing || !hooks::HasObserve<P>,
      "policy: has observe(), but kInfo.needs says nothing: say Needs::mass or Needs::requests");
  static_assert(
      !P::kInfo.weighted || (hooks::HasWeight<P> && hooks::HasTail<P>),
      "policy: kInfo.weighted needs `static constexpr float weight(std::uint32_t age, const "
      "Params&)` and `static constexpr std::uint32_t tail(const Params&)`");
  static_assert(P::kInfo.weighted || (!hooks::HasWeight<P> && !hooks::HasTail<P>),
                "policy: has weight() or tail(), but kInfo.weighted is false");
  if constexpr (Policy<P>) {
    static_assert(
        hooks::AreConstexpr<P>,
        "policy: every hook must be constexpr, so that one text compiles for host and device");
    static_assert(
        !hooks::AreConstexpr<P> || hooks::AdmitSetsSlot<P>,
        "policy: admit() must set every member of Slot that observe() and rank() read, because "
        "slots are reused");
    if constexpr (P::kInfo.oldest_first && hooks::AreConstexpr<P>)
      static_assert(hooks::ranks_by_position<P>(),
                    "policy: kInfo.oldest_first says that rank() is the token's position");
  }
}

/// Explains, hook by hook, why P is not a Policy. The registry calls it for each of its lines.
template <class P>
consteval bool check_policy() {
  static_assert(hooks::HasInfo<P>, "policy: needs `static constexpr PolicyInfo kInfo{...}`");
  static_assert(hooks::HasTypes<P>, "policy: needs trivially copyable types Params and Slot");
  if constexpr (hooks::HasInfo<P> && hooks::HasTypes<P>) check_hooks<P>();
  return true;
}

/// The registry's type.
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

/// Checks every line of the registry, and that their names differ.
template <class... P>
consteval bool check_registry(PolicyList<P...>) {
  static_assert((check_policy<P>() && ...));
  if constexpr ((Policy<P> && ...))
    static_assert(names_differ<P...>(), "registry: two policies have the same name");
  return true;
}

}  // namespace kvlab
