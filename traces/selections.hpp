// Selections: the tokens that a sparse-attention engine selected at each query. A trace has
// selections as an extra, or it contains nothing else. See docs/reference/trace-format.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "traces/trace.hpp"

namespace kvlab {

inline constexpr std::string_view kSelectedFile = "selected.safetensors",
                                  kSelectedTensor = "selected";
/// The entry of a row that names no token. It pads the rows of shorter selections.
inline constexpr std::int32_t kNoToken = -1;
/// Maximum number of tokens that a query selects.
inline constexpr std::uint32_t kMaxSelected = 1u << 20;

/// Selections to write.
struct SelectionsToWrite {
  Queries queries;       ///< the queries for which tokens were selected
  std::uint32_t tokens;  ///< entries of a row (K)
  /// For each layer without a sliding window: token positions [kv_heads, queries, tokens], padded
  /// with kNoToken.
  std::vector<std::span<const std::int32_t>> layers;
};

/// Positions of the queries of a trace with these segments, ascending.
std::vector<std::uint32_t> query_positions(const std::vector<Segment>& segments, Queries queries);

/// Reads the row of the query at position `query` into `positions`, ascending. Returns the reason
/// why the row is not a valid selection for this query; empty if it is one.
std::string read_selection(std::span<const std::int32_t> row, std::uint32_t query,
                           std::vector<std::uint32_t>& positions);

/// Returns the number of entries of a row. Throws std::runtime_error unless the tensors of the file
/// are the selections of a trace with this header, at `queries` queries.
std::uint32_t check_selected_tensors(const SafetensorsFile& file, const TraceHeader& header,
                                     std::size_t queries);

/// Adds selections to a finished trace, or replaces those that it has. Throws std::invalid_argument
/// that names the layer, KV head and query if a row is not a valid selection.
void write_selections(const std::filesystem::path& directory, const SelectionsToWrite& selections);

/// Writes a trace that has only selections. The directory must not exist. Throws as
/// write_selections() and the constructor of TraceWriter do; no directory is left then.
void write_selections_trace(const std::filesystem::path& directory, TraceHeader header,
                            std::span<const std::int32_t> ids, const std::vector<Segment>& segments,
                            const SelectionsToWrite& selections);

}  // namespace kvlab
