// The papers' formulas, computed from the probabilities of all queries so far.
#pragma once

#include "tests/policies/papers/naive_cache.hpp"

namespace kvlab::papers {

Formula tova();                              ///< Oren et al. 2024
Formula lfu();                               ///< the number of requests so far
Formula a2sf(double keep);                   ///< Jo and Shin 2024
Formula h2o_mean();                          ///< H2O, appendix B.2
Formula roco(double spread);                 ///< after Ren and Zhu 2024
Formula scissorhands(std::uint32_t window);  ///< Liu et al. 2023, with the window in quarters
Formula lazy_eviction();                     ///< Zhang et al. 2025
Formula snapkv(std::uint32_t window);        ///< Li et al. 2024
Formula nacl(std::uint32_t proxies, double random);  ///< Chen et al. 2024
/// The policy of tests/policies/leaky.hpp, which needs mass and requests.
Formula leaky(double keep, double slope, std::uint32_t span);

/// Σ over queries of keep^(n − q) · p, in float64: A2SF's mass without rounding.
double forgetting_sum(const History& history, std::uint32_t token, double keep);

}  // namespace kvlab::papers
