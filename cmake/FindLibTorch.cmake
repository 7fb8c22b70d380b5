# Finds LibTorch without its CUDA-probing package file. Defines the target emend::torch, which links only
# libtorch_cpu and libc10; libtorch_cuda.so is opened at run time when a CUDA device is asked for.
#
#   LIBTORCH_ROOT   cache or environment variable: a LibTorch folder (with include/ and lib/).
#                   Default: the torch wheel in the project's .venv; then LIBTORCH_HINT, which an installed emend
#                   sets to the folder that it was built with.
if(NOT LIBTORCH_ROOT AND DEFINED ENV{LIBTORCH_ROOT})
  set(LIBTORCH_ROOT "$ENV{LIBTORCH_ROOT}")
endif()
# Another folder than last time: look again.
if(DEFINED CACHE{_LIBTORCH_ROOT_SEEN} AND NOT "${_LIBTORCH_ROOT_SEEN}" STREQUAL "${LIBTORCH_ROOT}")
  unset(LIBTORCH_INCLUDE_DIR CACHE)
  unset(LIBTORCH_CPU_LIBRARY CACHE)
  unset(LIBTORCH_C10_LIBRARY CACHE)
endif()
set(_LIBTORCH_ROOT_SEEN "${LIBTORCH_ROOT}" CACHE INTERNAL "")
# A folder that was named is the only one.
set(_libtorch_places "${LIBTORCH_ROOT}")
if(NOT LIBTORCH_ROOT)
  file(GLOB _libtorch_places "${CMAKE_CURRENT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch")
  list(APPEND _libtorch_places "${LIBTORCH_HINT}")
endif()
find_path(LIBTORCH_INCLUDE_DIR ATen/ATen.h HINTS ${_libtorch_places} PATH_SUFFIXES include NO_DEFAULT_PATH)
get_filename_component(_libtorch_root "${LIBTORCH_INCLUDE_DIR}" DIRECTORY)
find_library(LIBTORCH_CPU_LIBRARY torch_cpu HINTS "${_libtorch_root}/lib" NO_DEFAULT_PATH)
find_library(LIBTORCH_C10_LIBRARY c10 HINTS "${_libtorch_root}/lib" NO_DEFAULT_PATH)

set(LIBTORCH_VERSION "")
set(_version_header "${LIBTORCH_INCLUDE_DIR}/torch/headeronly/version.h")
if(NOT EXISTS "${_version_header}")
  set(_version_header "${LIBTORCH_INCLUDE_DIR}/torch/csrc/api/include/torch/version.h")
endif()
if(EXISTS "${_version_header}")
  file(STRINGS "${_version_header}" _version_lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
  string(REGEX REPLACE "[^0-9;]" "" _version_numbers "${_version_lines}")
  list(JOIN _version_numbers "." LIBTORCH_VERSION)
endif()

include(FindPackageHandleStandardArgs)
# cmake-format: off
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LIBTORCH_CPU_LIBRARY LIBTORCH_C10_LIBRARY LIBTORCH_INCLUDE_DIR
  VERSION_VAR LIBTORCH_VERSION
  REASON_FAILURE_MESSAGE "set LIBTORCH_ROOT to a LibTorch 2.11 folder, or run ./quickstart --build-only, which installs one into .venv")
# cmake-format: on

if(LibTorch_FOUND AND NOT TARGET emend::torch)
  add_library(emend::torch INTERFACE IMPORTED)
  target_include_directories(emend::torch SYSTEM INTERFACE "${LIBTORCH_INCLUDE_DIR}"
                                                           "${LIBTORCH_INCLUDE_DIR}/torch/csrc/api/include")
  target_link_libraries(emend::torch INTERFACE "${LIBTORCH_CPU_LIBRARY}" "${LIBTORCH_C10_LIBRARY}" ${CMAKE_DL_LIBS})
  # Without OpenMP at::parallel_for is an ordinary loop. The run-time library is LibTorch's own: a second one would have
  # threads of its own.
  file(GLOB _libtorch_openmp "${_libtorch_root}/lib/libgomp*.so*")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND _libtorch_openmp)
    target_compile_options(emend::torch INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
    target_link_libraries(emend::torch INTERFACE ${_libtorch_openmp})
  endif()
endif()
mark_as_advanced(LIBTORCH_INCLUDE_DIR LIBTORCH_CPU_LIBRARY LIBTORCH_C10_LIBRARY)
