# Each line of the registry is a policy: `header.hpp Struct`. The registry's header and, for CUDA, translation units
# that compile every policy for the device are generated from it.

# Sets <headers> and <types> in the caller to the two columns of <registry.txt>.
function(kvlab_read_registry registry headers types)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${registry})
  file(STRINGS ${registry} lines)
  set(found_headers "")
  set(found_types "")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "#.*" "" line "${line}")
    string(STRIP "${line}" line)
    if(line STREQUAL "")
      continue()
    endif()
    if(NOT line MATCHES "^([A-Za-z0-9_./-]+\\.hpp)[ \t]+([A-Za-z_][A-Za-z0-9_]*)$")
      message(FATAL_ERROR "${registry}: '${line}' should read: header.hpp Struct")
    endif()
    list(APPEND found_headers ${CMAKE_MATCH_1})
    list(APPEND found_types ${CMAKE_MATCH_2})
  endforeach()
  set(${headers} ${found_headers} PARENT_SCOPE)
  set(${types} ${found_types} PARENT_SCOPE)
endfunction()

# kvlab_generate_registry(<registry.txt> <registry.hpp>): writes the includes, a type list, and its checks.
function(kvlab_generate_registry registry output)
  kvlab_read_registry(${registry} headers types)
  list(TRANSFORM headers REPLACE "(.+)" "#include \"policies/\\1\"")
  list(JOIN headers "\n" includes)
  list(JOIN types ", " types)
  file(CONFIGURE OUTPUT ${output} @ONLY CONTENT [[
// Generated from the registry. Do not edit.
#pragma once

#include "policies/policy_checks.hpp"
@includes@

namespace kvlab {

using Registry = PolicyList<@types@>;
static_assert(check_registry(Registry{}));

}  // namespace kvlab
]])
endfunction()

# kvlab_generate_device_policies(<registry.txt> <device_policies.cu>): writes kvlab::kernels::device_policies(), the
# kernels of every policy that the device supports (kernels/evict/device_policy.hpp).
function(kvlab_generate_device_policies registry output)
  kvlab_read_registry(${registry} headers types)
  set(entries "")
  foreach(header type IN ZIP_LISTS headers types)
    string(APPEND entries "    add_device_policy<${type}>(all, \"${header}\", \"${type}\");\n")
  endforeach()
  file(CONFIGURE OUTPUT ${output} @ONLY CONTENT [[
// Generated from the registry. Do not edit.
#include "kernels/evict/device_policy.cuh"
#include "policies/registry.hpp"

namespace kvlab::kernels {

const std::vector<DevicePolicy>& device_policies() {
  static const std::vector<DevicePolicy> list = [] {
    std::vector<DevicePolicy> all;
@entries@    return all;
  }();
  return list;
}

}  // namespace kvlab::kernels
]])
endfunction()
