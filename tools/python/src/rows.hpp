// How a model's layers attend, as Python describes it.
#pragma once

#include <nanobind/nanobind.h>

#include <variant>
#include <vector>

#include "traces/row_spec.hpp"

namespace kvlab::python {

/// One RoPE table, or a list of them.
using Tables = std::variant<std::vector<float>, std::vector<std::vector<float>>>;
using Factors = std::variant<float, std::vector<float>>;

std::vector<Rope> ropes_of(const Tables& inv_freq, const Factors& factors);
/// Converts a mapping that describes a layer. Missing keys mean plain attention.
RowSpec row_of(const nanobind::dict& said, const std::vector<Rope>& ropes, float softmax_scale);

}  // namespace kvlab::python
