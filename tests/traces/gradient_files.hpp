// Gradients beside a finished trace, as a tool of another language adds them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

#include "traces/extras.hpp"

namespace kvlab::test {

/// Adds `draws` gradients, whose elements come from `next`, in the order of the files, the layers
/// and the tensors, as those of the queries of `span`. File i is to be multiplied with (i + 1) / 4.
void write_gradients(const std::filesystem::path& directory, std::uint32_t draws,
                     const std::function<float()>& next, Span span = Span::decode);

}  // namespace kvlab::test
