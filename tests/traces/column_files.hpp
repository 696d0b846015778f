// Columns beside a finished trace, as a tool of another language adds them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

namespace kvlab::test {

/// Adds a column whose values come from `value(layer, KV head, token)`, in that order.
void write_column(const std::filesystem::path& directory, const std::string& name,
                  const std::function<float(std::uint32_t, std::uint32_t, std::uint32_t)>& value);

/// Makes a trace of format 1 one of format 2, without extras.
void make_format_2(const std::filesystem::path& directory);

}  // namespace kvlab::test
