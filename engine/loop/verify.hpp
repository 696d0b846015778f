// `kvlab verify`: a decoder's evictions against the simulator's, in three separate questions.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/backend.hpp"
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
  /// What float32 sums may differ by; where q and k are rounded, twice the worst error that a plain
  /// attention of that dtype makes on the same rows.
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

struct VerifyOptions {
  unsigned threads = 1;
  /// (b) looks at every so many-th admission; (a) at all of them.
  std::uint32_t check_every = 1;
  /// (b) and (c) look at these layers; empty: at all.
  std::vector<std::uint32_t> layers;
};

/// Asks the three questions of one sequence: watch a decoder with it, then take the report.
class Verifier {
 public:
  /// `rounding`: what the decoder rounds q and k to after RoPE. `output`: its output projections,
  /// for columns that are computed from them; or null.
  Verifier(const ModelConfig& config, const ResolvedConfig& cache, std::optional<Dtype> rounding,
           VerifyOptions options, std::shared_ptr<const OutputProjections> output = nullptr);
  ~Verifier();

  DecoderObserver& observer();
  VerifyReport report();  ///< asks (c); once

 private:
  class Watch;
  std::unique_ptr<Watch> watch_;
};

/// Decodes the turns under `cache`, asking (a) and (b) on the way and (c) at the end.
VerifyReport verify_decoder(Backend& backend, const ResolvedConfig& cache,
                            const std::vector<VerifyTurn>& turns, SamplingOptions sampling,
                            const VerifyOptions& options);

}  // namespace kvlab
