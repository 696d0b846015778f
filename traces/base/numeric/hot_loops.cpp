// Compiled for the build's base instruction set, which every supported machine has.
#include "traces/base/numeric/hot_loops_body.hpp"

namespace kvlab {

const HotLoops& hot_loops_base() {
  static constexpr HotLoops loops = loops_named("base");
  return loops;
}

const HotLoops& hot_loops() {
  static const HotLoops& best = hot_loops_avx512() ? *hot_loops_avx512()
                                : hot_loops_avx2() ? *hot_loops_avx2()
                                                   : hot_loops_base();
  return best;
}

#if !defined(KVLAB_X86)
const HotLoops* hot_loops_avx2() { return nullptr; }
const HotLoops* hot_loops_avx512() { return nullptr; }
#endif

}  // namespace kvlab
