# libemend_nccl.so, a plug-in that programs open at run time: no target links it, and it links neither LibTorch nor emend.
#
#   NCCL_ROOT   cache or environment variable: a folder with include/nccl.h and lib/libnccl.so. Default: the system's
#               folders, the CUDA toolkit's, and the NCCL wheel in .venv.
find_package(CUDAToolkit QUIET)
if(NOT CUDAToolkit_FOUND)
  message(FATAL_ERROR "EMEND_WITH_NCCL: no CUDA toolkit was found; the plug-in needs cuda_runtime_api.h and libcudart.so: "
                      "give -DCUDAToolkit_ROOT=DIR, or -DEMEND_WITH_NCCL=OFF")
endif()
file(GLOB _nccl_wheels "${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/nccl")
find_path(NCCL_INCLUDE_DIR nccl.h HINTS "${NCCL_ROOT}" "$ENV{NCCL_ROOT}" ${CUDAToolkit_INCLUDE_DIRS} ${_nccl_wheels}
          PATH_SUFFIXES include)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS "${NCCL_ROOT}" "$ENV{NCCL_ROOT}" "${CUDAToolkit_LIBRARY_DIR}" ${_nccl_wheels}
             PATH_SUFFIXES lib)
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)
foreach(_nccl_part NCCL_INCLUDE_DIR NCCL_LIBRARY)
  if(NOT ${_nccl_part})
    message(FATAL_ERROR "EMEND_WITH_NCCL: ${_nccl_part} was not found (nccl.h, libnccl.so): give -DNCCL_ROOT=DIR, or "
                        "-DEMEND_WITH_NCCL=OFF")
  endif()
endforeach()

add_library(emend_nccl MODULE "${CMAKE_CURRENT_LIST_DIR}/nccl_plugin.cpp")
target_include_directories(emend_nccl PRIVATE "${CMAKE_BINARY_DIR}/include")
target_include_directories(emend_nccl SYSTEM PRIVATE "${NCCL_INCLUDE_DIR}" ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(emend_nccl PRIVATE "${NCCL_LIBRARY}" CUDA::cudart)
target_compile_options(emend_nccl PRIVATE ${EMEND_WARNINGS} -fvisibility=hidden)
get_filename_component(_nccl_lib "${NCCL_LIBRARY}" DIRECTORY)
# Beside the programs while building, beside the other libraries once installed. NCCL is the one that LibTorch's CUDA
# library has already brought into the process; the search path is for a plug-in that is opened alone.
set_target_properties(emend_nccl PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin" INSTALL_RPATH "${_nccl_lib}")
install(TARGETS emend_nccl LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
