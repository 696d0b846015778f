// A configuration batch: configurations of one KV head that go through the same arithmetic
// together.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "sim/config_batches/group_rows.hpp"
#include "sim/metrics.hpp"
#include "sim/replay.hpp"

namespace kvlab {

/// A configuration batch's configurations, which outlive it.
using BatchedConfigs = std::vector<const ResolvedConfig*>;

/// Called with the configuration batch's configuration, a query and the live positions it attended,
/// ascending.
using ConfigBatchWatcher =
    std::function<void(std::size_t, std::uint32_t, std::span<const std::uint32_t>)>;

class ConfigBatch {
 public:
  virtual ~ConfigBatch() = default;
  /// Whether attend() will look at the row of `query`. One row too many is harmless.
  virtual bool wants_row(std::uint32_t query) const = 0;
  /// Runs the queries [first, first + count) through every configuration. The blocks come in order,
  /// each once. `rows` holds the block if any of its rows is wanted.
  virtual void attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) = 0;
  /// Returns the outcomes by configuration, and moves the metrics out.
  virtual std::vector<HeadOutcome> outcomes() = 0;
  /// May be null.
  virtual void watch(ConfigBatchWatcher watcher) = 0;
};

/// Where in a sequence of appends a cache is.
class AppendCursor {
 public:
  explicit AppendCursor(const std::vector<Append>& appends) : appends_(&appends) {}
  const Append& current() const { return (*appends_)[next_]; }
  bool begins_at(std::uint32_t query) const { return query == current().first; }
  bool ends_at(std::uint32_t query) const {
    return query + 1 == current().first + current().tokens;
  }
  /// Younger queries of the append.
  std::uint32_t age_of(std::uint32_t query) const {
    return current().first + current().tokens - 1 - query;
  }
  void advance() { ++next_; }

 private:
  const std::vector<Append>* appends_;
  std::size_t next_ = 0;
};

}  // namespace kvlab
