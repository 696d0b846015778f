// Compiled for the build's base instruction set, which every supported machine has.
#include "policies/ops/instruction_set.hpp"
#include "policies/ops/make_ops.hpp"
#include "policies/registry.hpp"

namespace kvlab {

std::span<const PolicyOps> registry_ops_base() { return ops_of(Registry{}); }

std::span<const PolicyOps> registry_ops() {
  switch (instruction_set()) {
    case InstructionSet::avx512:
      return registry_ops_avx512();
    case InstructionSet::avx2:
      return registry_ops_avx2();
    case InstructionSet::base:
      break;
  }
  return registry_ops_base();
}

#if !defined(KVLAB_X86)
std::span<const PolicyOps> registry_ops_avx2() { return {}; }
std::span<const PolicyOps> registry_ops_avx512() { return {}; }
#endif

}  // namespace kvlab
