# Installs BUILD (a CUDA build) to a fresh prefix, builds the examples of SOURCE against that with find_package, and
# runs those in C (which say "skipped" where there is no device).
set(prefix ${WORK}/prefix)
file(REMOVE_RECURSE ${WORK})
foreach(component kernels command)
  execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix} --component ${component}
                  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
endforeach()
execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE}/tools/examples -B ${WORK}/build -DCMAKE_PREFIX_PATH=${prefix}
                        -DCUDAToolkit_ROOT=${TOOLKIT} "-DCMAKE_C_FLAGS=-Wall -Wextra -Werror"
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --build ${WORK}/build COMMAND_ERROR_IS_FATAL ANY)
foreach(example evict paged)
  execute_process(COMMAND ${WORK}/build/${example} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
# A policy source needs no checkout: the installed command has the headers in it.
execute_process(COMMAND ${prefix}/bin/kvlab policies --policy-source ${POLICY} WORKING_DIRECTORY ${WORK}
                OUTPUT_VARIABLE policies COMMAND_ERROR_IS_FATAL ANY)
if(NOT policies MATCHES "\npeak\n")
  message(FATAL_ERROR "the installed kvlab does not know the policy of ${POLICY}:\n${policies}")
endif()
