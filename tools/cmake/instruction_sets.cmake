# Compiles hot loops for additional instruction sets, which are selected at run time.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  set(KVLAB_X86 ON)
endif()
set(KVLAB_AVX2_OPTIONS -mavx2 -mfma -mpopcnt -mbmi2)
set(KVLAB_AVX512_OPTIONS -mavx512f -mavx512dq -mfma -mpopcnt -mbmi2)

# kvlab_instruction_sets(<target> <avx2 source> <avx512 source>): adds the sources to <target> in builds for x86-64,
# because only x86-64 processors may have these instruction sets.
function(kvlab_instruction_sets target avx2 avx512)
  if(NOT KVLAB_X86)
    return()
  endif()
  target_sources(${target} PRIVATE ${avx2} ${avx512})
  target_compile_definitions(${target} PRIVATE KVLAB_X86)
  set_source_files_properties(${avx2} PROPERTIES COMPILE_OPTIONS "${KVLAB_AVX2_OPTIONS}")
  # (GCC warns about uninitialized values in its own vector headers.)
  set_source_files_properties(${avx512} PROPERTIES COMPILE_OPTIONS
                              "${KVLAB_AVX512_OPTIONS};-Wno-maybe-uninitialized;-Wno-uninitialized")
endfunction()
