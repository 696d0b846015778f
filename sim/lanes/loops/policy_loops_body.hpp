// The text of the policy loops; see row_loops_body.hpp for the rules of such a file. `flatten`
// inlines the hooks, so that no copy of a hook leaves this file for the linker to choose.
#pragma once

#include "policies/registry.hpp"
#include "sim/lanes/loops/policy_loops.hpp"

namespace kvlab {
namespace {

template <class P>
struct HooksOf {
  using Slot = typename P::Slot;
  using Params = typename P::Params;

  static void read_params(const double* values, void* params) {
    *static_cast<Params*>(params) = params_from<P>(values);
  }

  [[gnu::flatten]] static void admit(void* slots, const std::uint32_t* positions, std::size_t count,
                                     const void* params, const Step& step) {
    auto* const slot = static_cast<Slot*>(slots);
    for (std::size_t i = 0; i < count; ++i)
      P::admit(slot[i], Token{positions[i]}, *static_cast<const Params*>(params), step);
  }

  [[gnu::flatten]] static void observe(void* slots, const Seen& seen, std::size_t count,
                                       const void* params, const Step& step) {
    if constexpr (P::kInfo.needs != Needs::nothing) {
      const std::size_t older = count > seen.queries ? count - seen.queries : 0;
      observe_part(slots, seen, 0, older, count, params, step);
      observe_part(slots, seen, older, count, count, params, step);
    }
  }

  [[gnu::flatten]] static void rank(const void* slots, const std::uint32_t* positions,
                                    std::size_t count, const void* params, const Step& step,
                                    std::uint64_t* ranks) {
    const auto* const slot = static_cast<const Slot*>(slots);
    const Params own = *static_cast<const Params*>(params);
    const Step now = step;
    for (std::size_t i = 0; i < count; ++i)
      ranks[i] = P::rank(slot[i], Token{positions[i]}, own, now);
  }

  [[gnu::flatten]] static std::size_t first_least(const void* slots, const std::uint32_t* positions,
                                                  std::size_t begin, std::size_t end,
                                                  const void* params, const Step& step) {
    const auto* const slot = static_cast<const Slot*>(slots);
    const Params own = *static_cast<const Params*>(params);
    const Step now = step;
    const auto rank_of = [&](std::size_t i) {
      return P::rank(slot[i], Token{positions[i]}, own, now);
    };
    std::uint64_t least = ~std::uint64_t{0};
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint64_t rank = rank_of(i);
      least = rank < least ? rank : least;
    }
    constexpr std::size_t kAtOnce = 64;
    std::size_t i = begin;
    for (; i + kAtOnce <= end; i += kAtOnce) {
      std::uint64_t found = 0;
      for (std::size_t j = i; j < i + kAtOnce; ++j) found |= rank_of(j) == least;
      if (found) break;
    }
    while (rank_of(i) != least) ++i;
    return i;
  }

  static float weight(std::uint32_t age, const void* params) {
    if constexpr (P::kInfo.weighted) return P::weight(age, *static_cast<const Params*>(params));
    return 1.0f;
  }
  static std::uint32_t tail(const void* params) {
    if constexpr (P::kInfo.weighted) return P::tail(*static_cast<const Params*>(params));
    return kNoTail;
  }

 private:
  /// Tokens [begin, end) of `count`: those before the admission, or its own.
  [[gnu::always_inline]] static void observe_part(void* slots, const Seen& seen, std::size_t begin,
                                                  std::size_t end, std::size_t count,
                                                  const void* params, const Step& step) {
    auto* const slot = static_cast<Slot*>(slots);
    const Params own = *static_cast<const Params*>(params);
    const Step now = step;
    const Seen all = seen;
    for (std::size_t i = begin; i < end; ++i) {
      Observation one;
      if constexpr (P::kInfo.needs == Needs::mass) one.mass = all.mass[i];
      if constexpr (P::kInfo.needs == Needs::requests) {
        one.requests = all.requests[i];
        one.last_request = all.last_request ? all.last_request[i] : one.requests ? all.query : 0;
      }
      const auto younger = static_cast<std::uint32_t>(count - i);
      one.queries = younger < all.queries ? younger : all.queries;
      Slot next = slot[i];
      P::observe(next, one, own, now);
      slot[i] = next;  // whatever the hook does: a store on condition would become a branch
    }
  }
};

template <class P>
constexpr PolicyLoops hooks_of() {
  using Hooks = HooksOf<P>;
  return {.slot_bytes = sizeof(typename P::Slot),
          .params_bytes = sizeof(typename P::Params),
          .read_params = Hooks::read_params,
          .admit = Hooks::admit,
          .observe = Hooks::observe,
          .rank = Hooks::rank,
          .first_least = Hooks::first_least,
          .weight = Hooks::weight,
          .tail = Hooks::tail};
}

template <class... P>
const PolicyLoops* loops_of(PolicyList<P...>) {
  static constexpr PolicyLoops loops[]{hooks_of<P>()...};
  return loops;
}

}  // namespace
}  // namespace kvlab
