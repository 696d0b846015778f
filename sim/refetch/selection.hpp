// The tokens that each query of one KV head selects. They do not depend on what a cache keeps, so
// all configurations share them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sim/head_view.hpp"
#include "sim/metrics.hpp"
#include "sim/refetch/selector.hpp"
#include "sim/shared_rows.hpp"

namespace kvlab {

class Selection {
 public:
  /// No query selects tokens yet. `tokens`: length of the sequence.
  explicit Selection(std::uint32_t tokens) : queries_(tokens) {}

  /// Sets the tokens that `query` selects: n ascending positions before the query. `agreed`: how
  /// many of them are among the n most probable tokens; null if they are these n tokens by
  /// definition.
  void set(std::uint32_t query, std::span<const std::uint32_t> positions,
           std::optional<std::uint32_t> agreed = {});
  void set_agreed(std::uint32_t query, std::uint32_t agreed) { queries_[query].agreed = agreed; }
  /// The tokens that `query` selects, ascending.
  std::span<const std::uint32_t> positions(std::uint32_t query) const {
    return std::span(positions_).subspan(queries_[query].begin, queries_[query].count);
  }
  std::optional<std::uint32_t> agreed(std::uint32_t query) const { return queries_[query].agreed; }
  /// Length of the sequence.
  std::uint32_t tokens() const { return static_cast<std::uint32_t>(queries_.size()); }

 private:
  struct Query {
    std::size_t begin = 0;  // index in positions_
    std::uint32_t count = 0;
    std::optional<std::uint32_t> agreed;
  };
  std::vector<std::uint32_t> positions_;
  std::vector<Query> queries_;
};

/// Selects tokens for each measured query by `top` or `page`. Computes all rows of the measured
/// queries.
Selection select_tokens(const Selector& selector, const HeadView& view, const RopeTable& rope,
                        const HeadArithmetic& arithmetic, const MeasuredQueries& measured,
                        SharedRows& rows);

/// The selections that the trace lists for the measured queries of a KV head, without the queries'
/// own tokens. If `rows` is not null, compares them with the most probable tokens.
Selection logged_selections(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head,
                            const MeasuredQueries& measured, SharedRows* rows);

}  // namespace kvlab
