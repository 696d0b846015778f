#include "tests/traces/column_files.hpp"

#include "traces/base/files.hpp"
#include "traces/manifest.hpp"
#include "traces/shard.hpp"

namespace kvlab::test {
namespace {

Manifest manifest_of(const std::filesystem::path& directory) {
  const std::string path = (directory / kManifestFile).string();
  return parse_manifest(read_text_file(path, 1'000'000), path);
}

}  // namespace

void write_column(const std::filesystem::path& directory, const std::string& name,
                  const std::function<float(std::uint32_t, std::uint32_t, std::uint32_t)>& value) {
  Manifest manifest = manifest_of(directory);
  const ModelShape& shape = manifest.header.shape;
  std::vector<std::vector<float>> layers(shape.layers);
  std::vector<TensorToWrite> tensors;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    for (std::uint32_t head = 0; head < shape.kv_heads; ++head)
      for (std::uint32_t t = 0; t < manifest.tokens; ++t)
        layers[layer].push_back(value(layer, head, t));
    tensors.push_back({column_tensor(layer, name),
                       Dtype::f32,
                       {shape.kv_heads, manifest.tokens},
                       std::as_bytes(std::span(layers[layer]))});
  }
  manifest.extras.columns.push_back(
      {name, write_safetensors(directory / column_file(name), tensors, {})});
  write_file_atomically(directory / kManifestFile, manifest_text(manifest));
}

void make_format_2(const std::filesystem::path& directory) {
  write_file_atomically(directory / kManifestFile, manifest_text(manifest_of(directory)));
}

}  // namespace kvlab::test
