// Optional hooks of policies whose eviction order does not follow from the observations of each
// token alone. Such policies move a hand over the tokens (CLOCK, SIEVE) or keep the order of
// earlier steps (HiSparse). A policy may have any of these members in addition to those of
// policies/policy.hpp:
//
//   // Called after each eviction for every remaining token, and after append() for a token that is
//   // appended in the place of an evicted one.
//   static constexpr void evicted(Slot&, const Eviction&, const Params&);
//
//   // Called before observe(), for every live token. `order`: the number of live tokens that come
//   // before it in the order of rank().
//   static constexpr void reorder(Slot&, std::uint32_t order, const Params&, const Step&);
//
// Only executors on the CPU call these hooks. Executors on CUDA refuse a policy that has one.
#pragma once

#include <cstdint>

#include "policies/policy.hpp"

namespace kvlab {

/// The argument of evicted(). If several tokens were evicted, it describes the last one in the
/// eviction order.
struct Eviction {
  std::uint64_t rank;       ///< rank of the evicted token
  bool was_newest = false;  ///< whether the evicted token was the one appended last
  /// Whether the hook is called for a token that is appended in the place of the evicted one.
  bool is_new = false;
};

namespace hooks {
template <class P>
concept HasEvicted = requires(typename P::Slot& slot, const Eviction& e,
                              const typename P::Params& p) {
  P::evicted(slot, e, p);
};
template <class P>
concept HasReorder = requires(typename P::Slot& slot, std::uint32_t order,
                              const typename P::Params& p, const Step& s) {
  P::reorder(slot, order, p, s);
};
}  // namespace hooks

}  // namespace kvlab
