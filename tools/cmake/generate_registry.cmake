# One line of the registry is one policy: `header.hpp Struct`. From it follow the registry's header and,
# for CUDA, translation units that compile every policy for the device.

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

# kvlab_generate_registry(<registry.txt> <registry.hpp>): includes, a type list, and its checks.
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

# kvlab_generate_probes(<registry.txt> <probes.cu>): every policy's device code.
function(kvlab_generate_probes registry output)
  kvlab_read_registry(${registry} headers types)
  list(TRANSFORM types REPLACE "(.+)" "      probe_of<\\1>(),")
  list(JOIN types "\n" probes)
  file(CONFIGURE OUTPUT ${output} @ONLY CONTENT [[
// Generated from the registry. Do not edit.
#include "kernels/evict/policy_probe.cuh"
#include "policies/registry.hpp"

namespace kvlab {

const std::vector<DeviceProbe>& device_probes() {
  static const std::vector<DeviceProbe> probes{
@probes@
  };
  return probes;
}

}  // namespace kvlab
]])
endfunction()

# kvlab_generate_kernels(<registry.txt> <list.cu> <header> <maker> <type> <function>): a list of what every policy has on
# the device: `const std::vector<type>& function()`, each made by `maker<Policy>()` of <header>.
function(kvlab_generate_kernels registry output header maker type function)
  kvlab_read_registry(${registry} headers types)
  list(TRANSFORM types REPLACE "(.+)" "      ${maker}<\\1>(),")
  list(JOIN types "\n" kernels)
  file(CONFIGURE OUTPUT ${output} @ONLY CONTENT [[
// Generated from the registry. Do not edit.
#include "@header@"
#include "policies/registry.hpp"

namespace kvlab::kernels {

const std::vector<@type@>& @function@() {
  static const std::vector<@type@> list{
@kernels@
  };
  return list;
}

}  // namespace kvlab::kernels
]])
endfunction()

# kvlab_generate_kernel_units(<registry.txt> <stem> <type's header> <header> <maker> <type> <function> <sources>): the same list,
# of what takes long to compile: in a unit for each policy, `stem`_Struct.cu, and one that joins them. Sets <sources> in the caller.
function(kvlab_generate_kernel_units registry stem declared_in header maker type function sources)
  kvlab_read_registry(${registry} headers types)
  set(units ${stem}.cpp)
  foreach(file name IN ZIP_LISTS headers types)
    file(CONFIGURE OUTPUT ${stem}_${name}.cu @ONLY CONTENT [[
// Generated from the registry. Do not edit.
#include "@header@"
#include "policies/@file@"

namespace kvlab::kernels {

@type@ @function@_@name@() { return @maker@<@name@>(); }

}  // namespace kvlab::kernels
]])
    list(APPEND units ${stem}_${name}.cu)
  endforeach()
  list(TRANSFORM types PREPEND "${type} ${function}_" OUTPUT_VARIABLE declarations)
  list(JOIN declarations "();\n" declarations)
  list(TRANSFORM types REPLACE "(.+)" "      ${function}_\\1()," OUTPUT_VARIABLE calls)
  list(JOIN calls "\n" calls)
  file(CONFIGURE OUTPUT ${stem}.cpp @ONLY CONTENT [[
// Generated from the registry. Do not edit.
#include <vector>

#include "@declared_in@"

namespace kvlab::kernels {

@declarations@();

const std::vector<@type@>& @function@() {
  static const std::vector<@type@> list{
@calls@
  };
  return list;
}

}  // namespace kvlab::kernels
]])
  set(${sources} ${units} PARENT_SCOPE)
endfunction()
