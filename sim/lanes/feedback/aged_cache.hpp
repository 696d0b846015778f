// The live tokens of one cache under the one rule of eviction, as LiveSet keeps them, but by age:
// positions and states are contiguous, so that a policy's hooks run as vector loops.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "policies/live_set.hpp"
#include "sim/lanes/loops/policy_loops.hpp"

namespace kvlab {

class AgedCache {
 public:
  /// `spec` must name a registered policy and outlive the cache. `tokens`: of the sequence.
  AgedCache(const PolicySpec& spec, std::uint32_t budget, Guards guards, LiveSet::Identity identity,
            std::uint32_t tokens);

  std::span<const std::uint32_t> positions() const { return {positions_.data(), size_}; }
  /// The age from which on live tokens follow one another, to the youngest.
  std::size_t following() const;
  std::uint32_t size() const { return size_; }
  std::uint64_t evictions() const { return evictions_; }
  std::uint32_t live_max() const { return live_max_; }
  /// Bit p: whether position p is live.
  const std::uint64_t* live_bits() const { return bits_.data(); }

  Needs needs() const { return needs_; }
  float weight(std::uint32_t age) const { return loops_.weight(age, params_.data()); }
  std::uint32_t tail() const { return loops_.tail(params_.data()); }

  /// Returns how many left; last_victim() is the age at which one alone left.
  std::uint32_t make_room(std::uint32_t now);
  std::size_t last_victim() const { return last_victim_; }
  void admit(std::uint32_t first, std::uint32_t count);
  /// What the live tokens received from the last admission.
  void observe(const Seen& seen);

 private:
  Step step(std::uint32_t now, std::uint32_t queries) const;
  void reserve(std::size_t count);
  std::pair<std::size_t, std::size_t> unguarded(std::uint32_t now) const;
  std::size_t one_victim(std::uint32_t now) const;
  void evict(std::size_t index);
  void evict_many(std::uint32_t now, std::uint32_t leaving);
  std::byte* slot(std::size_t index) { return states_.data() + index * loops_.slot_bytes; }

  const PolicyLoops& loops_;
  Needs needs_;
  std::uint32_t budget_;
  Guards guards_;
  LiveSet::Identity identity_;
  std::vector<std::byte> params_, states_;  // states_: [age]
  std::vector<std::uint32_t> positions_;    // [age], with room to spare
  std::vector<std::uint64_t> bits_;
  std::uint32_t size_ = 0, live_max_ = 0, admitted_first_ = 0, admitted_count_ = 0;
  std::uint64_t evictions_ = 0;
  std::size_t last_victim_ = 0;
};

}  // namespace kvlab
