// `kvlab verify`: compares a decoder with the simulator and with float64 arithmetic, in five
// separate checks.
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

/// The first eviction of a KV head in which the engine differs from a free-running simulator, which
/// gets only q and k (check (c)).
struct Parting {
  std::uint32_t layer, kv_head, now;
  std::uint32_t engine_victim, simulator_victim;  ///< positions
  /// How close the two victims were in the simulator: the difference of their ranks, divided by the
  /// larger rank.
  double margin;
};

/// Check (d): attention outputs of each query and query head, against float64 over the same live
/// tokens.
struct OutputCheck {
  std::uint64_t rows = 0;
  /// The following numbers are those of the layer whose error is the largest share of its
  /// tolerance. worst_error: the largest error of an element, divided by the largest sum of p
  /// |value| in its row, where p is a token's probability. tolerance: twice the error of a plain
  /// attention in the decoder's dtype on the same rows, but at least one rounding.
  std::uint32_t layer = 0;
  double worst_error = 0, tolerance = 1e-5;
  bool right() const { return worst_error <= tolerance; }
};

/// Check (e): logits against a forward pass on the CPU over the same tokens and the same live sets.
struct LogitCheck {
  std::uint64_t rows = 0;  ///< rows compared, of the watched decoder and of one without an observer
  /// error: the relative error over all rows, the larger one of the two decoders. tolerance: three
  /// times the error of a forward pass that rounds to the decoder's dtype, but at least one
  /// rounding.
  double error = 0, tolerance = 1e-5;
  bool right() const { return error <= tolerance; }
};

struct VerifyReport {
  // Check (a): given the engine's observations, are its states and victims equal to the
  // simulator's?
  std::uint64_t appends = 0, evictions = 0;  ///< compared, over all layers and KV heads
  bool identical = true;
  std::string first_difference;  ///< one line; empty if identical
  // Check (b): are the observations right, compared with float64 over the same live tokens?
  std::uint64_t observations = 0;
  double worst_mass = 0;             ///< largest error of a mass per query and query head
  std::uint64_t wrong_requests = 0;  ///< tokens whose number of requests is impossible by the
                                     ///< float64 probabilities
  /// The tolerance of worst_mass: the error of float32 sums or, if q and k are rounded, twice the
  /// worst error of a plain attention in that dtype on the same rows.
  double tolerance = 1e-5;
  bool right() const { return worst_mass <= tolerance && wrong_requests == 0; }
  // Check (c): given only q and k, where do the evictions of the simulator and the engine differ
  // first?
  std::uint32_t heads = 0;
  std::vector<Parting> partings;  ///< at most one for each head
  OutputCheck outputs;            ///< (d)
  LogitCheck logits;              ///< (e)

  bool ok() const { return identical && right() && outputs.right() && logits.right(); }
};

/// One turn: a prompt, then a number of decoded tokens.
struct VerifyTurn {
  std::vector<std::int32_t> prompt;
  std::uint32_t decode_tokens;
};

struct VerifyOptions {
  unsigned threads = 1;
  /// Checks (b) and (d) look at every check_every-th append, (a) and (e) at all of them.
  std::uint32_t check_every = 1;
  /// The layers that checks (b), (c) and (d) look at; empty: all.
  std::vector<std::uint32_t> layers = {};
  /// For check (e): the decoder's model on the CPU, which must outlive the check; null: logits are
  /// not compared.
  const Model* reference = nullptr;
};

/// Checks one sequence: attach observer() to a decoder, feed it, then take the report.
class Verifier {
 public:
  /// `rounding`: the dtype that the decoder rounds q and k to after RoPE. `output`: its output
  /// projections, for features that are computed from them, or null.
  Verifier(const ModelConfig& config, const ResolvedConfig& cache, std::optional<Dtype> rounding,
           VerifyOptions options, std::shared_ptr<const OutputProjections> output = nullptr);
  ~Verifier();

  DecoderObserver& observer();
  /// For check (e), after each feed: the logits of the last token, from the watched decoder and
  /// from a decoder of the same kind without an observer.
  void compare_logits(std::span<const float> watched, std::span<const float> alone);
  VerifyReport report();  ///< runs check (c); call it once

 private:
  class Watch;
  std::unique_ptr<Watch> watch_;
};

/// Decodes the turns under `cache`. Checks (a), (b), (d) and (e) run on the way, (c) at the end.
VerifyReport verify_decoder(Backend& backend, const ResolvedConfig& cache,
                            const std::vector<VerifyTurn>& turns, SamplingOptions sampling,
                            const VerifyOptions& options);

}  // namespace kvlab
