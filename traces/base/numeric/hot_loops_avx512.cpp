// Compiled with -mavx512f.
#include "traces/base/numeric/hot_loops_body.hpp"

namespace kvlab {

const HotLoops* hot_loops_avx512() {
  static constexpr HotLoops loops = loops_named("avx512");
  return __builtin_cpu_supports("avx512f") ? &loops : nullptr;
}

}  // namespace kvlab
