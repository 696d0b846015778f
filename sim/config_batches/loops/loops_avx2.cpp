// Compiled with the options of tools/cmake/instruction_sets.cmake.
#include "policies/ops/instruction_set.hpp"
#include "sim/config_batches/loops/row_loops_body.hpp"

namespace kvlab {

const RowLoops* row_loops_avx2() {
  static constexpr RowLoops loops = make_row_loops("avx2");
  return instruction_set() >= InstructionSet::avx2 ? &loops : nullptr;
}

}  // namespace kvlab
