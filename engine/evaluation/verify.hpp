// `kvlab verify`: a decoder against the simulator and against float64, in five separate checks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
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

/// Attention outputs, of each query and query head, against float64 over the same live tokens.
struct OutputCheck {
  std::uint64_t rows = 0;
  /// Of the layer that comes nearest to its tolerance, or exceeds it most: the largest error of an
  /// element, over the largest sum of p |value| in its row; and twice that of a plain attention of
  /// the decoder's dtype on the same rows, or a rounding.
  std::uint32_t layer = 0;
  double worst_error = 0, tolerance = 1e-5;
  bool right() const { return worst_error <= tolerance; }
};

/// Logits against those of the CPU's forward pass over the same tokens and the same live sets.
struct LogitCheck {
  std::uint64_t rows = 0;  ///< compared, of the watched decoder and of one that nothing watches
  /// Relative, over all rows, of the worse of the two; and three times that of a forward pass that
  /// rounds to the decoder's dtype, or a rounding.
  double error = 0, tolerance = 1e-5;
  bool right() const { return error <= tolerance; }
};

struct VerifyReport {
  // (a) From the engine's own observations: the same states and victims?
  std::uint64_t appends = 0, evictions = 0;  ///< compared, over all layers and KV heads
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
  OutputCheck outputs;            ///< (d)
  LogitCheck logits;              ///< (e)

  bool ok() const { return identical && right() && outputs.right() && logits.right(); }
};

/// One turn: a prompt, then so many decoded tokens.
struct VerifyTurn {
  std::vector<std::int32_t> prompt;
  std::uint32_t decode_tokens;
};

struct VerifyOptions {
  unsigned threads = 1;
  /// (b) and (d) look at every so many-th append; (a) and (e) at all of them.
  std::uint32_t check_every = 1;
  /// (b), (c) and (d) look at these layers; empty: at all.
  std::vector<std::uint32_t> layers = {};
  /// (e): the decoder's model on the CPU, which must outlive the check; null: logits are not
  /// compared.
  const Model* reference = nullptr;
};

/// Checks one sequence: watch a decoder with it, then take the report.
class Verifier {
 public:
  /// `rounding`: what the decoder rounds q and k to after RoPE. `output`: its output projections,
  /// for features that are computed from them; or null.
  Verifier(const ModelConfig& config, const ResolvedConfig& cache, std::optional<Dtype> rounding,
           VerifyOptions options, std::shared_ptr<const OutputProjections> output = nullptr);
  ~Verifier();

  DecoderObserver& observer();
  /// (e), after each time that the decoder was fed: its logits of the last token, and those of a
  /// decoder of the same kind that nothing watches.
  void compare_logits(std::span<const float> watched, std::span<const float> alone);
  VerifyReport report();  ///< asks (c); once

 private:
  class Watch;
  std::unique_ptr<Watch> watch_;
};

/// Decodes the turns under `cache`, with (a), (b), (d) and (e) on the way and (c) at the end.
VerifyReport verify_decoder(Backend& backend, const ResolvedConfig& cache,
                            const std::vector<VerifyTurn>& turns, SamplingOptions sampling,
                            const VerifyOptions& options);

}  // namespace kvlab
