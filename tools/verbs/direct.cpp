// Directions of behaviour: fitted, steered by, taken out of weights, written into them.
#include <emend/workflow/direct/job.h>

#include "../model_options.h"

namespace emend::tools {

VerbRun setup_direct(Options& o) {
  struct Arguments {
    ModelOptions model;
    workflow::DirectOptions direct;
  };
  auto& options = o.arguments<Arguments>();
  add_model_options(o, options.model);
  workflow::declare_direct(o, options.direct);
  o.footer =
      "Examples\n"
      "  emend direct fit --preset slop --out slop\n"
      "  emend generate --control-vector slop/direction.gguf --strength -0.2 --layers 10-20 --prompt 'The old town'\n"
      "  emend direct ablate slop --layers 10-20 --out plain --save pack,lora\n"
      "  emend direct optimise slop --spare own --out plain";
  return [&options](Common& common) {
    const workflow::DirectJob job(options.direct);
    auto model = load_named(options.model, common);
    const auto result = job.run(model, common);
    common.print(result.document, result.text);
    return 0;
  };
}

}  // namespace emend::tools
