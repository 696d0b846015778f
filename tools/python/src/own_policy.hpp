// Policies whose text is a Python function over arrays of all live tokens of a cache.
#pragma once

#include <string>
#include <vector>

#include "tools/python/src/bindings.hpp"
#include "tools/python/src/policy.hpp"

namespace kvlab::python {

/// What an own policy says of itself, and the function that is called back.
struct OwnPolicy {
  std::string name, summary;
  std::string path, text;  ///< where the function was written, and its source
  std::string needs;       ///< nothing, mass, requests, both
  std::vector<std::string> columns;
  std::string defaults;         ///< guards and modifiers, as on the command line; may be empty
  std::string positions;        ///< original, cache
  std::size_t state_bytes = 0;  ///< that the function keeps for each token
  /// Of queries by how many are younger in their admission, and 0 from there on; empty: all are 1.
  std::vector<float> weights;
  /// (state, mass, requests, last_request, queries, position, columns, step) -> ranks: state is
  /// uint8 [live, state_bytes], written in place; what is not needed is None; step is a tuple.
  nb::object function;
  /// rows(sequence, layer, first, q, k, v, inv_freq, rope_factor, softmax_scale), arrays [token,
  /// head, dim] that are its own, and trace(sequence, path): what PolicyEntry shows. Or None.
  nb::object sight;
};

/// Throws std::invalid_argument for columns, guards or modifiers that no policy may have. Whoever
/// calls knows that the name is not taken.
Policy make_own_policy(OwnPolicy own);

}  // namespace kvlab::python
