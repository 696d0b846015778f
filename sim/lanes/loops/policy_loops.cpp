#include "sim/lanes/loops/policy_loops.hpp"

#include "policies/catalogue.hpp"

namespace kvlab {

const PolicyLoops* policy_loops(const PolicyEntry& entry) {
  static const PolicyLoops* const best = policy_loops_avx512() ? policy_loops_avx512()
                                         : policy_loops_avx2() ? policy_loops_avx2()
                                                               : policy_loops_base();
  const std::vector<PolicyEntry>& catalogue = policy_catalogue();
  for (std::size_t i = 0; i < catalogue.size(); ++i)
    if (&entry == &catalogue[i]) return best + i;
  return nullptr;
}

}  // namespace kvlab
