// `kvlab plan RUN --by head`: budgets by head from the errors of a run.
#pragma once

#include <string>

#include "sim/budgets/allocate.hpp"

namespace kvlab {

/// What `--by head` requests.
struct HeadsRequest {
  std::string run, out;
  AllocationRequest allocation;
  bool json = false;
};

/// Parses the mean budget of a head. Throws std::invalid_argument unless it is tokens or a share of
/// the length.
Budget parse_mean_budget(const std::string& text);

/// Chooses the budgets, writes them to request.out, and prints them.
int plan_heads(const HeadsRequest& request);

}  // namespace kvlab
