// A policy beside the registry's, as Python holds it.
#pragma once

#include <memory>
#include <vector>

#include "policies/entry.hpp"

namespace kvlab::python {

struct Policy {
  std::shared_ptr<const PolicyEntry> entry;
};

CompiledPolicies compiled_from(const std::vector<Policy>& policies);

}  // namespace kvlab::python
