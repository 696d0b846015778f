// One shard of a trace while a decoder fills it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "traces/trace.hpp"

namespace kvlab {

/// What one layer computed for consecutive tokens; see TraceWriter::layer.
struct LayerRows {
  std::span<const float> q, k, v, out, lse;

  /// Rows [first, first + count) of these, for a model of this shape.
  LayerRows slice(const ModelShape& shape, std::size_t first, std::size_t count) const;
};

/// Keys, values and queries of up to 1024 tokens, in the trace's dtype and the file's layout, and
/// the few attention outputs that are kept for checking.
class ShardBuffer {
 public:
  ShardBuffer(const ModelShape& shape, std::uint32_t first);

  std::uint32_t first() const { return first_; }  ///< position of its first token
  /// Puts `count` tokens of one layer at row `row` of the shard. Rows arrive in order.
  void put(std::uint32_t layer, std::uint32_t row, std::uint32_t count, const LayerRows& rows);
  /// Squared norms of the residual stream, one for each of those rows.
  void put_residual(std::uint32_t layer, std::uint32_t row, std::span<const float> norm2);
  /// Writes the first `tokens` rows to `path`; the buffer is of no more use then. Returns the
  /// XXH3-64.
  std::string write(const std::filesystem::path& path, std::uint32_t tokens,
                    const std::map<std::string, std::string>& metadata);

 private:
  using Bytes = std::unique_ptr<std::byte[]>;
  struct Layer {
    Bytes q, k, v;  // [head, 1024, head_size]
    std::vector<float>
        out;  // [query_heads, 16 + 1, head_size], the last of the 17 for the latest row
    std::vector<float> lse;       // [query_heads, 16 + 1], or empty
    std::vector<float> residual;  // [1024], or empty
  };

  void put_heads(std::byte* to, std::uint32_t heads, std::uint32_t row, std::uint32_t count,
                 std::span<const float> from) const;
  void keep_check_row(Layer& layer, std::uint32_t slot, std::uint32_t index, const LayerRows& rows);
  std::span<const std::byte> compacted(Bytes& bytes, std::uint32_t heads,
                                       std::uint32_t tokens) const;

  ModelShape shape_;
  std::uint32_t first_;
  std::vector<Layer> layers_;
};

}  // namespace kvlab
