# Compares the tables of PAGE (docs/reference/policies.md) with the output of KVLAB (the program). With -DWRITE=ON the
# script replaces the tables of the page instead.
set(refresh [[
NR == FNR { fresh = fresh $0 "\n"; next }
/^<!-- end -->/ { made = 0 }
!made { print }
/^<!-- kvlab policies --markdown -->/ { made = seen = 1; printf "%s", fresh }
END { exit !seen || made }]])
file(READ ${PAGE} page)
execute_process(COMMAND ${KVLAB} policies --markdown COMMAND awk "${refresh}" - ${PAGE} OUTPUT_VARIABLE fresh
                COMMAND_ERROR_IS_FATAL ANY)
if(WRITE)
  file(WRITE ${PAGE} "${fresh}")
elseif(NOT fresh STREQUAL page)
  message(FATAL_ERROR "${PAGE} is not what `kvlab policies --markdown` prints: run ./dev docs")
endif()
