#include "traces/extras.hpp"

#include <fmt/core.h>

#include <charconv>
#include <cmath>
#include <numbers>
#include <stdexcept>

#include "traces/base/split_mix.hpp"
#include "traces/shard.hpp"

namespace kvlab {
namespace {

/// In (0, 1].
double uniform(std::uint64_t bits) { return static_cast<double>((bits >> 11) + 1) * 0x1p-53; }

std::vector<std::size_t> sketch_shape(const ModelShape& shape) {
  return {std::size_t{shape.query_heads} * shape.head_size, kSketchColumns};
}

}  // namespace

std::string_view name_of(Span span) { return span == Span::decode ? "decode" : "all"; }

Span parse_span(std::string_view text) {
  if (text == "decode") return Span::decode;
  if (text == "all") return Span::all;
  throw std::invalid_argument(fmt::format("span: '{}' should be decode or all", text));
}

double sketch_normal(std::uint64_t seed, std::uint64_t index) {
  const std::uint64_t key = split_mix(seed);
  const double u = uniform(split_mix(key ^ (2 * index))),
               v = uniform(split_mix(key ^ (2 * index + 1)));
  return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
}

TraceExtras::Sketch write_sketch(const std::filesystem::path& directory, const ModelShape& shape,
                                 const OutputSketch& sketch) {
  const std::size_t of_layer = std::size_t{shape.query_heads} * shape.head_size * kSketchColumns;
  if (sketch.values.size() != of_layer * shape.layers)
    throw std::invalid_argument(
        fmt::format("sketch of the output projections: {} values; {} are right",
                    sketch.values.size(), of_layer * shape.layers));
  std::vector<std::byte> bytes(sketch.values.size() * bytes_of(Dtype::bf16));
  from_float(Dtype::bf16, sketch.values.data(), sketch.values.size(), bytes.data());
  std::vector<TensorToWrite> tensors;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
    tensors.push_back({layer_tensor(shape.number(layer), "sketch"), Dtype::bf16,
                       sketch_shape(shape),
                       std::span(bytes).subspan(layer * of_layer * 2, of_layer * 2)});
  return {sketch.seed, write_safetensors(directory / kSketchFile, tensors,
                                         {{"seed", std::to_string(sketch.seed)}})};
}

std::uint64_t check_sketch(const SafetensorsFile& file, const ModelShape& shape) {
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
    file.at(layer_tensor(shape.number(layer), "sketch"), Dtype::bf16, sketch_shape(shape));
  if (file.tensors().size() != shape.layers)
    throw std::runtime_error(fmt::format("{}: {} tensors; one for each of {} layers is expected",
                                         file.path().string(), file.tensors().size(),
                                         shape.layers));
  const auto found = file.metadata().find("seed");
  if (found == file.metadata().end()) return 0;  // the manifest names it
  const std::string& text = found->second;
  std::uint64_t seed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (error != std::errc{} || end != text.data() + text.size() || text.empty())
    throw std::runtime_error(fmt::format("{}: __metadata__ seed is '{}'; a number is expected",
                                         file.path().string(), text));
  return seed;
}

std::string column_file(std::string_view name) {
  return fmt::format("column-{}.safetensors", name);
}

std::string column_tensor(std::uint32_t layer, std::string_view name) {
  return layer_tensor(layer, fmt::format("column.{}", name));
}

bool is_trace_column_name(std::string_view name) {
  constexpr std::size_t kLongest = 64;
  constexpr std::string_view kLetters =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
  return !name.empty() && name.size() <= kLongest &&
         name.find_first_not_of(kLetters) == std::string_view::npos;
}

void check_column_tensors(const SafetensorsFile& file, const ModelShape& shape,
                          std::uint32_t tokens, std::string_view name) {
  const std::size_t wanted[] = {shape.kv_heads, tokens};
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
    file.at(column_tensor(shape.number(layer), name), Dtype::f32, wanted);
  if (file.tensors().size() != shape.layers)
    throw std::runtime_error(fmt::format("{}: {} tensors; one for each of {} layers is expected",
                                         file.path().string(), file.tensors().size(),
                                         shape.layers));
}

}  // namespace kvlab
