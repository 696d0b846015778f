// Attention outputs of many live sets at one query, each from the one before: neighbours in the
// order of budgets keep nearly the same tokens, so only what differs is added or taken away.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/lanes/value_sums.hpp"

namespace kvlab {

class OutputChain {
 public:
  /// Begins with the empty set at the i-th query of `rows`, which must outlive the chain's use.
  void begin(const SampledRows& rows, std::size_t i);
  /// Adds a link: the live set of `bits` (up to the query's position), whose exponentials sum to
  /// sums [heads()].
  void move_to(const std::uint64_t* bits, const float* sums);

  std::size_t size() const { return used_; }
  /// The jobs of one link.
  void list_jobs(std::size_t link, std::vector<ValueJob>& jobs);
  /// After the jobs of all links: from what differs to sums weighted by values.
  void finish();
  /// A link's, [heads()][dim], not divided.
  const float* sums(std::size_t link) const { return links_[link].values.data(); }

 private:
  struct Link {
    bool fresh = true;                  // from the empty set
    std::vector<std::uint32_t> tokens;  // that differ
    std::vector<float> weights;         // [quad][tokens][4], negative for those that left
    std::vector<float> values;          // [heads()][dim]
  };
  void list(const std::uint64_t* bits, bool fresh, Link& link);
  bool is_coarse(const float* sums) const;

  const SampledRows* rows_ = nullptr;
  std::size_t index_ = 0, words_ = 0;
  std::vector<std::uint64_t> bits_;  // of the last link's set
  std::vector<float> gross_, step_;  // [heads()]: magnitudes added since fresh; by the step
  std::vector<Link> links_;
  std::size_t used_ = 0;
};

}  // namespace kvlab
