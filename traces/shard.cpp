#include "traces/shard.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <stdexcept>

#include "traces/base/json.hpp"
#include "traces/manifest.hpp"

namespace kvlab {
namespace {

/// Copies, because a tensor of a file that we did not write need not be aligned.
template <class T>
std::vector<T> copied(const TensorView& tensor) {
  std::vector<T> values(tensor.data.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
  return values;
}

/// Notes which tensors a reader has asked for, so that any other can be refused.
class TensorChecker {
 public:
  explicit TensorChecker(const SafetensorsFile& file) : file_(file) {}

  const TensorView& expect(const std::string& name, Dtype dtype, std::vector<std::size_t> shape) {
    seen_.insert(name);
    return file_.at(name, dtype, shape);
  }
  const TensorView& expect_vector(const std::string& name, Dtype dtype) {
    const TensorView& tensor = file_.at(name);
    return expect(name, dtype, {tensor.elements()});
  }
  void refuse_others() const {
    for (const auto& [name, tensor] : file_.tensors())
      if (!seen_.contains(name))
        throw std::runtime_error(fmt::format("{}: tensor {} is not known to this version of kvlab",
                                             file_.path().string(), json_quoted(name)));
  }

 private:
  const SafetensorsFile& file_;
  std::set<std::string> seen_;
};

/// Ascending positions of the shard, the first and the last among them.
void check_rows(const TensorView& tensor, const ShardInfo& shard,
                const std::filesystem::path& path) {
  const auto rows = copied<std::int32_t>(tensor);
  const bool ends = rows.front() == static_cast<std::int32_t>(shard.first) &&
                    rows.back() == static_cast<std::int32_t>(shard.first + shard.tokens - 1);
  if (!ends || !std::is_sorted(rows.begin(), rows.end()))
    throw std::runtime_error(fmt::format("{}: check_rows must ascend from {} to {}", path.string(),
                                         shard.first, shard.first + shard.tokens - 1));
}

/// Times this, a finite gradient is finite.
float largest_gradient_scale(Dtype dtype) {
  if (dtype != Dtype::f16) return 1;
  return std::nextafter(std::numeric_limits<float>::max() / 65504, 0.0f);  // which rounds up
}

}  // namespace

std::string layer_tensor(std::uint32_t layer, std::string_view part) {
  return fmt::format("layers.{}.{}", layer, part);
}

std::string write_tokens(const std::filesystem::path& directory, std::span<const std::int32_t> ids,
                         const Rope& rope, float softmax_scale) {
  const std::array factor{rope.factor}, scale{softmax_scale};
  const std::span<const float> inv_freq(rope.inv_freq);
  const std::array<TensorToWrite, 4> tensors{
      {{"ids", Dtype::i32, {ids.size()}, std::as_bytes(ids)},
       {"inv_freq", Dtype::f32, {inv_freq.size()}, std::as_bytes(inv_freq)},
       {"rope_factor", Dtype::f32, {1}, std::as_bytes(std::span(factor))},
       {"softmax_scale", Dtype::f32, {1}, std::as_bytes(std::span(scale))}}};
  return write_safetensors(directory / kTokensFile, tensors, {});
}

TokensFile read_tokens(const SafetensorsFile& file) {
  TensorChecker checker(file);
  TokensFile tokens;
  tokens.ids = copied<std::int32_t>(checker.expect_vector("ids", Dtype::i32));
  tokens.rope.inv_freq = copied<float>(checker.expect_vector("inv_freq", Dtype::f32));
  tokens.rope.factor = copied<float>(checker.expect("rope_factor", Dtype::f32, {1})).front();
  tokens.softmax_scale = copied<float>(checker.expect("softmax_scale", Dtype::f32, {1})).front();
  checker.refuse_others();
  if (std::any_of(tokens.ids.begin(), tokens.ids.end(), [](std::int32_t id) { return id < 0; }))
    throw std::runtime_error(fmt::format("{}: ids holds a negative id", file.path().string()));
  return tokens;
}

void check_shard_tensors(const SafetensorsFile& file, const ModelShape& shape,
                         const ShardInfo& shard, bool has_residuals) {
  const std::size_t n = shard.tokens, heads = shape.query_heads, kv_heads = shape.kv_heads,
                    size = shape.head_size;
  TensorChecker checker(file);
  const std::string rows(kCheckRowsTensor);
  check_rows(checker.expect(rows, Dtype::i32, {kCheckRows}), shard, file.path());
  const bool has_lse = file.contains(layer_tensor(0, "check_lse"));
  for (std::uint32_t l = 0; l < shape.layers; ++l) {
    checker.expect(layer_tensor(l, "q"), shape.dtype, {heads, n, size});
    checker.expect(layer_tensor(l, "k"), shape.dtype, {kv_heads, n, size});
    checker.expect(layer_tensor(l, "v"), shape.dtype, {kv_heads, n, size});
    checker.expect(layer_tensor(l, "check_out"), Dtype::f32, {heads, kCheckRows, size});
    if (has_residuals) checker.expect(layer_tensor(l, kResidualTensor), Dtype::f32, {n});
    if (has_lse) checker.expect(layer_tensor(l, "check_lse"), Dtype::f32, {heads, kCheckRows});
  }
  checker.refuse_others();
}

float check_gradient_tensors(const SafetensorsFile& file, const ModelShape& shape,
                             const ShardInfo& shard, std::uint32_t draws) {
  TensorChecker checker(file);
  for (std::uint32_t l = 0; l < shape.layers; ++l)
    checker.expect(layer_tensor(l, kGradientTensor), shape.dtype,
                   {draws, shape.query_heads, shard.tokens, shape.head_size});
  float scale = 0;
  to_float(Dtype::f32,
           checker.expect(std::string(kGradientScaleTensor), Dtype::f32, {1}).data.data(), 1,
           &scale);
  checker.refuse_others();
  const float most = largest_gradient_scale(shape.dtype);
  if (!(scale > 0 && scale <= most))
    throw std::runtime_error(fmt::format(
        "{}: {} is {}; a positive number up to {:g} is expected for gradients in {}",
        file.path().string(), kGradientScaleTensor, scale, most, torch_name(shape.dtype)));
  return scale;
}

}  // namespace kvlab
