// The text files of a trace: manifest.json, and the part of it that each shard repeats. See
// docs/reference/trace-format.md.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "traces/trace.hpp"

namespace kvlab {

inline constexpr std::string_view kManifestFile = "manifest.json";
inline constexpr std::size_t kMaxManifestBytes = 100'000'000;
inline constexpr std::string_view kTokensFile = "tokens.safetensors";
/// Maximum number of tokens, so that positions fit an int32.
inline constexpr std::uint32_t kMaxTraceTokens = 0x7fff'ffff;
inline constexpr std::uint32_t kMaxLayers = 65'536, kMaxHeads = 65'536, kMaxHeadSize = 65'536;

std::string manifest_text(const Manifest& manifest);
/// Parses a header in the manifest's format, without the data of tokens.safetensors. Throws as
/// parse_manifest() does.
TraceHeader parse_header(std::string_view text);
/// Throws std::runtime_error with a text that begins with `what` for: invalid JSON, a later format,
/// a key that is missing, unknown or out of range, and segments or shards that do not add up to the
/// number of tokens.
Manifest parse_manifest(std::string_view text, std::string_view what);

/// The description of the trace that each shard holds in `__metadata__`, so that an interrupted
/// capture can be sealed.
struct ShardMetadata {
  TraceHeader header;             // as in Manifest
  std::vector<Segment> segments;  // up to the shard's end
  std::uint32_t first = 0, tokens = 0;
};

std::map<std::string, std::string> shard_metadata(const ShardMetadata& metadata);
/// Throws std::runtime_error that names the file if a key is missing or wrong.
ShardMetadata parse_shard_metadata(const SafetensorsFile& file);

/// Whether two descriptions can belong to one trace: they have the same model, config, rounding and
/// provenance. Passages may differ, because a shortened trace has fewer.
bool same_description(const TraceHeader& a, const TraceHeader& b);

/// Throws std::invalid_argument unless a reader would accept this header.
void check_header(const TraceHeader& header);
/// Throws std::runtime_error with a text that begins with `what` if a number is not finite or out
/// of range, or if there are more frequencies than half the head size.
void check_rope_and_scale(const TraceHeader& header, std::string_view what);

/// Checks one layer's row in the same way: throws std::runtime_error with a text that begins with
/// `what`. Call it before computing with a row that a caller provides, because no other function
/// checks the lengths of its arrays.
void check_row(const RowSpec& row, const ModelShape& shape, std::uint32_t layer,
               std::string_view what);

/// The segments of the first `tokens` tokens.
std::vector<Segment> clip(const std::vector<Segment>& segments, std::uint32_t tokens);
/// The passages that lie within the first `tokens` tokens.
std::vector<Passage> clip(const std::vector<Passage>& passages, std::uint32_t tokens);
/// The number of tokens in all prompt segments.
std::uint32_t prompt_tokens_of(const std::vector<Segment>& segments);

/// Returns the file name of a shard, such as shard-00012.safetensors.
std::string shard_name(std::size_t index);
/// Returns the name of a shard's gradient file, such as grad-00012.safetensors.
std::string gradient_name(std::size_t index);

/// Whether a folder was left by a capture that was killed before its first shard. A TraceWriter may
/// start again there.
bool is_unbegun_trace(const std::filesystem::path& directory);

}  // namespace kvlab
