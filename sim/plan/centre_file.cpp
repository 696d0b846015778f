#include "sim/plan/centre_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "policies/tiers/tier_plan.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/safetensors.hpp"
#include "traces/manifest.hpp"

namespace kvlab {
namespace {

constexpr std::uintmax_t kMaxCentreBytes = std::uintmax_t{64} << 20;
constexpr std::string_view kPrefix = "layers.", kSuffix = ".centre";

std::string tensor_name(std::uint32_t layer) {
  return fmt::format("{}{}{}", kPrefix, layer, kSuffix);
}

/// The layer of a tensor `layers.N.centre`.
std::uint32_t layer_of(const std::string& name, const std::string& file) {
  std::uint32_t layer = kMaxLayers;
  if (name.starts_with(kPrefix)) {
    const char* const begin = name.data() + kPrefix.size();
    std::from_chars(begin, name.data() + name.size(), layer);
  }
  if (layer >= kMaxLayers || name != tensor_name(layer))
    throw std::runtime_error(fmt::format(
        "{}: tensor {} is not of a centre file, which has one tensor layers.N.centre for each "
        "layer N; `kvlab plan --trace TRACE --centre-out FILE` writes one",
        file, json_quoted(name)));
  return layer;
}

/// Sets the shape of the constants to that of the first tensor. Throws unless all tensors have the
/// same shape [kv_head, dim].
void check_tensor(const TensorView& tensor, const std::string& where, CentreConstants& centre) {
  const auto& shape = tensor.shape;
  if (tensor.dtype != Dtype::f32 || shape.size() != 2 || shape[0] == 0 || shape[0] > kMaxHeads ||
      shape[1] == 0 || shape[1] > kMaxHeadSize)
    throw std::runtime_error(fmt::format(
        "{} is {} [{}]; F32 [KV heads, head size] is expected, and each is from 1 to {}", where,
        safetensors_name(tensor.dtype), fmt::join(shape, ", "), kMaxHeads));
  if (centre.kv_heads == 0) {
    centre.kv_heads = static_cast<std::uint32_t>(shape[0]);
    centre.head_size = static_cast<std::uint32_t>(shape[1]);
  }
  if (shape[0] != centre.kv_heads || shape[1] != centre.head_size)
    throw std::runtime_error(
        fmt::format("{} has shape [{}]; [{}, {}] is expected, which another layer has", where,
                    fmt::join(shape, ", "), centre.kv_heads, centre.head_size));
}

std::vector<float> values_of(const TensorView& tensor, const std::string& where,
                             std::uint32_t head_size) {
  std::vector<float> values(tensor.elements());
  std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    if (!std::isfinite(values[i]))
      throw std::runtime_error(fmt::format("{} has {} at [{}, {}]; finite numbers are expected",
                                           where, values[i], i / head_size, i % head_size));
  return values;
}

}  // namespace

CentreConstants read_centre_file(const std::filesystem::path& path) {
  const std::string file = path.string();
  std::error_code error;
  if (std::filesystem::is_regular_file(path, error) &&
      std::filesystem::file_size(path, error) > kMaxCentreBytes)
    throw std::runtime_error(
        fmt::format("{}: is larger than {} MiB, so it is not a centre file; `kvlab plan --trace "
                    "TRACE --centre-out FILE` writes one",
                    file, kMaxCentreBytes >> 20));
  const SafetensorsFile tensors = SafetensorsFile::open(path);
  if (tensors.tensors().empty() || tensors.tensors().size() > kMaxPlanLayers)
    throw std::runtime_error(
        fmt::format("{}: has {} tensors; one for each layer, at most {}, is "
                    "expected in a centre file",
                    file, tensors.tensors().size(), kMaxPlanLayers));
  CentreConstants centre;
  for (const auto& [name, tensor] : tensors.tensors()) {
    const std::uint32_t layer = layer_of(name, file);
    const std::string where = fmt::format("{}: {}", file, name);
    check_tensor(tensor, where, centre);
    centre.layers[layer] = values_of(tensor, where, centre.head_size);
  }
  centre.xxh3 = xxh3_hex(tensors.bytes());
  return centre;
}

void load_centre(CentreSetting& centre) {
  if (centre.kind == KeyCentre::constants && !centre.constants)
    centre.constants = std::make_shared<const CentreConstants>(read_centre_file(centre.file));
}

void write_centre_file(const std::filesystem::path& path, const CentreConstants& centre) {
  std::vector<TensorToWrite> tensors;
  for (const auto& [layer, values] : centre.layers)
    tensors.push_back({tensor_name(layer),
                       Dtype::f32,
                       {centre.kv_heads, centre.head_size},
                       std::as_bytes(std::span(values))});
  write_safetensors(path, tensors, {});
}

}  // namespace kvlab
