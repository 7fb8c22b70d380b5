# Targets "format" and "check-format": clang-format over all sources, as the pre-commit hook does.
find_program(EMEND_CLANG_FORMAT NAMES clang-format clang-format-14)
mark_as_advanced(EMEND_CLANG_FORMAT)
set(_list_sources "git ls-files --cached --others --exclude-standard -- '*.h' '*.cpp' '*.cu'")
foreach(target_and_options "format;-i" "check-format;--dry-run;--Werror")
  list(POP_FRONT target_and_options _target)
  list(JOIN target_and_options " " _options)
  if(EMEND_CLANG_FORMAT)
    add_custom_target(${_target} COMMAND sh -c "${_list_sources} | xargs ${EMEND_CLANG_FORMAT} ${_options}"
                      WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}" VERBATIM)
  else()
    add_custom_target(
      ${_target} COMMAND sh -c "echo 'clang-format is not installed: apt-get install clang-format'; exit 1" VERBATIM)
  endif()
endforeach()
