// A policy that is not in the registry, as a Python object.
#pragma once

#include <memory>
#include <vector>

#include "policies/entry.hpp"

namespace kvlab::python {

struct Policy {
  std::shared_ptr<const PolicyEntry> entry;
};

/// The entries of the policies, as the functions take them that parse policies.
CompiledPolicies compiled_from(const std::vector<Policy>& policies);

}  // namespace kvlab::python
