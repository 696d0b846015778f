// A configuration batch: several configurations that are run together on one KV head, so that
// results that are the same for all of them are computed once.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "sim/config_batches/group_rows.hpp"
#include "sim/metrics.hpp"
#include "sim/replay.hpp"

namespace kvlab {

/// The configurations of a configuration batch. They must outlive it.
using BatchedConfigs = std::vector<const ResolvedConfig*>;

/// A function that gets the index of a configuration in the batch, a query, and the live positions
/// to which the query attended under that configuration, in ascending order.
using ConfigBatchWatcher =
    std::function<void(std::size_t, std::uint32_t, std::span<const std::uint32_t>)>;

class ConfigBatch {
 public:
  virtual ~ConfigBatch() = default;
  /// Whether attend() may read the attention row of `query`.
  virtual bool wants_row(std::uint32_t query) const = 0;
  /// Runs a block of queries, [first, first + count), through every configuration. Call it once for
  /// each block, in order. If wants_row() is true for any query of the block, `rows` must hold the
  /// rows of the block.
  virtual void attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) = 0;
  /// Returns one outcome for each configuration of the batch. Moves the metrics out, so call it
  /// once.
  virtual std::vector<HeadOutcome> outcomes() = 0;
  /// `watcher` may be null.
  virtual void watch(ConfigBatchWatcher watcher) = 0;
};

/// Remembers which append of a sequence of appends a cache processes now.
class AppendCursor {
 public:
  explicit AppendCursor(const std::vector<Append>& appends) : appends_(&appends) {}
  const Append& current() const { return (*appends_)[next_]; }
  bool begins_at(std::uint32_t query) const { return query == current().first; }
  bool ends_at(std::uint32_t query) const {
    return query + 1 == current().first + current().tokens;
  }
  /// Number of queries of the current append that come after `query`.
  std::uint32_t age_of(std::uint32_t query) const {
    return current().first + current().tokens - 1 - query;
  }
  void advance() { ++next_; }

 private:
  const std::vector<Append>* appends_;
  std::size_t next_ = 0;
};

}  // namespace kvlab
