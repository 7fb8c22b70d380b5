# cmake -DBUILD=… -DPREFIX=… -DLIBDIR=lib "-DPROGRAMS=emend;memit_edit" -P install.cmake: a fresh installation, and a look at what it must hold.
file(REMOVE_RECURSE "${PREFIX}")
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${PREFIX}" OUTPUT_QUIET RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "cmake --install failed (${failed}); is everything built?")
endif()
foreach(name include/emend/core/error.h ${LIBDIR}/libemend_core.a ${LIBDIR}/cmake/emend/emendConfig.cmake
             ${LIBDIR}/cmake/emend/emendTargets.cmake ${LIBDIR}/cmake/emend/emendConfigVersion.cmake
             share/bash-completion/completions/emend share/zsh/site-functions/_emend share/fish/vendor_completions.d/emend.fish
             share/man/man1/emend.1 share/man/man1/emend-edit.1 share/man/man1/memit_edit.1)
  if(NOT EXISTS "${PREFIX}/${name}")
    message(SEND_ERROR "${PREFIX}: no ${name}")
  endif()
endforeach()
file(GLOB_RECURSE private "${PREFIX}/include/*/detail/*")
if(private)
  message(SEND_ERROR "private headers were installed: ${private}")
endif()
if(NOT PROGRAMS)
  message(SEND_ERROR "the project has no programs")
endif()
# From another folder than the one they were installed into.
file(REMOVE_RECURSE "${PREFIX}-moved")
file(COPY "${PREFIX}/bin" DESTINATION "${PREFIX}-moved")
foreach(program IN LISTS PROGRAMS)
  execute_process(COMMAND "${PREFIX}-moved/bin/${program}" --version WORKING_DIRECTORY / RESULT_VARIABLE failed
                  OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(failed)
    message(SEND_ERROR "the installed ${program} does not start: ${failed} ${output}")
  endif()
endforeach()
file(REMOVE_RECURSE "${PREFIX}-moved")
