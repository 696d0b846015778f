// Tokens on rungs: how they come there and go down. Attention over them: plain_kernels().
#pragma once

#include "kernels/codes/coded_cache.hpp"
#include "kernels/evict/admission.hpp"

namespace kvlab::kernels {

struct Leaving;

/// A step's tokens, as newest_keys and newest_values hold them, to their rows of the first rung and
/// to cache.next_slots; before they attend. `now` [sequence]: their positions.
cudaError_t place_newest(const kvlab_cache& cache, const CodedCache& coded,
                         const std::uint32_t* now, cudaStream_t stream);

/// Behind attention and observation of such a step: on each rung that has no room the first to
/// leave, as RungChoice::firsts says, goes down; who passes the last is the token that
/// cache.next_slots names.
cudaError_t step_down_pairs(const EvictingAttentionArgs& args, const Leaving* firsts,
                            cudaStream_t stream);

/// shrink(), where `from` has its tokens on rungs, `coded`: keys and values of `to` are what is
/// read, and `staged` what it is read from.
cudaError_t take_from_rungs(const DevicePolicy& policy, const kvlab_shrink_args& args,
                            const CodedCache& coded, const StagedCodes& staged,
                            cudaStream_t stream);
/// shrink(), where `to` has those rungs and `from` came by take_from_rungs(), new tokens behind it.
/// All are dealt where some leave or the first rung is full.
cudaError_t shrink_to_rungs(const DevicePolicy& policy, const kvlab_shrink_args& args,
                            const CodedCache& coded, const StagedCodes& staged,
                            cudaStream_t stream);

}  // namespace kvlab::kernels
