// The compiler options of this file are set in tools/cmake/instruction_sets.cmake.
#include "policies/ops/instruction_set.hpp"
#include "policies/ops/make_ops.hpp"
#include "policies/registry.hpp"

namespace kvlab {

std::span<const PolicyOps> registry_ops_avx2() {
  if (instruction_set() < InstructionSet::avx2) return {};
  return ops_of(Registry{});
}

}  // namespace kvlab
