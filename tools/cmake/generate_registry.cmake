# kvlab_generate_registry(<registry.txt> <registry.hpp>): one line of the text is one policy.
function(kvlab_generate_registry registry output)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${registry})
  file(STRINGS ${registry} lines)
  set(includes "")
  set(types "")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "#.*" "" line "${line}")
    string(STRIP "${line}" line)
    if(line STREQUAL "")
      continue()
    endif()
    if(NOT line MATCHES "^([A-Za-z0-9_./-]+\\.hpp)[ \t]+([A-Za-z_][A-Za-z0-9_]*)$")
      message(FATAL_ERROR "${registry}: '${line}' should read: header.hpp Struct")
    endif()
    string(APPEND includes "#include \"policies/${CMAKE_MATCH_1}\"\n")
    list(APPEND types ${CMAKE_MATCH_2})
  endforeach()
  set(checks "")
  foreach(type IN LISTS types)
    string(APPEND checks "static_assert(check_policy<${type}>());\n")
  endforeach()
  list(JOIN types ", " types)
  file(CONFIGURE OUTPUT ${output} @ONLY CONTENT [[
// Generated from the registry. Do not edit.
#pragma once

@includes@
namespace kvlab {

@checks@
template <class... P>
struct PolicyList {};

using Registry = PolicyList<@types@>;

}  // namespace kvlab
]])
endfunction()
