// Layers of experts: a router chooses some for each token, and products read the weights of those.
#pragma once

#include "kernels/types.hpp"

namespace kvlab::kernels {

inline constexpr int kMaxExperts = 1024, kMaxChosen = 32;

/// What a router has decided. A pair is a token with one of its experts: pair = token * chosen + i,
/// from the most likely on.
struct Routes {
  int tokens, experts, chosen;
  float* shares;         // [pair]
  std::int32_t* expert;  // [pair]
  std::int32_t* order;   // [pair]: pairs, by expert
  std::int32_t* starts;  // [experts + 1]: where an expert's begin in `order`

  int pairs() const { return tokens * chosen; }
};

/// Fills in `routes`: the experts of the largest logits, of equal ones the first, and softmaxes of
/// all logits or of theirs. Logits are of unrounded norms, in float32; `normed` is rounded.
struct RouteArgs {
  Type type;  ///< of weight, bias, normed
  Routes routes;
  int hidden;  ///< a multiple of 8, at most 8192
  const float* x;
  Norm norm;
  const void* weight;  // [experts, hidden]
  const void* bias;    // [experts], or null
  bool among_chosen;   ///< softmax is of the chosen
  void* normed;        // [token, hidden], out
  float* logits;       // [token, experts], workspace
};
cudaError_t route(const RouteArgs& args, cudaStream_t stream);

/// y[pair] = W of the pair's expert * x of its token, or of the pair, + bias. Each weight is read
/// once for up to 64 pairs of an expert; those of experts that nobody chose are not. A pair's
/// result does not depend on the others.
struct ExpertProductArgs {
  Type type;
  Routes routes;
  int n, k;            ///< multiples of 8
  const void* weight;  // [expert, n, k]
  const void* bias;    // [expert, n], or null
  const void* x;       // [pair, k], or [token, k] where by_token
  bool by_token;
  void* y;         // [pair, n] of type, or null
  float* y_float;  // [pair, n], if y is null
};
cudaError_t expert_product(const ExpertProductArgs& args, cudaStream_t stream);

/// x[token] += the sum over its pairs of share * y; y [pair, hidden].
cudaError_t add_shares(const Routes& routes, const float* y, int hidden, float* x,
                       cudaStream_t stream);

}  // namespace kvlab::kernels
