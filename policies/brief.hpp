// A policy as people read it: files hold every setting, rows of a table only what sets it apart.
#pragma once

#include <string>
#include <string_view>

#include "policies/catalogue.hpp"

namespace kvlab {

/// text() without the settings that are the policy's own defaults: `h2o:recent=25%`. Parses back to
/// the same spec.
std::string brief(const PolicySpec& spec);
/// The same of a text; as it stands where it names no policy of the catalogue.
std::string brief_policy(const std::string& text);

}  // namespace kvlab
