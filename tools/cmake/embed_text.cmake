# kvlab_embed_text(<target> <function> <files…>): adds a source file to <target> that contains the path (in the project)
# and the text of each file. kvlab::<function>() returns all of them (policies/embedded.hpp).
function(kvlab_embed_text target function)
  set(output ${CMAKE_CURRENT_BINARY_DIR}/${function}.cpp)
  list(TRANSFORM ARGN PREPEND ${PROJECT_SOURCE_DIR}/ OUTPUT_VARIABLE files)
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -DOUTPUT=${output} -DFUNCTION=${function} -DROOT=${PROJECT_SOURCE_DIR}
            "-DFILES=${ARGN}" -P ${PROJECT_SOURCE_DIR}/tools/cmake/write_embedded.cmake
    DEPENDS ${files} ${PROJECT_SOURCE_DIR}/tools/cmake/write_embedded.cmake VERBATIM)
  set_source_files_properties(${output} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)  # so that clang-tidy reads only
                                                                                   # kvlab's sources
  target_sources(${target} PRIVATE ${output})
endfunction()
