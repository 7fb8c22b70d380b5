# Target helpers: one static library a folder, all sharing one precompiled header, and one test executable a label.

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

# Several sources are compiled as one unit: loading the precompiled header and instantiating the same templates are most
# of what a small source costs. Names in anonymous namespaces must differ within a folder; off, each source is its own unit.
option(EMEND_UNITY "Compile several sources of a folder as one unit" ON)
set(EMEND_UNITY_BATCH 10)

# The precompiled header: ATen takes 7 s to parse, 1.3 s when precompiled.
add_library(emend_pch OBJECT "${CMAKE_SOURCE_DIR}/cmake/pch.cpp")
target_link_libraries(emend_pch PRIVATE emend_build_flags)
target_precompile_headers(emend_pch PRIVATE "${CMAKE_SOURCE_DIR}/cmake/pch.h")
target_compile_options(emend_pch PRIVATE ${EMEND_WARNINGS})

function(_emend_common target)
  target_compile_options(${target} PRIVATE ${EMEND_WARNINGS})
  target_precompile_headers(${target} REUSE_FROM emend_pch)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${EMEND_UNITY} UNITY_BUILD_BATCH_SIZE ${EMEND_UNITY_BATCH})
endfunction()

# Appends to the list `sources` one in which `symbol` of `namespace` gives the text of a file.
function(emend_embed sources file namespace symbol)
  set(input "${CMAKE_CURRENT_SOURCE_DIR}/${file}")
  set(output "${CMAKE_CURRENT_BINARY_DIR}/${symbol}.cpp")
  set(script "${CMAKE_SOURCE_DIR}/cmake/embed.cmake")
  add_custom_command(
    OUTPUT "${output}"
    COMMAND "${CMAKE_COMMAND}" "-DINPUT=${input}" "-DOUTPUT=${output}" "-DNAMESPACE=${namespace}"
            "-DSYMBOL=${symbol}" -P "${script}"
    DEPENDS "${input}" "${script}"
    COMMENT "Embedding ${file}"
    VERBATIM)
  set(${sources} ${${sources}} "${output}" PARENT_SCOPE)
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
  target_link_libraries(emend_emend INTERFACE emend_workflow emend_evaluation emend_editors emend_models emend_datasets emend_hparams
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

# emend_add_test(error_test LABEL unit [SOURCES error_test.cpp …] [PRIVATE library …] [PROGRAMS emend …] [TIMEOUT 60] [COST 30])
# A file of tests, <name>.cpp. All files of a label are one executable, which emend_add_test_programs makes; each file is
# a ctest entry of its own, so that `ctest -R name` runs it alone and a crash takes no other file with it. PROGRAMS names
# what the tests start. COST: about how many seconds the longer ones take; the longest begin first, so that all cores end together.
function(emend_add_test name)
  cmake_parse_arguments(ARG "" "LABEL;TIMEOUT;COST" "SOURCES;PRIVATE;PROGRAMS" ${ARGN})
  if(NOT ARG_SOURCES)
    set(ARG_SOURCES ${name}.cpp)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  set(program ${ARG_LABEL}_tests)
  list(TRANSFORM ARG_SOURCES PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/")
  set_property(GLOBAL APPEND PROPERTY EMEND_TEST_LABELS ${ARG_LABEL})
  set_property(GLOBAL APPEND PROPERTY EMEND_TEST_SOURCES_${ARG_LABEL} ${ARG_SOURCES})
  set_property(GLOBAL APPEND PROPERTY EMEND_TEST_LIBRARIES_${ARG_LABEL} ${ARG_PRIVATE})
  set_property(GLOBAL APPEND PROPERTY EMEND_TEST_PROGRAMS_${ARG_LABEL} ${ARG_PROGRAMS})
  # The tests of the file by their full names: suites may be spread over files. tests/unit/every_test_runs.py checks that none is lost.
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${ARG_SOURCES})
  set(filter "")
  foreach(source IN LISTS ARG_SOURCES)
    file(READ "${source}" text)
    string(REGEX MATCHALL "\nTEST(_F|_P)?\\([A-Za-z0-9_]+,[ \n]+[A-Za-z0-9_]+" tests "\n${text}")
    foreach(test IN LISTS tests)
      string(REGEX REPLACE "\nTEST(_F|_P)?\\(([A-Za-z0-9_]+),[ \n]+([A-Za-z0-9_]+)" "\\2.\\3" test "${test}")
      string(APPEND filter "${test}:*/${test}/*:")
    endforeach()
  endforeach()
  add_test(NAME ${name} COMMAND ${program} "--gtest_filter=${filter}")
  # A folder of its own for temporary files: two checkouts may be tested at the same time.
  set(_temporary "${CMAKE_BINARY_DIR}/tests/tmp/${name}")
  file(MAKE_DIRECTORY "${_temporary}")
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABEL}" TIMEOUT ${ARG_TIMEOUT} ENVIRONMENT "TEST_TMPDIR=${_temporary}"
                                          FAIL_REGULAR_EXPRESSION "Running 0 tests")
  if(ARG_COST)
    set_tests_properties(${name} PROPERTIES COST ${ARG_COST})
  endif()
endfunction()

# The executables of the labels, after all emend_add_test.
function(emend_add_test_programs)
  # Precompiled as well: GoogleTest, which every file of tests includes.
  add_library(emend_tests_pch OBJECT "${CMAKE_SOURCE_DIR}/cmake/pch.cpp")
  target_link_libraries(emend_tests_pch PRIVATE emend_build_flags GTest::gtest)
  _emend_test_flags(emend_tests_pch)
  target_precompile_headers(emend_tests_pch PRIVATE "${CMAKE_SOURCE_DIR}/cmake/pch.h" <gtest/gtest.h>)
  # The libraries come before the tests' own objects: of a function that both instantiate (JSON, maps, inline parts of ATen)
  # the linker keeps the one that it meets first, and that of the libraries is optimised.
  get_property(first GLOBAL PROPERTY EMEND_LIBRARIES)
  list(TRANSFORM first REPLACE "(.+)" "$<TARGET_FILE:\\1>")
  list(JOIN first "," first)
  get_property(labels GLOBAL PROPERTY EMEND_TEST_LABELS)
  list(REMOVE_DUPLICATES labels)
  foreach(label IN LISTS labels)
    set(program ${label}_tests)
    get_property(sources GLOBAL PROPERTY EMEND_TEST_SOURCES_${label})
    get_property(libraries GLOBAL PROPERTY EMEND_TEST_LIBRARIES_${label})
    get_property(started GLOBAL PROPERTY EMEND_TEST_PROGRAMS_${label})
    add_executable(${program} ${sources})
    target_link_libraries(${program} PRIVATE emend_tools emend_emend ${libraries} GTest::gtest GTest::gtest_main)
    target_link_options(${program} PRIVATE "LINKER:--whole-archive,$<TARGET_FILE:emend_tools>,${first},--no-whole-archive")
    target_include_directories(${program} PRIVATE "${CMAKE_SOURCE_DIR}/tests") # "support/…"
    _emend_test_flags(${program})
    target_precompile_headers(${program} REUSE_FROM emend_tests_pch)
    set_target_properties(${program} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests"
                                                UNITY_BUILD ${EMEND_UNITY} UNITY_BUILD_BATCH_SIZE ${EMEND_UNITY_BATCH})
    if(started)
      list(REMOVE_DUPLICATES started)
      add_dependencies(${program} ${started})
    endif()
  endforeach()
endfunction()

# Tests are compiled without optimisation: that takes half the time, and most of the time that they run goes into the libraries.
function(_emend_test_flags target)
  target_compile_definitions(${target} PRIVATE EMEND_SOURCE_DIR="${CMAKE_SOURCE_DIR}" EMEND_BINARY_DIR="${CMAKE_BINARY_DIR}")
  target_compile_options(${target} PRIVATE ${EMEND_WARNINGS} $<$<CONFIG:Release>:-O0>)
endfunction()
