#include "policies/ops/instruction_set.hpp"

namespace kvlab {
namespace {

InstructionSet best() {
#if defined(KVLAB_X86)
  const bool both = __builtin_cpu_supports("fma") && __builtin_cpu_supports("popcnt") &&
                    __builtin_cpu_supports("bmi2");
  if (both && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"))
    return InstructionSet::avx512;
  if (both && __builtin_cpu_supports("avx2")) return InstructionSet::avx2;
#endif
  return InstructionSet::base;
}

}  // namespace

InstructionSet instruction_set() {
  static const InstructionSet set = best();
  return set;
}

}  // namespace kvlab
