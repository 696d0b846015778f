#include "traces/extras_writer.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "traces/base/files.hpp"
#include "traces/manifest.hpp"
#include "traces/shard.hpp"

namespace kvlab {
namespace {

/// The largest gradient is stored in float16 as less than twice 2 to this.
constexpr int kLargestExponent = 14;

Manifest manifest_of(const std::filesystem::path& directory) {
  const std::string path = (directory / kManifestFile).string();
  return parse_manifest(read_text_file(path, kMaxManifestBytes), path);
}

void replace_manifest(const std::filesystem::path& directory, const Manifest& manifest) {
  write_file_atomically(directory / kManifestFile, manifest_text(manifest));
}

/// What a file of gradients holds of so many tokens.
std::vector<TensorToWrite> gradient_tensors(const ModelShape& shape, std::uint32_t tokens,
                                            std::uint32_t draws) {
  std::vector<TensorToWrite> tensors{{std::string(kGradientScaleTensor), Dtype::f32, {1}, {}}};
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
    tensors.push_back({layer_tensor(layer, kGradientTensor),
                       shape.dtype,
                       {draws, shape.query_heads, tokens, shape.head_size},
                       {}});
  return tensors;
}

std::string seal(SafetensorsDraft& draft, float scale) {
  std::memcpy(draft.at(kGradientScaleTensor).data(), &scale, sizeof scale);
  return draft.commit();
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
    if (!std::ranges::all_of(layers[layer], [](float x) { return std::isfinite(x); }))
      throw std::runtime_error(fmt::format(
          "column {}: layer {}: a value is not finite; nothing can be stored", name, layer));
    tensors.push_back({column_tensor(layer, name),
                       Dtype::f32,
                       {shape.kv_heads, manifest.tokens},
                       std::as_bytes(std::span(layers[layer]))});
  }
  auto& columns = manifest.extras.columns;
  if (std::erase_if(columns, [&](const TraceExtras::Column& c) { return c.name == name; }) > 0)
    replace_manifest(directory, manifest);  // its file is about to be replaced
  columns.push_back({name, write_safetensors(directory / column_file(name), tensors, {})});
  replace_manifest(directory, manifest);
}

void write_gradients(const std::filesystem::path& directory, std::uint32_t draws,
                     const std::function<float()>& next, Span span) {
  Manifest manifest = manifest_of(directory);
  const ModelShape& shape = manifest.header.shape;
  TraceExtras::Gradients gradients{draws, 5, span, {}};
  for (const ShardInfo& shard : manifest.shards) {
    const std::string name = gradient_name(gradients.files.size());
    SafetensorsDraft draft(directory / name, gradient_tensors(shape, shard.tokens, draws));
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
      const std::span<std::byte> data = draft.at(layer_tensor(layer, kGradientTensor));
      std::vector<float> values(data.size() / bytes_of(shape.dtype));
      for (float& x : values) x = next();
      from_float(shape.dtype, values.data(), values.size(), data.data());
    }
    const float scale = 0.25f * static_cast<float>(gradients.files.size() + 1);
    gradients.files.push_back({name, shard.first, shard.tokens, seal(draft, scale)});
  }
  manifest.extras.gradients = gradients;
  replace_manifest(directory, manifest);
}

GradientWriter::GradientWriter(std::filesystem::path directory, std::uint32_t draws,
                               std::uint64_t seed, Span span)
    : directory_(std::move(directory)),
      manifest_(manifest_of(directory_)),
      gradients_{draws, seed, span, {}} {
  const ModelShape& shape = manifest_.header.shape;
  for (std::size_t i = 0; i < manifest_.shards.size(); ++i) {
    const auto tensors = gradient_tensors(shape, manifest_.shards[i].tokens, draws);
    drafts_.emplace_back(directory_ / gradient_name(i), tensors);
    exponents_.emplace_back(shape.layers);
  }
  if (!manifest_.extras.gradients) return;
  manifest_.extras.gradients.reset();
  replace_manifest(directory_, manifest_);
}

GradientWriter::~GradientWriter() {
  std::error_code ignored;
  for (const ShardInfo& file : gradients_.files)
    if (!finished_) std::filesystem::remove(directory_ / file.file, ignored);
}

void GradientWriter::put(std::uint32_t layer, std::span<const float> gradient) {
  const ModelShape& shape = manifest_.header.shape;
  if (layer >= shape.layers || gradient.size() != std::size_t{gradients_.draws} * manifest_.tokens *
                                                      shape.query_heads * shape.head_size)
    throw std::invalid_argument("gradient writer: a layer or a size that is not expected");
  if (!std::ranges::all_of(gradient, [](float x) { return std::isfinite(x); }))
    throw std::runtime_error(
        fmt::format("{}: layer {}: the gradient is not finite; nothing can be stored",
                    directory_.string(), layer));
  for (std::size_t i = 0; i < drafts_.size(); ++i) put(i, layer, gradient);
}

void GradientWriter::put(std::size_t index, std::uint32_t layer, std::span<const float> gradient) {
  const ModelShape& shape = manifest_.header.shape;
  const ShardInfo& shard = manifest_.shards[index];
  const std::size_t size = shape.head_size, token = shape.query_heads * size,
                    draw = token * manifest_.tokens;
  float largest = 0;
  if (shape.dtype == Dtype::f16)
    for (std::size_t d = 0; d < gradients_.draws; ++d)
      for (const float x : gradient.subspan(d * draw + shard.first * token, shard.tokens * token))
        largest = std::max(largest, std::abs(x));
  std::optional<int>& exponent = exponents_[index][layer];
  if (largest > 0) exponent = std::ilogb(largest) - kLargestExponent;
  const double factor = std::ldexp(1.0, -exponent.value_or(0));
  std::byte* to = drafts_[index].at(layer_tensor(layer, kGradientTensor)).data();
  std::vector<float> row(size);
  for (std::size_t d = 0; d < gradients_.draws; ++d)
    for (std::size_t head = 0; head < shape.query_heads; ++head)
      for (std::size_t t = 0; t < shard.tokens; ++t) {
        const float* from = gradient.data() + d * draw + (shard.first + t) * token + head * size;
        std::transform(from, from + size, row.begin(),
                       [&](float x) { return static_cast<float>(x * factor); });
        from_float(shape.dtype, row.data(), size, to);
        to += size * bytes_of(shape.dtype);
      }
}

void GradientWriter::rescale(std::size_t shard, int exponent) {
  for (std::uint32_t layer = 0; layer < exponents_[shard].size(); ++layer) {
    const int less = exponents_[shard][layer].value_or(exponent) - exponent;
    if (less == 0) continue;
    const std::span<std::byte> data = drafts_[shard].at(layer_tensor(layer, kGradientTensor));
    for (std::size_t i = 0; i < data.size(); i += bytes_of(Dtype::f16)) {
      float x = 0;
      to_float(Dtype::f16, &data[i], 1, &x);
      x = std::ldexp(x, less);
      from_float(Dtype::f16, &x, 1, &data[i]);
    }
  }
}

void GradientWriter::finish() {
  for (std::size_t i = 0; i < drafts_.size(); ++i) {
    const std::optional<int> largest = std::ranges::max(exponents_[i]);
    rescale(i, largest.value_or(0));
    const ShardInfo& shard = manifest_.shards[i];
    gradients_.files.push_back({gradient_name(i), shard.first, shard.tokens, ""});
    gradients_.files.back().xxh3 = seal(drafts_[i], std::ldexp(1.0f, largest.value_or(0)));
  }
  manifest_ = manifest_of(directory_);  // which may have a column more by now
  manifest_.extras.gradients = gradients_;
  replace_manifest(directory_, manifest_);
  finished_ = true;
}

}  // namespace kvlab
