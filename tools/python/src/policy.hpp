// A policy that is not in the registry, as a Python object.
#pragma once

#include <memory>
#include <vector>

#include "policies/entry.hpp"

namespace kvlab::python {

struct Policy {
  std::shared_ptr<const PolicyEntry> entry;
};

/// The policies in the form that parse_policy() and make_sweep() take.
CompiledPolicies compiled_from(const std::vector<Policy>& policies);

}  // namespace kvlab::python
