// The texts of a trace: manifest.json, and what each shard repeats of it. See
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
/// Positions fit an int32.
inline constexpr std::uint32_t kMaxTraceTokens = 0x7fff'ffff;
inline constexpr std::uint32_t kMaxLayers = 65'536, kMaxHeads = 65'536, kMaxHeadSize = 65'536;

std::string manifest_text(const Manifest& manifest);
/// The header in a text of the manifest's keys, without what tokens.safetensors holds. Throws as
/// parse_manifest.
TraceHeader parse_header(std::string_view text);
/// Throws std::runtime_error beginning with `what`: not JSON, a later format, a key that is
/// missing, unknown or out of range, segments or shards that do not add up.
Manifest parse_manifest(std::string_view text, std::string_view what);

/// What a shard says of its trace in `__metadata__`, so that a killed capture can be sealed.
struct ShardMetadata {
  TraceHeader header;             // as in Manifest
  std::vector<Segment> segments;  // up to the shard's end
  std::uint32_t first = 0, tokens = 0;
};

std::map<std::string, std::string> shard_metadata(const ShardMetadata& metadata);
/// Throws std::runtime_error that names the file: a key that is missing or wrong.
ShardMetadata parse_shard_metadata(const SafetensorsFile& file);

/// Whether two traces could be one: same model, config, rounding and provenance. Passages may
/// differ: a trace that was cut has fewer.
bool same_description(const TraceHeader& a, const TraceHeader& b);

/// Throws std::invalid_argument unless a reader would accept this header.
void check_header(const TraceHeader& header);
/// Throws std::runtime_error beginning with `what`: a number that is not finite or out of range,
/// more frequencies than half the head size.
void check_rope_and_scale(const TraceHeader& header, std::string_view what);

/// The same of how one layer attends: throws std::runtime_error beginning with `what`. Code
/// that computes with a row from a caller calls this first: nothing else bounds its lengths.
void check_row(const RowSpec& row, const ModelShape& shape, std::uint32_t layer,
               std::string_view what);

/// The segments of the first `tokens` tokens.
std::vector<Segment> clipped(const std::vector<Segment>& segments, std::uint32_t tokens);
/// The passages that lie within the first `tokens` tokens.
std::vector<Passage> clipped(const std::vector<Passage>& passages, std::uint32_t tokens);
/// The tokens of all prompt segments.
std::uint32_t prompt_tokens_of(const std::vector<Segment>& segments);

/// shard-00012.safetensors
std::string shard_name(std::size_t index);
/// grad-00012.safetensors
std::string gradient_name(std::size_t index);

/// Whether a folder is what a capture left that was killed before its first shard. A TraceWriter
/// begins again there.
bool is_unbegun_trace(const std::filesystem::path& directory);

}  // namespace kvlab
