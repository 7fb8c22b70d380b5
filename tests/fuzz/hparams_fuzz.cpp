// Hyper-parameter files, YAML and JSON, through the strict schema, and --set.
#include <emend/hparams/locate.h>
#include <emend/hparams/raw.h>

#include "fuzz.h"

namespace emend::fuzz {

EMEND_FUZZ_TARGET(hparams) {
  expect_error_or_success([&] {
    const auto raw = hparams::parse_hparams(input, "fuzz.yaml");
    for (const auto& entry : raw.entries()) (void)entry.value.show();
    const auto& schema = hparams::locate_schema();
    (void)schema.dump(schema.parse(raw, {})).dump();
  });
  expect_error_or_success([&] {
    hparams::RawHparams raw("fuzz");
    raw.set(input.substr(0, 200));
  });
}

}  // namespace emend::fuzz
