// The row loops of one instruction set. Each instruction set has a source file that includes this
// header and follows the rules of traces/base/numeric/vectors.hpp.
#pragma once

#include "sim/config_batches/loops/rows/cache_positions.hpp"
#include "sim/config_batches/loops/rows/exponentials.hpp"
#include "sim/config_batches/loops/rows/gathering.hpp"
#include "sim/config_batches/loops/rows/masses.hpp"
#include "sim/config_batches/loops/rows/outputs.hpp"
#include "sim/config_batches/loops/rows/requests.hpp"
#include "sim/config_batches/loops/rows/totals.hpp"

namespace kvlab {
namespace {

constexpr RowLoops make_row_loops(const char* name) {
  return {.name = name,
          .extend = extend,
          .finish = finish,
          .gather = gather,
          .total = total,
          .masses = masses,
          .mark = mark,
          .flag = flag,
          .bin = bin,
          .common = common,
          .list_weights = list_weights,
          .accumulate = accumulate_head_group,
          .distance2 = distance2,
          .add_changes = add_changes,
          .close_gap = close_gap,
          .rotate_panel = rotate_panel,
          .panel_products = panel_products,
          .join = join};
}

}  // namespace
}  // namespace kvlab
