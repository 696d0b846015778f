// What heads kept over time, as the interactive page reads it (sim/report/page/kept.js).
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "sim/run/run.hpp"

namespace kvlab {

/// How a kept series is shown: as its curve is, where the run has that.
struct KeptLook {
  std::string label, colour;
};

/// `tokens`: the text of each, or empty; then their ids stand for them.
nlohmann::ordered_json kept_dataset(const Kept& kept, const std::vector<std::string>& tokens,
                                    const std::function<KeptLook(const KeptSeries&)>& look);

}  // namespace kvlab
