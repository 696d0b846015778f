// Mixture-of-experts layers: a router chooses experts for each token, and the products read only
// the weights of these experts.
#pragma once

#include "kernels/types.hpp"

namespace kvlab::kernels {

inline constexpr int kMaxExperts = 1024, kMaxChosen = 32;

/// A router's decision. In this file a pair is a token and one of its experts: pair = token *
/// chosen + i, where i = 0 is the most likely expert.
struct Routes {
  int tokens, experts, chosen;
  float* shares;         // [pair]
  std::int32_t* expert;  // [pair]
  std::int32_t* order;   // [pair]: pair numbers, sorted by expert
  std::int32_t* starts;  // [experts + 1]: index in `order` at which the pairs of each expert begin

  int pairs() const { return tokens * chosen; }
};

/// Computes `routes`: the experts with the largest logits (the lower expert among equal ones), and
/// their softmax over all logits or over the chosen ones. Logits are computed in float32 from
/// unrounded norms; `normed` is rounded.
struct RouteArgs {
  Type type;  ///< of weight, bias and normed
  Routes routes;
  int hidden;  ///< a multiple of 8, at most 8,192
  const float* x;
  Norm norm;
  const void* weight;  // [experts, hidden]
  const void* bias;    // [experts], or null
  bool among_chosen;   ///< whether the softmax is over the chosen experts only
  void* normed;        // [token, hidden], output
  float* logits;       // [token, experts], workspace
};
cudaError_t route(const RouteArgs& args, cudaStream_t stream);

/// y[pair] = W of the pair's expert * x of its token (or of the pair) + bias. Each weight is read
/// once for up to 64 pairs of its expert. The weights of experts without pairs are not read. A
/// pair's result does not depend on other pairs.
struct ExpertProductArgs {
  Type type;
  Routes routes;
  int n, k;            ///< multiples of 8
  const void* weight;  // [expert, n, k]
  const void* bias;    // [expert, n], or null
  const void* x;       // [pair, k], or [token, k] if by_token
  bool by_token;
  void* y;         // [pair, n] of type, or null
  float* y_float;  // [pair, n], if y is null
};
cudaError_t expert_product(const ExpertProductArgs& args, cudaStream_t stream);

/// x[token] += the sum of share * y over the token's pairs; y is [pair, hidden].
cudaError_t add_shares(const Routes& routes, const float* y, int hidden, float* x,
                       cudaStream_t stream);

}  // namespace kvlab::kernels
