// Logits stored by tests/fixtures/make_model_fixtures.py, and the relative error against them.
#pragma once

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "traces/base/safetensors.hpp"

namespace kvlab::test {

inline std::filesystem::path source_path(const std::filesystem::path& path) {
  return std::filesystem::path(KVLAB_SOURCE_DIR) / path;
}

inline SafetensorsFile expected_file(const std::string& model, const char* file) {
  return SafetensorsFile::open(source_path("tests/data/models") / model / file);
}

template <class T>
std::vector<T> values(const SafetensorsFile& file, const char* name) {
  const TensorView& tensor = file.at(name);
  std::vector<T> result(tensor.elements());
  std::memcpy(result.data(), tensor.data.data(), tensor.data.size());
  return result;
}

/// ||found - wanted|| / ||wanted||; infinite if `found` is not finite or of another length.
inline double relative_error(std::span<const float> found, std::span<const float> wanted) {
  constexpr double infinite = std::numeric_limits<double>::infinity();
  if (found.size() != wanted.size() || wanted.empty()) return infinite;
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (!std::isfinite(found[i])) return infinite;
    difference += std::pow(double{found[i]} - double{wanted[i]}, 2);
    size += std::pow(double{wanted[i]}, 2);
  }
  return std::sqrt(difference / size);
}

}  // namespace kvlab::test
