// A finished unit of work as bytes: what lies on disk until a run is whole, and what processes send
// each other.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/run/tabulate.hpp"

namespace kvlab {

/// Which unit of which replay.
struct UnitId {
  std::uint64_t job = 0;  ///< XXH3-64 of what is computed: RunFolder's
  std::uint64_t trace = 0, unit = 0;

  bool operator==(const UnitId&) const = default;
};

/// The outcomes by configuration, exactly; ends in an XXH3-64 of all that is before it.
std::string pack_unit(const UnitId& id, std::span<const HeadOutcome> outcomes);

/// Reads what pack_unit wrote. Throws std::runtime_error that begins with `file`: cut, changed, or
/// another unit than `id`.
std::vector<HeadOutcome> unpack_unit(const UnitId& id, std::string_view bytes,
                                     std::string_view file);

}  // namespace kvlab
