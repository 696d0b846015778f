#include <fmt/core.h>

#include <stdexcept>

#include "traces/manifest.hpp"
#include "traces/shard.hpp"
#include "traces/trace.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

/// The whole shards that a killed capture left, and what they say of their trace.
struct Rescued {
  std::vector<ShardInfo> shards;
  ShardMetadata last;
  bool has_residuals = false;  ///< as the first shard has

  std::uint32_t tokens() const { return last.first + last.tokens; }
};

Rescued rescue_shards(const fs::path& directory) {
  Rescued rescued;
  for (;;) {
    const std::size_t index = rescued.shards.size();
    const fs::path path = directory / shard_name(index);
    const bool ended = index > 0 && rescued.last.tokens < kShardTokens;
    if (ended || !fs::exists(path)) break;
    const auto file = SafetensorsFile::open(path);
    ShardMetadata metadata = parse_shard_metadata(file);
    if (metadata.first != index * kShardTokens)
      throw std::runtime_error(fmt::format("{}: holds tokens from {} on; from {} on is expected",
                                           path.string(), metadata.first, index * kShardTokens));
    if (index > 0 && !same_description(metadata.header, rescued.last.header))
      throw std::runtime_error(
          fmt::format("{}: model or config differ from the shard before it", path.string()));
    rescued.shards.push_back(
        {shard_name(index), metadata.first, metadata.tokens, xxh3_hex(file.bytes())});
    rescued.last = std::move(metadata);
    if (index == 0)
      rescued.has_residuals =
          file.contains(layer_tensor(rescued.last.header.shape.number(0), kResidualTensor));
  }
  if (rescued.shards.empty())
    throw std::runtime_error(
        fmt::format("{}: no whole shard to keep (a shard has {} tokens); capture it again",
                    directory.string(), kShardTokens));
  return rescued;
}

void remove_parts(const fs::path& directory) {
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    const bool ours = name.starts_with("shard-") || name.starts_with(kTokensFile) ||
                      name.starts_with(kSketchFile) || name.starts_with(kManifestFile) ||
                      name.starts_with("grad-") || name.starts_with("column-");
    if (ours && name.ends_with(".part")) fs::remove(entry.path());
  }
}

/// Cuts tokens.safetensors to the kept tokens. Returns its XXH3-64.
std::string cut_tokens(const fs::path& directory, std::uint32_t kept, TraceHeader header) {
  const auto file = SafetensorsFile::open(directory / kTokensFile);
  const std::vector<std::int32_t> ids = read_tokens(file, header);
  if (ids.size() < kept)
    throw std::runtime_error(fmt::format("{}: {} ids; the shards hold {} tokens",
                                         file.path().string(), ids.size(), kept));
  return write_tokens(directory, std::span(ids).first(kept), header);
}

}  // namespace

std::uint32_t seal_trace(const fs::path& directory) {
  if (!fs::is_directory(directory))
    throw std::runtime_error(fmt::format("{}: no such folder", directory.string()));
  if (fs::exists(directory / kManifestFile))
    throw std::runtime_error(fmt::format(
        "{}: the trace is finished already (it has a manifest.json)", directory.string()));
  Rescued rescued = rescue_shards(directory);
  const std::uint32_t tokens = rescued.tokens();
  Manifest manifest;
  manifest.header = std::move(rescued.last.header);
  manifest.tokens = tokens;
  manifest.segments = std::move(rescued.last.segments);
  manifest.prompt_tokens = prompt_tokens_of(manifest.segments);
  manifest.shards = std::move(rescued.shards);
  manifest.tokens_xxh3 = cut_tokens(directory, tokens, manifest.header);
  manifest.header.spans = clipped(manifest.header.spans, tokens);
  manifest.extras.residual_norm2 = rescued.has_residuals;
  if (fs::exists(directory / kSketchFile)) {
    const auto file = SafetensorsFile::open(directory / kSketchFile);
    if (!file.metadata().contains("seed"))
      throw std::runtime_error(fmt::format("{}: __metadata__ has no seed, which the manifest needs",
                                           file.path().string()));
    manifest.extras.sketch = {check_sketch(file, manifest.header.shape), xxh3_hex(file.bytes())};
  }
  TraceReader::assemble(directory, manifest);  // throws if this would be no trace
  remove_parts(directory);
  write_file_atomically(directory / kManifestFile, manifest_text(manifest));
  return tokens;
}

}  // namespace kvlab
