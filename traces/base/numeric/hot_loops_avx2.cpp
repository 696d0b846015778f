// Compiled with -mavx2 -mfma.
#include "traces/base/numeric/hot_loops_body.hpp"

namespace kvlab {

const HotLoops* hot_loops_avx2() {
  static constexpr HotLoops loops = loops_named("avx2");
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &loops : nullptr;
}

}  // namespace kvlab
