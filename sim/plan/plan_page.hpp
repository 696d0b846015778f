// The data of the page about a file of `kvlab plan`, for `kvlab report`.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "sim/report/page.hpp"

namespace kvlab {

/// Whether a parsed file is one of `kvlab plan`.
bool is_plan_file(const nlohmann::json& top);

/// The page of a plan: the formats of each layer, the expected loss against the bits, and the loss
/// of each layer's keys and values alone in each format. Throws std::runtime_error that names
/// `path`, from which `top` was parsed, if its contents are not those of plan_text().
PageDocument plan_page(const nlohmann::json& top, const std::string& path);

}  // namespace kvlab
