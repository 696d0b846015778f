# Installs BUILD (a CUDA build) to a new prefix, builds the examples of SOURCE against it with find_package, and runs
# the examples in C. These print "skipped" if the machine has no device.
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
foreach(example batch evict paged)
  execute_process(COMMAND ${WORK}/build/${example} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
# With a library that has another binary interface, the examples must not start.
file(WRITE ${WORK}/other/other.map "KVLAB_0.1 { global: *; };")
file(WRITE ${WORK}/other/other.c "int kvlab_version(void) { return 1; }")
file(GLOB library RELATIVE ${prefix}/lib ${prefix}/lib/libkvlab_kernels.so.?.?)
execute_process(COMMAND cc -shared -Wl,-soname,${library} -Wl,--version-script=other.map other.c -o ${library}
                WORKING_DIRECTORY ${WORK}/other COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${WORK}/other ${WORK}/build/evict
                RESULT_VARIABLE code ERROR_VARIABLE said)
if(code EQUAL 0 OR NOT said MATCHES "version `KVLAB_[0-9.]+' not found")
  message(FATAL_ERROR "an example runs with a library of another binary interface: ${code} ${said}")
endif()
# --policy-source needs no source tree, because the installed command contains the headers.
execute_process(COMMAND ${prefix}/bin/kvlab policies --policy-source ${POLICY} WORKING_DIRECTORY ${WORK}
                OUTPUT_VARIABLE policies COMMAND_ERROR_IS_FATAL ANY)
if(NOT policies MATCHES "\npeak\n")
  message(FATAL_ERROR "the installed kvlab does not know the policy of ${POLICY}:\n${policies}")
endif()
