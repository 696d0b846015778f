// Extras that a finished trace is given.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>

#include "traces/extras.hpp"

namespace kvlab {

/// Adds a column whose values come from `value(layer, KV head, token)`, in that order; one of that
/// name is replaced. Throws std::runtime_error where a value is not finite.
void write_column(const std::filesystem::path& directory, const std::string& name,
                  const std::function<float(std::uint32_t, std::uint32_t, std::uint32_t)>& value);

/// Puts what a layer's gradients of a shard are once they are divided by the file's scale: [draws,
/// query_heads, tokens of the shard, head_size].
using FillGradient = std::function<void(const ShardInfo&, std::uint32_t layer, std::span<float>)>;

/// Adds `gradients`, whose files are written here; those that the trace has are replaced. `scale`
/// gives that of each file.
void write_gradients(const std::filesystem::path& directory, TraceExtras::Gradients gradients,
                     const std::function<float(std::size_t)>& scale, const FillGradient& fill);

/// Adds `draws` synthetic gradients, whose elements come from `next`, in the order of the files,
/// the layers and the tensors, as those of the queries of `span`. The scale of file i is (i + 1)
/// / 4.
void write_gradients(const std::filesystem::path& directory, std::uint32_t draws,
                     const std::function<float()>& next, Span span = Span::decode);

}  // namespace kvlab
