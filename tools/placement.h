// --device-map, --max-memory and --dtype as models/placing.h takes them.
#pragma once

#include <emend/models/placing.h>

#include "model_options.h"

namespace emend::tools {

[[nodiscard]] models::PlaceOptions place_options(const ModelOptions& options, const Log& log = {});

}  // namespace emend::tools
