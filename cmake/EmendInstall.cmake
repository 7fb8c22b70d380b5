# Installation: libraries, headers, programs, and a package file for find_package(emend).
include(CMakePackageConfigHelpers)
set(_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/emend")
get_property(_libraries GLOBAL PROPERTY EMEND_LIBRARIES)
get_property(_programs GLOBAL PROPERTY EMEND_PROGRAMS)

# Installed programs look for shared libraries beside themselves (a bundle) and where the build found them. The latter is
# said in so many words: CMake leaves folders inside the source tree, such as .venv, out of its own list.
if(_programs)
  get_filename_component(_libtorch_lib "${LIBTORCH_CPU_LIBRARY}" DIRECTORY)
  get_filename_component(_ggml_lib "${GGML_BASE_LIBRARY}" DIRECTORY)
  set_target_properties(${_programs} PROPERTIES INSTALL_RPATH
                                                "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};$ORIGIN/../lib/emend;${_libtorch_lib};${_ggml_lib}")
  # The older kind of search path also serves the libraries of a library (spdlog's fmt): the same programs do in a bundle.
  foreach(program IN LISTS _programs)
    target_link_options(${program} PRIVATE -Wl,--disable-new-dtags)
  endforeach()
  install(TARGETS ${_programs} RUNTIME_DEPENDENCY_SET emend_runtime RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})

  # A bundle: the programs and the small shared libraries, for machines without these packages.
  #   cmake --install build/release --component bundle --prefix DIR
  # -DEMEND_BUNDLE=ON makes these libraries a part of every installation.
  # All but LibTorch (1 GB; LD_LIBRARY_PATH names it on the other machine) and what every Linux system has.
  if(EMEND_BUNDLE)
    set(_unless_asked "")
  else()
    set(_unless_asked EXCLUDE_FROM_ALL)
  endif()
  install(TARGETS ${_programs} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT bundle EXCLUDE_FROM_ALL)
  # cmake-format: off
  install(RUNTIME_DEPENDENCY_SET emend_runtime
          PRE_EXCLUDE_REGEXES "^ld-linux" "^lib(c|m|dl|rt|pthread|util|gcc_s|stdc\\+\\+|gomp|torch.*|c10.*|cud.*|cu.*|nv.*|nccl)\\.so"
          POST_EXCLUDE_REGEXES "/torch/lib/" "/nvidia/"
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT bundle ${_unless_asked})

  # Completion and man pages, as the program writes them.
  file(STRINGS tools/verbs.def _verbs REGEX "^EMEND_VERB\\(")
  list(TRANSFORM _verbs REPLACE "^[^\"]*\"([a-z0-9-]+)\".*" "\\1")
  install(CODE "set(program [[${CMAKE_BINARY_DIR}/bin/emend]])\nset(verbs ${_verbs})" ALL_COMPONENTS)
  install(SCRIPT cmake/install_pages.cmake ALL_COMPONENTS)

  # A Debian package of the programs: cpack --config build/release/CPackConfig.cmake. Debian's own libraries are what it depends on; the
  # others, LibTorch's part for the processor among them, are in it.
  install(TARGETS ${_programs} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT debian EXCLUDE_FROM_ALL)
  install(RUNTIME_DEPENDENCY_SET emend_runtime
          PRE_EXCLUDE_REGEXES "^ld-linux" "^lib(c|m|dl|rt|pthread|util|gcc_s|stdc\\+\\+)\\.so"
          POST_EXCLUDE_REGEXES "^(/usr)?/lib/"
          LIBRARY DESTINATION lib/emend COMPONENT debian EXCLUDE_FROM_ALL)
  # cmake-format: on
  set(CPACK_GENERATOR DEB)
  set(CPACK_PACKAGE_CONTACT "the owner of this repository")
  set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
  set(CPACK_COMPONENTS_ALL debian)
  set(CPACK_COMPONENTS_GROUPING ALL_COMPONENTS_IN_ONE)
  set(CPACK_DEB_COMPONENT_INSTALL ON)
  set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS "${_libtorch_lib}" "${_ggml_lib}")
  include(CPack)
endif()

install(TARGETS ${_libraries} emend_emend emend_build_flags
        EXPORT emendTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        OBJECTS DESTINATION ${CMAKE_INSTALL_LIBDIR}/emend)
install(EXPORT emendTargets NAMESPACE emend:: DESTINATION ${_package_dir})

# Public headers; those in detail/ stay private.
foreach(folder core devices hparams datasets hooks models editors evaluation workflow)
  file(GLOB_RECURSE _headers RELATIVE "${CMAKE_SOURCE_DIR}" CONFIGURE_DEPENDS "${folder}/*.h" "${folder}/*.def")
  list(FILTER _headers EXCLUDE REGEX "/detail/")
  foreach(header IN LISTS _headers)
    get_filename_component(_folder "${header}" DIRECTORY)
    install(FILES "${header}" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/emend/${_folder}")
  endforeach()
endforeach()

get_filename_component(EMEND_LIBTORCH_HINT "${LIBTORCH_INCLUDE_DIR}" DIRECTORY)
get_filename_component(EMEND_GGML_HINT "${GGML_INCLUDE_DIR}" DIRECTORY)
configure_package_config_file(cmake/emendConfig.cmake.in "${CMAKE_BINARY_DIR}/emendConfig.cmake"
                              INSTALL_DESTINATION ${_package_dir})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file("${CMAKE_BINARY_DIR}/emendConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_BINARY_DIR}/emendConfig.cmake" "${CMAKE_BINARY_DIR}/emendConfigVersion.cmake"
              cmake/EmendDependencies.cmake cmake/FindLibTorch.cmake cmake/FindGgml.cmake DESTINATION ${_package_dir})
