// Launch plans of decode attention, for tests and for callers that allocate memory.
#include "kernels/decode/pair_plan.cuh"

namespace kvlab::kernels {

PairLaunch pair_attention_plan(const PairAttention& args, const DeviceLimits& limits) {
  const auto plan = [&]<class Warp>() { return plan_pairs<Warp>(limits, args); };
  return args.group > kMaxPagedGroup ? with_warp<16>(args, plan) : with_warp<8>(args, plan);
}

}  // namespace kvlab::kernels
