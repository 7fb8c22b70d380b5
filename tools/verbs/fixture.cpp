// eval-fixture and eval-editor-fixture: checks against folders of recorded numbers.
#include <emend/models/placing.h>

#include <iostream>

#include "../../tests/oracle/editor_fixture.h"
#include "../../tests/oracle/model_fixture.h"
#include "../cli.h"

namespace emend::tools {
namespace {

struct FixtureArguments {
  std::string folder, engine = "fast", device_map = "cpu";
};

void add_device_map(Options& o, FixtureArguments& options) {
  o.add("--device-map", &options.device_map, "as in emend edit: cpu, cuda:0, sim:K, auto or a file", {.type = "MAP"});
}

int print_fixture(const nlohmann::ordered_json& document, const Common& common) {
  std::cout << dump_json(document, common.json ? -1 : 2) << '\n';
  return 0;
}

}  // namespace

VerbRun setup_eval_fixture(Options& o) {
  auto& options = o.arguments<FixtureArguments>();
  o.add("DIR", &options.folder, "folder with a tiny checkpoint and expected.safetensors",
        {.type = "DIR", .required = true});
  add_device_map(o, options);
  return [&options](Common& common) {
    const models::PlaceOptions where{.device_map = options.device_map, .log = common.log};
    models::LoadOptions load;
    load.place = [&](const auto& config, const auto&) { return models::place_model(where, config); };
    return print_fixture(models::eval_fixture(options.folder, load), common);
  };
}

VerbRun setup_eval_editor_fixture(Options& o) {
  auto& options = o.arguments<FixtureArguments>();
  o.add("DIR", &options.folder, "folder with models, facts and expected.MODEL.EDITOR.safetensors",
        {.type = "DIR", .required = true})
      .add("--engine", &options.engine, "fast or reference", {.choices = {"fast", "reference"}});
  add_device_map(o, options);
  return [&options](Common& common) {
    const auto engine = editors::parse_engine(options.engine);
    return print_fixture(editors::eval_editor_fixture(options.folder, engine, common.log, {}, options.device_map),
                         common);
  };
}

}  // namespace emend::tools
