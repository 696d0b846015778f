// A lane: configurations of one KV head that go through the same arithmetic together.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "sim/lanes/group_rows.hpp"
#include "sim/metrics.hpp"
#include "sim/replay.hpp"

namespace kvlab {

/// A lane's configurations, which outlive it.
using LaneConfigs = std::vector<const ResolvedConfig*>;

/// Called with the lane's configuration, a query and the live positions it attended, ascending.
using LaneWatcher = std::function<void(std::size_t, std::uint32_t, std::span<const std::uint32_t>)>;

class Lane {
 public:
  virtual ~Lane() = default;
  /// Whether attend() will look at the row of `query`. One row too many is harmless.
  virtual bool wants_row(std::uint32_t query) const = 0;
  /// Takes the queries [first, first + count) through every configuration; the blocks come in
  /// order, each once. `rows` holds the block if any of its rows is wanted.
  virtual void attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) = 0;
  /// By configuration of the lane; takes the figures out.
  virtual std::vector<HeadOutcome> outcomes() = 0;
  /// May be null.
  virtual void watch(LaneWatcher watcher) = 0;
};

/// Where in a sequence of admissions a cache is.
class AdmissionCursor {
 public:
  explicit AdmissionCursor(const std::vector<Admission>& admissions) : admissions_(&admissions) {}
  const Admission& current() const { return (*admissions_)[next_]; }
  bool begins_at(std::uint32_t query) const { return query == current().first; }
  bool ends_at(std::uint32_t query) const {
    return query + 1 == current().first + current().tokens;
  }
  /// Younger queries of the admission.
  std::uint32_t age_of(std::uint32_t query) const {
    return current().first + current().tokens - 1 - query;
  }
  void advance() { ++next_; }

 private:
  const std::vector<Admission>* admissions_;
  std::size_t next_ = 0;
};

}  // namespace kvlab
