// eval-fixture and eval-editor-fixture: checks against folders of recorded numbers.
#include <emend/editors/fixture.h>
#include <emend/models/fixture.h>

#include <iostream>

#include "../cli.h"
#include "../run_directory.h"

namespace emend::tools {

VerbRun setup_eval_fixture(CLI::App& command) {
  auto folder = std::make_shared<std::string>();
  command.add_option("DIR", *folder, "folder with a tiny checkpoint and expected.safetensors")
      ->required()
      ->type_name("DIR");
  return [folder](Common& common) {
    const nlohmann::ordered_json document = models::eval_fixture(*folder);
    std::cout << dump_json(document, common.json ? -1 : 2) << '\n';
    return 0;
  };
}

VerbRun setup_eval_editor_fixture(CLI::App& command) {
  struct Options {
    std::string folder, engine = "fast";
  };
  auto options = std::make_shared<Options>();
  command.add_option("DIR", options->folder, "folder with models, facts and expected.MODEL.EDITOR.safetensors")
      ->required()
      ->type_name("DIR");
  command.add_option("--engine", options->engine, "fast or reference")->check(CLI::IsMember({"fast", "reference"}));
  return [options](Common& common) {
    const nlohmann::ordered_json document =
        editors::eval_editor_fixture(options->folder, editors::parse_engine(options->engine), common.log);
    std::cout << dump_json(document, common.json ? -1 : 2) << '\n';
    return 0;
  };
}

}  // namespace emend::tools
