// The states of the slots of one cache, type-erased: virtual calls are per batch, never per token.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "policies/policy.hpp"

namespace kvlab {

class PolicyStates {
 public:
  virtual ~PolicyStates() = default;

  /// Makes slots 0 … count-1 exist.
  virtual void reserve(std::size_t count) = 0;
  virtual void admit(std::uint32_t slot, Token token, const Step& step) = 0;
  /// seen[i] is what slots[i] received. A no-op for a policy that needs nothing.
  virtual void observe(std::span<const std::uint32_t> slots, std::span<const Observation> seen,
                       const Step& step) = 0;
  /// ranks[i] = rank of slots[i], which holds the token at positions[i].
  virtual void rank(std::span<const std::uint32_t> slots, std::span<const std::uint32_t> positions,
                    const Step& step, std::span<std::uint64_t> ranks) const = 0;
  /// The weight of the query that has `age` younger ones in its admission.
  virtual float weight(std::uint32_t age) const = 0;
  /// Weights are 0 from this age on; kNoTail: never.
  virtual std::uint32_t tail() const = 0;
  /// The bytes of one slot's state; padding may be anything.
  virtual std::span<const std::byte> bytes(std::uint32_t slot) const = 0;
  /// Whether it is the state that `other` are the bytes of, but for padding.
  virtual bool same(std::uint32_t slot, std::span<const std::byte> other) const {
    return std::ranges::equal(bytes(slot), other);
  }
};

template <Policy P>
class PolicyStatesOf final : public PolicyStates {
 public:
  explicit PolicyStatesOf(const typename P::Params& params) : params_(params) {}

  void reserve(std::size_t count) override {
    if (count > states_.size()) states_.resize(count);
  }
  void admit(std::uint32_t slot, Token token, const Step& step) override {
    P::admit(states_[slot], token, params_, step);
  }
  void observe(std::span<const std::uint32_t> slots, std::span<const Observation> seen,
               const Step& step) override {
    if constexpr (P::kInfo.needs != Needs::nothing)
      for (std::size_t i = 0; i < slots.size(); ++i)
        P::observe(states_[slots[i]], seen[i], params_, step);
  }
  void rank(std::span<const std::uint32_t> slots, std::span<const std::uint32_t> positions,
            const Step& step, std::span<std::uint64_t> ranks) const override {
    for (std::size_t i = 0; i < slots.size(); ++i)
      ranks[i] = P::rank(states_[slots[i]], Token{positions[i]}, params_, step);
  }
  float weight(std::uint32_t age) const override {
    if constexpr (P::kInfo.weighted) return P::weight(age, params_);
    return 1.0f;
  }
  std::uint32_t tail() const override {
    if constexpr (P::kInfo.weighted) return P::tail(params_);
    return kNoTail;
  }
  std::span<const std::byte> bytes(std::uint32_t slot) const override {
    if constexpr (std::is_empty_v<typename P::Slot>) return {};
    return std::as_bytes(std::span(&states_[slot], 1));
  }
  bool same(std::uint32_t slot, std::span<const std::byte> other) const override {
    if constexpr (std::is_empty_v<typename P::Slot>) {
      return other.empty();
    } else {
      if (other.size() != sizeof(typename P::Slot)) return false;
      typename P::Slot one = states_[slot], two;
      std::memcpy(&two, other.data(), sizeof two);
      clear_padding(one);
      clear_padding(two);
      return std::ranges::equal(std::as_bytes(std::span(&one, 1)),
                                std::as_bytes(std::span(&two, 1)));
    }
  }

 private:
  static void clear_padding([[maybe_unused]] typename P::Slot& slot) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_clear_padding)
    __builtin_clear_padding(&slot);
#endif
#endif
  }

  typename P::Params params_;
  std::vector<typename P::Slot> states_;
};

}  // namespace kvlab
