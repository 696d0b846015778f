// Reads token features that are stored in traces, for programs that run the prompts of these traces
// again.
#pragma once

#include <string>
#include <vector>

#include "policies/features/features.hpp"
#include "traces/trace.hpp"

namespace kvlab {

class FeatureTraces final : public FeatureSource {
 public:
  /// Opens and verifies the traces.
  FeatureTraces(const std::vector<std::string>& paths, unsigned threads);

  /// Returns a reader of the features `names` of the first trace whose tokens begin with `prompt`.
  FeatureReader reader_of(std::span<const std::int32_t> prompt, std::vector<std::string> names,
                          const CacheShape& model) const override;
  std::string xxh3() const override;

 private:
  std::vector<TraceReader> traces_;
};

}  // namespace kvlab
