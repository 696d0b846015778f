// `kvlab verify`: a decoder's evictions against the simulator's, in three separate questions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/decoder.hpp"
#include "engine/sampler.hpp"

namespace kvlab {

/// A head's first eviction on which the free-running simulator and the engine disagree.
struct Parting {
  std::uint32_t layer, kv_head, now;
  std::uint32_t engine_victim, simulator_victim;  ///< positions
  /// How near the tie was: the ranks' difference over the larger rank, in the simulator.
  double margin;
};

struct VerifyReport {
  // (a) From the engine's own observations: the same states and victims?
  std::uint64_t admissions = 0, evictions = 0;  ///< compared, over all layers and KV heads
  bool identical = true;
  std::string first_difference;  ///< one line; empty if identical
  // (b) Are those observations right? Against float64 over the same live set.
  std::uint64_t observations = 0;
  double worst_mass = 0;             ///< |mass - float64's| per query and query head
  std::uint64_t wrong_requests = 0;  ///< tokens whose requests float64 does not allow
  double tolerance = 1e-5;
  bool right() const { return worst_mass <= tolerance && wrong_requests == 0; }
  // (c) Free-running from q and k: where do they part?
  std::uint32_t heads = 0;
  std::vector<Parting> partings;  ///< at most one a head

  bool ok() const { return identical && right(); }
};

/// One turn: a prompt, then so many decoded tokens.
struct VerifyTurn {
  std::vector<std::int32_t> prompt;
  std::uint32_t decode_tokens;
};

/// Decodes the turns under `options`, asking (a) and (b) on the way and (c) at the end.
VerifyReport verify_decoder(const Model& model, const CacheOptions& options,
                            const std::vector<VerifyTurn>& turns, SamplingOptions sampling,
                            unsigned threads);

}  // namespace kvlab
