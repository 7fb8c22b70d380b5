#include "placement.h"

namespace emend::tools {

models::PlaceOptions place_options(const ModelOptions& options, const Log& log) {
  return {options.device_map, options.max_memory, parse_dtype(options.dtype, "--dtype"), log};
}

}  // namespace emend::tools
