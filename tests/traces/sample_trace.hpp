// A small random sequence, and mistakes that a decoder might make. Its attention is computed in
// float64 by plain loops that share no code with kvlab.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "traces/trace.hpp"

namespace kvlab::test {

/// A mistake in a decoder's outputs.
enum class Mistake {
  none,
  no_rope,
  interleaved_rope,  // dimensions 2 i and 2 i + 1 rotate together
  later_positions,   // keys are one position off
  heads_in_turn,     // query head h reads KV head h mod Hkv
  scale,             // softmax scale 10% too large
  not_causal,        // each query sees one key of its future
  no_first_key,      // the first key is left out
  lse_base_two,      // log-sum-exp in base 2
  nan_output,        // one output of the last layer is NaN
};

struct Sample {
  TraceHeader header;
  std::vector<std::int32_t> ids;            // [tokens]
  std::vector<std::vector<float>> q, k, v;  // by layer: [tokens, heads, head_size]
  std::vector<std::vector<float>> out,
      lse;  // [tokens, query_heads, head_size], [tokens, query_heads]

  std::uint32_t tokens() const { return static_cast<std::uint32_t>(ids.size()); }
};

/// Makes a sample with 2 layers, 6 query heads and 2 KV heads of size 8, with 6 rotated dimensions.
/// `magnitude`: the standard deviation of queries and keys.
Sample make_sample(std::uint32_t tokens, Dtype dtype, Rounding rounding,
                   Mistake mistake = Mistake::none, float magnitude = 1.3f,
                   std::vector<RowSpec> rows = {});
/// 1,100 tokens in two shards, in float32.
const Sample& two_shards();
/// Two row specs that differ in all fields: sliding window, soft cap, table, scale and sinks.
std::vector<RowSpec> sample_rows();

/// Writes tokens [first, first + count) as one append.
void append(TraceWriter& writer, const Sample& sample, std::uint32_t first, std::uint32_t count,
            SegmentKind kind, bool new_segment = false);

/// Writes a trace whose first `prompt` tokens are one append; the others are appended one by one.
void write_trace(const std::filesystem::path& directory, const Sample& sample,
                 std::uint32_t prompt);

}  // namespace kvlab::test
