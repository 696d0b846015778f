// Extras that a finished trace is given.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "traces/trace.hpp"

namespace kvlab {

/// Adds a column whose values come from `value(layer, KV head, token)`, in that order; one of that
/// name is replaced. Throws std::runtime_error where a value is not finite.
void write_column(const std::filesystem::path& directory, const std::string& name,
                  const std::function<float(std::uint32_t, std::uint32_t, std::uint32_t)>& value);

/// Adds `draws` gradients, whose elements come from `next`, in the order of the files, the layers
/// and the tensors, as those of the queries of `span`. File i is to be multiplied with (i + 1) / 4.
void write_gradients(const std::filesystem::path& directory, std::uint32_t draws,
                     const std::function<float()>& next, Span span = Span::decode);

/// Gradients layer by layer, in files that are mapped. Those that the trace has are gone from the
/// start.
///
/// In float16 a layer is stored as soon as it comes, by a power of two that suits it; finish()
/// brings a file's layers to one scale. The other dtypes hold whatever float32 does.
class GradientWriter {
 public:
  GradientWriter(std::filesystem::path directory, std::uint32_t draws, std::uint64_t seed,
                 Span span);
  /// Unfinished: no file of gradients is left.
  ~GradientWriter();
  GradientWriter(const GradientWriter&) = delete;
  GradientWriter& operator=(const GradientWriter&) = delete;

  /// Of a layer: [draws, tokens, query_heads, head_size]. Throws std::runtime_error where it is not
  /// finite.
  void put(std::uint32_t layer, std::span<const float> gradient);
  void finish();

 private:
  void put(std::size_t shard, std::uint32_t layer, std::span<const float> gradient);
  void rescale(std::size_t shard, int exponent);

  std::filesystem::path directory_;
  Manifest manifest_;
  TraceExtras::Gradients gradients_;
  std::deque<SafetensorsDraft> drafts_;                     // by shard
  std::vector<std::vector<std::optional<int>>> exponents_;  // by shard and layer; of zeros: none
  bool finished_ = false;
};

}  // namespace kvlab
