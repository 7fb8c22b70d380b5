# Writes OUTPUT, a C++ source with the three files of the page in FOLDER.
#   cmake -DFOLDER=… -DOUTPUT=… -P embed_page.cmake
set(source "// Made by embed_page.cmake; do not edit.\n#include <string_view>\n\nnamespace emend::tools::serve {\n")
foreach(kind html css js)
  file(READ "${FOLDER}/page.${kind}" text)
  string(FIND "${text}" ")page\"" clash)
  if(NOT clash EQUAL -1)
    message(FATAL_ERROR "page.${kind} contains the end mark of a raw string")
  endif()
  # One literal a row keeps each short of what compilers must accept; the compiler joins them.
  string(REPLACE "\n" "\n)page\"\n      R\"page(" text "${text}")
  string(APPEND source "\nstd::string_view page_${kind}() {\n  return\n      R\"page(${text})page\";\n}\n")
endforeach()
file(WRITE "${OUTPUT}" "${source}\n}  // namespace emend::tools::serve\n")
