# Finds ggml (GGUF files and quantised types). Defines the target emend::ggml.
#
#   GGML_ROOT   cache or environment variable: a folder with include/ggml.h. Default: the ggml wheel in .venv; then
#               GGML_HINT, which an installed emend sets to the folder that it was built with.
if(NOT GGML_ROOT AND DEFINED ENV{GGML_ROOT})
  set(GGML_ROOT "$ENV{GGML_ROOT}")
endif()
# A folder that was named is the only one.
set(_ggml_places "${GGML_ROOT}" NO_DEFAULT_PATH)
if(NOT GGML_ROOT)
  file(GLOB _ggml_places "${CMAKE_CURRENT_SOURCE_DIR}/.venv/lib/python3*/site-packages/libggml")
  list(APPEND _ggml_places "${GGML_HINT}")
endif()
find_path(GGML_INCLUDE_DIR gguf.h HINTS ${_ggml_places} PATH_SUFFIXES include)
get_filename_component(_ggml_root "${GGML_INCLUDE_DIR}" DIRECTORY)
find_library(GGML_BASE_LIBRARY ggml-base HINTS "${_ggml_root}" PATH_SUFFIXES lib lib64)
include(FindPackageHandleStandardArgs)
# cmake-format: off
find_package_handle_standard_args(Ggml REQUIRED_VARS GGML_BASE_LIBRARY GGML_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "set GGML_ROOT to a ggml installation, or run ./quickstart --build-only")
# cmake-format: on
if(Ggml_FOUND AND NOT TARGET emend::ggml)
  add_library(emend::ggml INTERFACE IMPORTED)
  target_include_directories(emend::ggml SYSTEM INTERFACE "${GGML_INCLUDE_DIR}")
  target_link_libraries(emend::ggml INTERFACE "${GGML_BASE_LIBRARY}")
endif()
mark_as_advanced(GGML_INCLUDE_DIR GGML_BASE_LIBRARY)
