# Compiles through ccache where it is installed and no other launcher was asked for. Precompiled headers need the two
# sloppiness settings: without them ccache does not store anything that uses one.
find_program(EMEND_CCACHE ccache)
mark_as_advanced(EMEND_CCACHE)
if(EMEND_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env CCACHE_SLOPPINESS=pch_defines,time_macros "${EMEND_CCACHE}")
endif()
