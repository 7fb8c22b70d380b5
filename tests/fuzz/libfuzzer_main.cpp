// The entry point that libFuzzer calls.
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  emend::fuzz::targets().front().run({reinterpret_cast<const char*>(data), size});
  return 0;
}
