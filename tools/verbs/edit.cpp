#include <emend/core/error.h>
#include <emend/workflow/run.h>

#include <iostream>

#include "../edit/options.h"

namespace emend::tools {

// 6 where fewer facts are said than --strict (all) or --min-said ask for, 4 if the collapse guard stopped the run.
static int run_edit(RunOptions options, Common& common) {
  if (options.model.model.empty()) options.model.model = default_model_path().string();
  if (options.facts.file.empty())
    refuse({"--resume", (options.out.empty() ? "no --out" : options.out + " holds no run that was interrupted"),
            "the folder of a run that finished at least one batch", "name it with --out, or give --facts"});
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

VerbRun setup_edit(Options& o) {
  auto& options = o.arguments<RunOptions>();
  add_edit_options(o, options);
  o.footer =
      "Examples:\n"
      "  memit_edit --facts facts.json --out run\n"
      "  memit_edit --model DIR --facts facts.json --save pack,model --out run\n"
      "  memit_edit --facts facts.json --editor rome --set v_lr=0.2 --dry-run";
  o.earlier = [&options] {
    return options.resume ? workflow::RunCheckpoint::command_of(options.out) : std::vector<std::string>();
  };
  return [&options](Common& common) { return run_together(common, [&] { return run_edit(options, common); }); };
}

}  // namespace emend::tools
