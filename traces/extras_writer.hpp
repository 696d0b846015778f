// Extras of a synthetic trace: added once it is finished, as a tool of another language adds those
// of a model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "traces/extras.hpp"

namespace kvlab {

/// Adds a column whose values come from `value(layer, KV head, token)`, in that order.
void write_column(const std::filesystem::path& directory, const std::string& name,
                  const std::function<float(std::uint32_t, std::uint32_t, std::uint32_t)>& value);

/// Adds `draws` gradients, whose elements come from `next`, in the order of the files, the layers
/// and the tensors, as those of the queries of `span`. File i is to be multiplied with (i + 1) / 4.
void write_gradients(const std::filesystem::path& directory, std::uint32_t draws,
                     const std::function<float()>& next, Span span = Span::decode);

}  // namespace kvlab
