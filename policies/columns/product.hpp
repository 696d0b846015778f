// A policy's rank times a column: `h2o*value_norm1`, a policy of its own. What one token's rank is,
// and nothing else, so guards, modifiers and budgets do as they do with any other.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "policies/entry.hpp"

namespace kvlab {

/// `base` with its rank, as a number, times `column`, behind its own columns. `name`: both, as
/// written. Throws std::invalid_argument: `base` never evicts, is a function of a program's, or has
/// no room for a column; `column` is no name.
std::shared_ptr<const PolicyEntry> product_of(const std::shared_ptr<const PolicyEntry>& base,
                                              const std::string& name, const std::string& column);

/// The parameters as a product's hooks take them. `own`: as those of its base do.
std::vector<std::byte> product_params(const PolicyEntry& product,
                                      const std::vector<std::byte>& own);

}  // namespace kvlab
