# Writes OUTPUT, a C++ source in which SYMBOL of NAMESPACE gives the text of INPUT.
#   cmake -DINPUT=… -DOUTPUT=… -DNAMESPACE=emend::datasets -DSYMBOL=… -P embed.cmake
set(source "// Made by embed.cmake; do not edit.\n#include <string_view>\n\n")
string(APPEND source "namespace ${NAMESPACE} {\n\nstd::string_view ${SYMBOL}() {\n  return\n")
file(READ "${INPUT}" text)
string(FIND "${text}" ")json\"" clash)
if(NOT clash EQUAL -1)
  message(FATAL_ERROR "${INPUT} contains the end mark of a raw string")
endif()
# One literal a row keeps each short of what compilers must accept; the compiler joins them.
string(REPLACE "\n" "\n)json\"\n      R\"json(" text "${text}")
string(APPEND source "      R\"json(${text})json\";\n}\n\n}  // namespace ${NAMESPACE}\n")
file(WRITE "${OUTPUT}" "${source}")
