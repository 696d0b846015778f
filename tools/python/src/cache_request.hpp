// A cache as Python requests it, for a sequence of some length in a model of some heads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "policies/cache_config.hpp"
#include "policies/executor.hpp"
#include "tools/python/src/policy.hpp"

namespace kvlab::python {

struct CacheRequest {
  std::string policy;  ///< or a file that `deploy` or `tune` wrote, where its name ends in .json
  std::vector<Policy> own;
  std::string budget, prefill, positions;  ///< as on the command line; or empty
  std::uint64_t seed;
  double threshold;
  std::uint32_t length;
  CacheShape model;
  std::vector<std::uint32_t> layer_numbers;  ///< as ResolvedConfig's
};

/// Throws std::invalid_argument for what the executor does not know.
ResolvedConfig resolve(const CacheRequest& requested, const Executor& executor);

}  // namespace kvlab::python
