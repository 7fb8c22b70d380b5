// config.json of every family: the text becomes a configuration and its table of tensors, or an error with the key.
#include <emend/core/json.h>
#include <emend/models/config.h>
#include <emend/models/detail/hf_checkpoint.h>
#include <emend/models/family.h>

#include "fuzz.h"

namespace emend::fuzz {

EMEND_FUZZ_TARGET(config) {
  expect_error_or_success([&] {
    const auto json = parse_json(input, "config.json");
    const auto config = models::parse_config(json, "config.json");
    if (config.n_layers > 256) return;
    for (const auto& tensor : models::expected_tensors(models::family_named(config.family), config))
      if (tensor.name.empty()) std::abort();
  });
}

}  // namespace emend::fuzz
