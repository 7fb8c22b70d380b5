# Target helpers: one static library a folder, all sharing one precompiled header, and one executable a test file.

# Headers are spelled <emend/folder/file.h> in the tree as after installation.
file(MAKE_DIRECTORY "${CMAKE_BINARY_DIR}/include")
file(CREATE_LINK "${CMAKE_SOURCE_DIR}" "${CMAKE_BINARY_DIR}/include/emend" SYMBOLIC)

add_library(emend_build_flags INTERFACE)
target_include_directories(emend_build_flags INTERFACE "$<BUILD_INTERFACE:${CMAKE_BINARY_DIR}/include>"
                                                       "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
target_compile_features(emend_build_flags INTERFACE cxx_std_20)
target_link_libraries(emend_build_flags INTERFACE emend::torch nlohmann_json::nlohmann_json Threads::Threads)
set_target_properties(emend_build_flags PROPERTIES EXPORT_NAME build_flags)

set(EMEND_WARNINGS -Wall -Wextra -Wno-unused-parameter)
if(EMEND_WERROR)
  list(APPEND EMEND_WARNINGS -Werror)
endif()

# The precompiled header: ATen takes 7 s to parse, 1.3 s when precompiled.
add_library(emend_pch OBJECT "${CMAKE_SOURCE_DIR}/cmake/pch.cpp")
target_link_libraries(emend_pch PRIVATE emend_build_flags)
target_precompile_headers(emend_pch PRIVATE "${CMAKE_SOURCE_DIR}/cmake/pch.h")
target_compile_options(emend_pch PRIVATE ${EMEND_WARNINGS})

function(_emend_common target)
  target_compile_options(${target} PRIVATE ${EMEND_WARNINGS})
  target_precompile_headers(${target} REUSE_FROM emend_pch)
endfunction()

# emend_add_library(core SOURCES a.cpp … DEPENDS devices hooks … PRIVATE yaml-cpp::yaml-cpp …)
function(emend_add_library folder)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS;PRIVATE" ${ARGN})
  add_library(emend_${folder} STATIC ${ARG_SOURCES})
  add_library(emend::${folder} ALIAS emend_${folder})
  set_target_properties(emend_${folder} PROPERTIES EXPORT_NAME ${folder})
  target_link_libraries(emend_${folder} PUBLIC emend_build_flags)
  foreach(dependency IN LISTS ARG_DEPENDS)
    target_link_libraries(emend_${folder} PUBLIC emend_${dependency})
  endforeach()
  target_link_libraries(emend_${folder} PRIVATE ${ARG_PRIVATE})
  _emend_common(emend_${folder})
  set_property(GLOBAL APPEND PROPERTY EMEND_LIBRARIES emend_${folder})
endfunction()

function(emend_add_umbrella)
  add_library(emend_emend INTERFACE)
  add_library(emend::emend ALIAS emend_emend)
  set_target_properties(emend_emend PROPERTIES EXPORT_NAME emend)
  target_link_libraries(emend_emend INTERFACE emend_evaluation emend_editors emend_models emend_datasets emend_hparams
                                              emend_hooks emend_devices emend_core)
endfunction()

function(emend_add_program name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS;PRIVATE" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE emend_emend ${ARG_PRIVATE})
  _emend_common(${name})
  set_property(GLOBAL APPEND PROPERTY EMEND_PROGRAMS ${name})
endfunction()

# "programs": what ./quickstart builds, that is all but the tests.
function(emend_add_programs_target)
  get_property(libraries GLOBAL PROPERTY EMEND_LIBRARIES)
  get_property(programs GLOBAL PROPERTY EMEND_PROGRAMS)
  add_custom_target(programs DEPENDS ${libraries} ${programs})
endfunction()

# emend_add_test(error_test LABEL unit SOURCES error_test.cpp DEPENDS core [TIMEOUT 60])
# PROGRAMS names those that the test runs. One executable and one ctest entry; the file's name ends in _test.
function(emend_add_test name)
  cmake_parse_arguments(ARG "" "LABEL;TIMEOUT" "SOURCES;DEPENDS;PRIVATE;PROGRAMS" ${ARGN})
  if(NOT ARG_SOURCES)
    set(ARG_SOURCES ${name}.cpp)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  foreach(dependency IN LISTS ARG_DEPENDS)
    target_link_libraries(${name} PRIVATE emend_${dependency})
  endforeach()
  target_link_libraries(${name} PRIVATE ${ARG_PRIVATE} GTest::gtest GTest::gtest_main)
  target_include_directories(${name} PRIVATE "${CMAKE_SOURCE_DIR}/tests") # "support/…"
  target_compile_definitions(${name} PRIVATE EMEND_SOURCE_DIR="${CMAKE_SOURCE_DIR}"
                                             EMEND_BINARY_DIR="${CMAKE_BINARY_DIR}")
  target_compile_options(${name} PRIVATE ${EMEND_WARNINGS})
  # Definitions differ from the precompiled header's, which GCC accepts as long as no header in it reads them.
  target_precompile_headers(${name} REUSE_FROM emend_pch)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests")
  if(ARG_PROGRAMS)
    add_dependencies(${name} ${ARG_PROGRAMS})
  endif()
  add_test(NAME ${name} COMMAND ${name})
  # A folder of its own for temporary files: two checkouts may be tested at the same time.
  set(_temporary "${CMAKE_BINARY_DIR}/tests/tmp/${name}")
  file(MAKE_DIRECTORY "${_temporary}")
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABEL}" TIMEOUT ${ARG_TIMEOUT} ENVIRONMENT "TEST_TMPDIR=${_temporary}")
endfunction()
