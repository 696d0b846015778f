# The registry with two lines more: tova, taken from docs/adding-a-policy.md, and leaky of the tests. Both
# have what none of the registry's own has: weights and parameters.
set(extended ${CMAKE_CURRENT_BINARY_DIR}/extended)
set(page ${PROJECT_SOURCE_DIR}/docs/adding-a-policy.md)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${page})
file(READ ${page} text)
if(NOT text MATCHES "```cpp\n(// tova: [^`]+)```")
  message(FATAL_ERROR "${page}: has no block ```cpp that begins with '// tova: '")
endif()
file(GENERATE OUTPUT ${extended}/policies/tova.hpp CONTENT "${CMAKE_MATCH_1}")
if(NOT text MATCHES "```text\n(tova.hpp [^`]+)```")
  message(FATAL_ERROR "${page}: has no block ```text that begins with 'tova.hpp '")
endif()
set(tova_line "${CMAKE_MATCH_1}")
file(READ ${KVLAB_REGISTRY} lines)
file(WRITE ${extended}/registry.txt "${lines}\n${tova_line}\nleaky.hpp Leaky\n")
configure_file(leaky.hpp ${extended}/policies/leaky.hpp COPYONLY)
kvlab_generate_registry(${extended}/registry.txt ${extended}/policies/registry.hpp)

# The catalogue's own sources, built with that registry.
list(TRANSFORM KVLAB_POLICY_SOURCES PREPEND ${PROJECT_SOURCE_DIR}/policies/ OUTPUT_VARIABLE sources)
add_library(kvlab_extended_policies STATIC ${sources})
target_include_directories(kvlab_extended_policies PUBLIC ${extended} ${PROJECT_SOURCE_DIR})
target_link_libraries(kvlab_extended_policies PUBLIC kvlab_options PRIVATE fmt::fmt)

# And its device code.
if(KVLAB_CUDA)
  kvlab_generate_device_policies(${extended}/registry.txt ${extended}/kernels/device_policies.cu)
  add_library(kvlab_extended_eviction STATIC ${extended}/kernels/device_policies.cu)
  target_include_directories(kvlab_extended_eviction PUBLIC ${extended} ${PROJECT_SOURCE_DIR})
  target_link_libraries(kvlab_extended_eviction PUBLIC kvlab_kernels kvlab_options)
endif()
