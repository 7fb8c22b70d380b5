# Installation: libraries, headers, programs, and a package file for find_package(emend).
include(CMakePackageConfigHelpers)
get_property(_libraries GLOBAL PROPERTY EMEND_LIBRARIES)
install(TARGETS ${_libraries} emend_emend emend_build_flags EXPORT emendTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
foreach(folder core devices hparams datasets hooks models editors evaluation)
  install(DIRECTORY ${folder}/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/emend/${folder}
          FILES_MATCHING PATTERN "*.h" PATTERN "*.def" PATTERN "detail" EXCLUDE)
endforeach()
