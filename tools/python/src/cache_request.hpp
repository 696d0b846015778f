// A cache that Python requests, for a sequence of some length in a model of some shape.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "policies/cache_config.hpp"
#include "policies/executor.hpp"
#include "tools/python/src/policy.hpp"

namespace kvlab::python {

struct CacheRequest {
  std::string policy;  ///< a policy with settings, or a file of `deploy` or `tune` (a name ending
                       ///< in .json)
  std::vector<Policy> own;
  std::string budget, prefill, positions;  ///< as on the command line; may be empty
  std::uint64_t seed;
  double threshold;
  std::uint32_t length;
  CacheShape model;
  std::vector<std::uint32_t> layer_numbers;  ///< as in ResolvedConfig
};

/// Resolves the request. Throws std::invalid_argument if the executor does not support it.
ResolvedConfig resolve(const CacheRequest& requested, const Executor& executor);

}  // namespace kvlab::python
