# Compiles SOURCE with COMPILER. The first line of SOURCE gives the expected message of the compiler; if it gives
# none, SOURCE has to compile.
file(STRINGS ${SOURCE} first LIMIT_COUNT 1)
string(REGEX REPLACE "^// expect: ?" "" expected "${first}")
execute_process(COMMAND ${COMPILER} -std=c++20 -fsyntax-only -I${INCLUDE} ${SOURCE}
                RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(expected STREQUAL "")
  if(failed)
    message(FATAL_ERROR "should compile:\n${output}")
  endif()
  return()
endif()
if(NOT failed)
  message(FATAL_ERROR "compiled; it should be refused with: ${expected}")
endif()
string(FIND "${output}" "${expected}" found)
if(found EQUAL -1)
  message(FATAL_ERROR "should be refused with: ${expected}\nbut the compiler says:\n${output}")
endif()
