# Compares the tables of PAGE (docs/reference/policies.md) with the output of KVLAB (the program), row by row. A policy
# that is missing on the page is not an error. With -DWRITE=ON the script corrects the rows of the page instead.
set(refresh [[
NR == FNR { row[$2] = $0; next }
/^<!-- kvlab policies --markdown -->/ { made = seen = 1 }
/^<!-- end -->/ { made = 0 }
made && /^\| / && $2 != "---" { if (!($2 in row)) next; $0 = row[$2] }
{ print }
END { exit !seen || made }]])
file(READ ${PAGE} page)
execute_process(COMMAND ${KVLAB} policies --markdown COMMAND awk "${refresh}" - ${PAGE} OUTPUT_VARIABLE fresh
                COMMAND_ERROR_IS_FATAL ANY)
if(WRITE)
  file(WRITE ${PAGE} "${fresh}")
elseif(NOT fresh STREQUAL page)
  message(FATAL_ERROR "${PAGE} is not what `kvlab policies --markdown` prints: run ./dev docs")
endif()
