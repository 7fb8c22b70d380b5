# Writes OUTPUT, a C++ source that holds page.html of FOLDER with its style sheet and scripts in it.
#   cmake -DFOLDER=… -DOUTPUT=… -P embed_template.cmake
file(READ "${FOLDER}/page.html" text)
file(READ "${FOLDER}/page.css" style)
file(READ "${FOLDER}/page.js" script)
file(READ "${FOLDER}/quality.js" more)
string(APPEND script "${more}")
string(REPLACE "{{style}}" "${style}" text "${text}")
string(REPLACE "{{script}}" "${script}" text "${text}")
string(FIND "${text}" ")html\"" clash)
if(NOT clash EQUAL -1)
  message(FATAL_ERROR "${FOLDER} contains the end mark of a raw string")
endif()
# One literal a row keeps each short of what compilers must accept; the compiler joins them.
string(REPLACE "\n" "\n)html\"\n      R\"html(" text "${text}")
file(
  WRITE "${OUTPUT}"
  "// Made by embed_template.cmake from templates/page.*; do not edit.\n#include <emend/evaluation/detail/page.h>\n\n"
  "std::string_view emend::evaluation::detail::page_template() {\n  return\n      R\"html(${text})html\";\n}\n")
