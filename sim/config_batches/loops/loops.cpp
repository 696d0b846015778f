// Compiled for the basic instruction set of the architecture, which every machine supports.
#include "sim/config_batches/loops/row_loops_body.hpp"

namespace kvlab {

const RowLoops& row_loops_base() {
  static constexpr RowLoops loops = make_row_loops("base");
  return loops;
}

const RowLoops& row_loops() {
  static const RowLoops& best = row_loops_avx512() ? *row_loops_avx512()
                                : row_loops_avx2() ? *row_loops_avx2()
                                                   : row_loops_base();
  return best;
}

#if !defined(KVLAB_X86)
const RowLoops* row_loops_avx2() { return nullptr; }
const RowLoops* row_loops_avx512() { return nullptr; }
#endif

}  // namespace kvlab
