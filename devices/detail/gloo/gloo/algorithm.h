// LibTorch ships c10d's header for Gloo, which includes Gloo's own headers, but not those. The files in this folder
// declare the few names that it needs; the definitions are inside libtorch_cpu.so. Only collectives.cpp may see them.
#pragma once
