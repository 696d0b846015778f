// The instruction sets for which hot loops are compiled, and the one that this machine uses. All of
// them give the same results, bit for bit.
#pragma once

namespace kvlab {

enum class InstructionSet { base, avx2, avx512 };  ///< base: supported by every machine

/// The best instruction set of this machine and this build, selected once.
InstructionSet instruction_set();

}  // namespace kvlab
