// The instruction sets for which hot loops are compiled, and the one to use on this machine. All
// give the same bits.
#pragma once

namespace kvlab {

enum class InstructionSet { base, avx2, avx512 };  ///< base: supported by every machine

/// The best instruction set of this machine and this build, selected once.
InstructionSet instruction_set();

}  // namespace kvlab
