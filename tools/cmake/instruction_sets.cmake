# The instruction sets that hot loops are compiled for once more, and chosen from at run time.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  set(KVLAB_X86 ON)
endif()
set(KVLAB_AVX2_OPTIONS -mavx2 -mfma -mpopcnt -mbmi2)
set(KVLAB_AVX512_OPTIONS -mavx512f -mavx512dq -mfma -mpopcnt -mbmi2)

# kvlab_instruction_sets(<target> <avx2 source> <avx512 source>): adds them to <target>, where the processor has such sets.
function(kvlab_instruction_sets target avx2 avx512)
  if(NOT KVLAB_X86)
    return()
  endif()
  target_sources(${target} PRIVATE ${avx2} ${avx512})
  target_compile_definitions(${target} PRIVATE KVLAB_X86)
  set_source_files_properties(${avx2} PROPERTIES COMPILE_OPTIONS "${KVLAB_AVX2_OPTIONS}")
  # (GCC's own headers of vector functions look uninitialized to it.)
  set_source_files_properties(${avx512} PROPERTIES COMPILE_OPTIONS
                              "${KVLAB_AVX512_OPTIONS};-Wno-maybe-uninitialized;-Wno-uninitialized")
endfunction()
