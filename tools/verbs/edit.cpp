#include "../edit/run.h"
#include "../process_group.h"

namespace emend::tools {

VerbRun setup_edit(CLI::App& command) {
  auto options = std::make_shared<EditOptions>();
  add_edit_options(command, *options);
  return [options](Common& common) { return run_together(common, [&] { return run_edit(*options, common); }); };
}

}  // namespace emend::tools
