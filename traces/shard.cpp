#include "traces/shard.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <stdexcept>

#include "traces/base/json.hpp"
#include "traces/manifest.hpp"

namespace kvlab {
namespace {

/// Copies a tensor, because tensors in files of other programs may be unaligned.
template <class T>
std::vector<T> copied(const TensorView& tensor) {
  std::vector<T> values(tensor.data.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
  return values;
}

/// Records the tensors that a reader has requested, so that others can be refused.
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

/// Throws unless the rows are ascending positions of the shard and include its first and its last
/// position.
void check_rows(const TensorView& tensor, const ShardInfo& shard,
                const std::filesystem::path& path) {
  const auto rows = copied<std::int32_t>(tensor);
  const bool ends = rows.front() == static_cast<std::int32_t>(shard.first) &&
                    rows.back() == static_cast<std::int32_t>(shard.first + shard.tokens - 1);
  if (!ends || !std::is_sorted(rows.begin(), rows.end()))
    throw std::runtime_error(fmt::format("{}: check_rows must ascend from {} to {}", path.string(),
                                         shard.first, shard.first + shard.tokens - 1));
}

/// Maximum number of frequencies in all layers together. No model has more, and the limit keeps a
/// damaged file from filling the memory.
constexpr std::size_t kMaxFrequencies = std::size_t{1} << 26;

/// Reads rotation tables and sinks into the rows that the manifest describes.
void read_rows(const SafetensorsFile& file, TensorChecker& checker, TraceHeader& header) {
  std::size_t tables = 1;
  for (const RowSpec& row : header.rows) tables = std::max<std::size_t>(tables, row.table + 1);
  const std::size_t width = file.at("inv_freq").elements() / tables;
  if (width * header.shape.layers > kMaxFrequencies)
    throw std::runtime_error(fmt::format("{}: inv_freq is too large for {} layers",
                                         file.path().string(), header.shape.layers));
  const auto inv_freq = copied<float>(checker.expect("inv_freq", Dtype::f32, {tables, width}));
  const auto factors = copied<float>(checker.expect("rope_factor", Dtype::f32, {tables}));
  for (std::uint32_t l = 0; l < header.shape.layers; ++l) {
    RowSpec& row = header.rows[l];
    const auto own = std::span(inv_freq).subspan(row.table * width, width);
    row.rope = {{own.begin(), own.end()}, factors[row.table]};
    const std::string name = layer_tensor(header.shape.number(l), "sink");
    if (file.contains(name))
      row.sinks = copied<float>(checker.expect(name, Dtype::f32, {header.shape.query_heads}));
  }
}

/// The largest scale of a gradient file with which every finite stored gradient stays finite in
/// float32.
float largest_gradient_scale(Dtype dtype) {
  if (dtype != Dtype::f16) return 1;
  // The quotient may be rounded up, so take the next smaller float.
  return std::nextafter(std::numeric_limits<float>::max() / 65504, 0.0f);
}

}  // namespace

std::string layer_tensor(std::uint32_t layer, std::string_view part) {
  return fmt::format("layers.{}.{}", layer, part);
}

std::string write_tokens(const std::filesystem::path& directory, std::span<const std::int32_t> ids,
                         const TraceHeader& header) {
  std::vector<float> inv_freq, factors;
  std::vector<TensorToWrite> tensors{{"ids", Dtype::i32, {ids.size()}, std::as_bytes(ids)}};
  const auto add = [&](std::string name, std::vector<std::size_t> shape,
                       std::span<const float> values) {
    tensors.push_back({std::move(name), Dtype::f32, std::move(shape), std::as_bytes(values)});
  };
  if (header.rows.empty()) {
    add("inv_freq", {header.rope.inv_freq.size()}, header.rope.inv_freq);
    add("rope_factor", {1}, {&header.rope.factor, 1});
    add("softmax_scale", {1}, {&header.softmax_scale, 1});
    return write_safetensors(directory / kTokensFile, tensors, {});
  }
  for (const RowSpec& row : header.rows)
    factors.resize(std::max<std::size_t>(factors.size(), row.table + 1));
  const std::size_t width = header.rows.front().rope.inv_freq.size();
  inv_freq.resize(factors.size() * width);
  for (const RowSpec& row : header.rows) {
    factors[row.table] = row.rope.factor;
    std::ranges::copy(row.rope.inv_freq, inv_freq.data() + row.table * width);
  }
  add("inv_freq", {factors.size(), width}, inv_freq);
  add("rope_factor", {factors.size()}, factors);
  for (std::uint32_t l = 0; l < header.shape.layers; ++l)
    if (const auto& sinks = header.rows[l].sinks; !sinks.empty())
      add(layer_tensor(header.shape.number(l), "sink"), {sinks.size()}, sinks);
  return write_safetensors(directory / kTokensFile, tensors, {});
}

std::vector<std::int32_t> read_tokens(const SafetensorsFile& file, TraceHeader& header) {
  TensorChecker checker(file);
  auto ids = copied<std::int32_t>(checker.expect_vector("ids", Dtype::i32));
  if (header.rows.empty()) {
    header.rope.inv_freq = copied<float>(checker.expect_vector("inv_freq", Dtype::f32));
    header.rope.factor = copied<float>(checker.expect("rope_factor", Dtype::f32, {1})).front();
    header.softmax_scale = copied<float>(checker.expect("softmax_scale", Dtype::f32, {1})).front();
  } else {
    read_rows(file, checker, header);
  }
  checker.refuse_others();
  if (std::any_of(ids.begin(), ids.end(), [](std::int32_t id) { return id < 0; }))
    throw std::runtime_error(fmt::format("{}: ids holds a negative id", file.path().string()));
  return ids;
}

void check_shard_tensors(const SafetensorsFile& file, const ModelShape& shape,
                         const ShardInfo& shard, bool has_residuals) {
  const std::size_t n = shard.tokens, heads = shape.query_heads, kv_heads = shape.kv_heads,
                    size = shape.head_size;
  TensorChecker checker(file);
  const std::string rows(kCheckRowsTensor);
  check_rows(checker.expect(rows, Dtype::i32, {kCheckRows}), shard, file.path());
  const bool has_lse = file.contains(layer_tensor(shape.number(0), "check_lse"));
  for (std::uint32_t index = 0; index < shape.layers; ++index) {
    const std::uint32_t l = shape.number(index);
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
                             const ShardInfo& shard, std::uint32_t gradient_samples) {
  TensorChecker checker(file);
  for (std::uint32_t l = 0; l < shape.layers; ++l)
    checker.expect(layer_tensor(shape.number(l), kGradientTensor), shape.dtype,
                   {gradient_samples, shape.query_heads, shard.tokens, shape.head_size});
  float scale = 0;
  to_float(Dtype::f32,
           checker.expect(std::string(kGradientScaleTensor), Dtype::f32, {1}).data.data(), 1,
           &scale);
  checker.refuse_others();
  const float max_scale = largest_gradient_scale(shape.dtype);
  if (!(scale > 0 && scale <= max_scale))
    throw std::runtime_error(fmt::format(
        "{}: {} is {}; a positive number up to {:g} is expected for gradients in {}",
        file.path().string(), kGradientScaleTensor, scale, max_scale, torch_name(shape.dtype)));
  return scale;
}

}  // namespace kvlab
