#include <emend/core/error.h>
#include <emend/workflow/run.h>

#include <iostream>

#include "../edit/options.h"

namespace emend::tools {
namespace {

// 6 where fewer facts are said than --strict (all) or --min-said ask for, 4 if the collapse guard stopped the run.
int run_edit(RunOptions options, Common& common) {
  if (options.model.model.empty()) options.model.model = default_model_path().string();
  workflow::Run run(options, common);
  const bool speaks = common.sharing.first();
  if (options.dry_run) {
    if (speaks) std::cout << dump_json(run.plan()) << '\n';
    return 0;
  }
  run.execute();
  if (speaks) common.print(run.results(), run.summary());
  if (run.stopped()) return exit_code(ErrorClass::kNumeric);
  return run.said_enough() ? 0 : 6;
}

}  // namespace

VerbRun setup_edit(Options& o) {
  auto& options = o.arguments<RunOptions>();
  add_edit_options(o, options);
  return [&options](Common& common) { return run_together(common, [&] { return run_edit(options, common); }); };
}

}  // namespace emend::tools
