// Instruction sets that hot loops are compiled for, and the one to use here. All give the same
// bits.
#pragma once

namespace kvlab {

enum class InstructionSet { base, avx2, avx512 };  ///< base: what every machine has

/// The best set that this machine has, and this build: chosen once.
InstructionSet instruction_set();

}  // namespace kvlab
