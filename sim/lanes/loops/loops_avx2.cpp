// Compiled with -mavx2 -mfma -mpopcnt -mbmi2.
#include "sim/lanes/loops/policy_loops_body.hpp"
#include "sim/lanes/loops/row_loops_body.hpp"

namespace kvlab {
namespace {

bool here() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("popcnt") && __builtin_cpu_supports("bmi2");
}

}  // namespace

const RowLoops* row_loops_avx2() {
  static constexpr RowLoops loops = row_loops_named("avx2");
  return here() ? &loops : nullptr;
}

const PolicyLoops* policy_loops_avx2() { return here() ? loops_of(Registry{}) : nullptr; }

}  // namespace kvlab
