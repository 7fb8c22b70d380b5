// The safetensors reader: every tensor that it offers can be read to its last byte.
#include <emend/core/safetensors.h>

#include "fuzz.h"

namespace emend::fuzz {

EMEND_FUZZ_TARGET(safetensors) {
  const MemoryFile file(input);
  expect_error_or_success([&] {
    const SafetensorsFile opened(file.path());
    unsigned sum = 0;
    for (const auto& [name, info] : opened.tensors()) {
      const at::Tensor tensor = opened.tensor(name);
      const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
      for (size_t i = 0; i < tensor.nbytes(); ++i) sum += bytes[i];
    }
    if (sum == 0xdeadbeef) std::puts("");  // the reads must not be optimised away
  });
}

}  // namespace emend::fuzz
