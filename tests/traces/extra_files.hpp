// Functions with which tests write the extras of a trace.
#pragma once

#include "traces/extras.hpp"

namespace kvlab::test {

using kvlab::write_feature;
using kvlab::write_gradients;

/// Converts a trace of format 1 to format 2, without extras.
void make_format_2(const std::filesystem::path& directory);

}  // namespace kvlab::test
