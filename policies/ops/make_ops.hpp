// Builds a policy's function table from its type. One source file per instruction set includes this
// header. All functions of the header are local to the including file, and `flatten` inlines the
// hooks. Otherwise the linker could replace a hook by a copy that was compiled for another
// instruction set.
#pragma once

#include "policies/bytes.hpp"
#include "policies/ops/ops.hpp"

namespace kvlab {
namespace {

/// The states that `slots` points to, or empty states for a policy that keeps none.
template <class Slot, bool kEmpty = std::is_empty_v<Slot>>
struct SlotArray {
  Slot* slots;
  Slot& operator[](std::size_t i) const { return slots[i]; }
};
template <class Slot>
struct SlotArray<Slot, true> {
  Slot* slots;
  std::remove_const_t<Slot> operator[](std::size_t) const { return {}; }
};

template <class P>
struct OpsOf {
  using Slot = typename P::Slot;
  using Params = typename P::Params;
  using Slots = SlotArray<Slot>;
  using ConstSlots = SlotArray<const Slot>;

  [[gnu::flatten]] static bool write(std::span<const double> values, std::byte* to) {
    return write_params<P>(values, to);
  }

  [[gnu::flatten]] static void append(void* slots, Tokens tokens, std::size_t count,
                                      const void* params, const Step& step) {
    const Slots slot{static_cast<Slot*>(slots)};
    const Params own = params_of(params);
    for (std::size_t i = 0; i < count; ++i) {
      auto&& one = slot[i];
      P::append(one, token_at(tokens, i), own, step);
    }
  }

  [[gnu::flatten]] static void observe(void* slots, const Seen& seen, std::size_t count,
                                       const void* params, const Step& step) {
    if constexpr (P::kInfo.needs != Needs::nothing) {
      const std::size_t older = count > seen.queries ? count - seen.queries : 0;
      observe_part(slots, seen, 0, older, count, params, step);
      observe_part(slots, seen, older, count, count, params, step);
    }
  }

  [[gnu::flatten]] static void observe_each(void* slots, const Observation* seen, std::size_t count,
                                            const void* params, const Step& step) {
    if constexpr (P::kInfo.needs != Needs::nothing) {
      const Slots slot{static_cast<Slot*>(slots)};
      for (std::size_t i = 0; i < count; ++i) {
        auto&& one = slot[i];
        P::observe(one, seen[i], params_of(params), step);
      }
    }
  }

  [[gnu::flatten]] static RankType rank(const void* slots, Tokens tokens, std::size_t count,
                                        const void* params, const Step& step,
                                        std::uint64_t* ranks) {
    const ConstSlots slot{static_cast<const Slot*>(slots)};
    const Params own = params_of(params);
    const Step now = step;
    for (std::size_t i = 0; i < count; ++i)
      ranks[i] = rank_key(P::rank(slot[i], token_at(tokens, i), own, now));
    return kRankType<P>;
  }

  [[gnu::flatten]] static std::size_t find_min_rank(const void* slots, Tokens tokens,
                                                    std::size_t begin, std::size_t end,
                                                    const void* params, const Step& step) {
    const ConstSlots slot{static_cast<const Slot*>(slots)};
    const Params own = params_of(params);
    const Step now = step;
    const auto rank_of = [&](std::size_t i) {
      return rank_key(P::rank(slot[i], token_at(tokens, i), own, now));
    };
    std::uint64_t lowest = ~std::uint64_t{0};
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint64_t rank = rank_of(i);
      lowest = rank < lowest ? rank : lowest;
    }
    constexpr std::size_t kAtOnce = 64;
    std::size_t i = begin;
    for (; i + kAtOnce <= end; i += kAtOnce) {
      std::uint64_t found = 0;
      for (std::size_t j = i; j < i + kAtOnce; ++j) found |= rank_of(j) == lowest;
      if (found) break;
    }
    while (rank_of(i) != lowest) ++i;
    return i;
  }

  [[gnu::flatten]] static float weight(std::uint32_t age, const void* params) {
    if constexpr (P::kInfo.weighted) return P::weight(age, params_of(params));
    return 1.0f;
  }
  [[gnu::flatten]] static std::uint32_t tail(const void* params) {
    if constexpr (P::kInfo.weighted) return P::tail(params_of(params));
    return kNoTail;
  }

  [[gnu::flatten]] static void evicted(void* slots, std::size_t count, const Eviction& eviction,
                                       const void* params) {
    if constexpr (hooks::HasEvicted<P>)
      for (std::size_t i = 0; i < count; ++i)
        P::evicted(static_cast<Slot*>(slots)[i], eviction, params_of(params));
  }
  [[gnu::flatten]] static void reorder(void* slots, const std::uint32_t* order, std::size_t count,
                                       const void* params, const Step& step) {
    if constexpr (hooks::HasReorder<P>)
      for (std::size_t i = 0; i < count; ++i)
        P::reorder(static_cast<Slot*>(slots)[i], order[i], params_of(params), step);
  }

  static void clear_padding([[maybe_unused]] void* slot) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_clear_padding)
    if constexpr (!std::is_empty_v<Slot>) __builtin_clear_padding(static_cast<Slot*>(slot));
#endif
#endif
  }

 private:
  [[gnu::always_inline]] static Token token_at(const Tokens& tokens, std::size_t i) {
    constexpr std::uint32_t kCount = P::kInfo.feature_count();
    Token token{tokens.positions[i]};
    for (std::uint32_t c = 0; c < kCount; ++c) token.feature[c] = tokens.features[i * kCount + c];
    return token;
  }

  [[gnu::always_inline]] static Params params_of(const void* params) {
    if constexpr (std::is_empty_v<Params>)
      return {};
    else
      return *static_cast<const Params*>(params);
  }

  /// Observes tokens [begin, end) of `count` tokens: either the tokens before the append, or the
  /// tokens of the append.
  [[gnu::always_inline]] static void observe_part(void* slots, const Seen& seen, std::size_t begin,
                                                  std::size_t end, std::size_t count,
                                                  const void* params, const Step& step) {
    const Slots slot{static_cast<Slot*>(slots)};
    const Params own = params_of(params);
    const Step now = step;
    const Seen all = seen;
    for (std::size_t i = begin; i < end; ++i) {
      Observation one;
      if constexpr (needs_mass(P::kInfo.needs)) one.mass = all.mass[i];
      if constexpr (needs_requests(P::kInfo.needs)) {
        one.requests = all.requests[i];
        one.last_request = all.last_request ? all.last_request[i] : one.requests ? all.query : 0;
      }
      const auto younger = static_cast<std::uint32_t>(count - i);
      one.queries = younger < all.queries ? younger : all.queries;
      auto&& place = slot[i];
      Slot next = place;
      P::observe(next, one, own, now);
      place = next;  // unconditional: a conditional store would compile to a branch
    }
  }
};

/// P's parameters for the command line.
template <class P>
struct ParamInfos {
  static constexpr std::size_t kCount = [] {
    if constexpr (std::is_empty_v<typename P::Params>)
      return std::size_t{0};
    else
      return std::size(P::kParams);
  }();
  struct List {
    ParamInfo items[kCount + 1];  // one extra item, because C++ has no empty arrays
  };
  static constexpr List kList = [] {
    List list{};
    if constexpr (kCount > 0)
      for (std::size_t i = 0; i < kCount; ++i) {
        const auto& param = P::kParams[i];
        list.items[i] = {param.name, param.help, param.standard, param.min_value, param.max_value};
      }
    return list;
  }();
};

template <Policy P>
constexpr PolicyOps make_ops() {
  using Ops = OpsOf<P>;
  return {.info = P::kInfo,
          .params = {ParamInfos<P>::kList.items, ParamInfos<P>::kCount},
          .slot_bytes = kSlotBytes<P>,
          .params_bytes = kParamsBytes<P>,
          .rank_type = kRankType<P>,
          .write_params = Ops::write,
          .append = Ops::append,
          .observe = Ops::observe,
          .observe_each = Ops::observe_each,
          .rank = Ops::rank,
          .find_min_rank = Ops::find_min_rank,
          .weight = Ops::weight,
          .tail = Ops::tail,
          .clear_padding = Ops::clear_padding,
          .evicted = hooks::HasEvicted<P> ? Ops::evicted : nullptr,
          .reorder = hooks::HasReorder<P> ? Ops::reorder : nullptr};
}

template <class... P>
std::span<const PolicyOps> ops_of(PolicyList<P...>) {
  static constexpr PolicyOps ops[]{make_ops<P>()...};
  return ops;
}

}  // namespace
}  // namespace kvlab
