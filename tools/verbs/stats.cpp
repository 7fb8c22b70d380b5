#include <emend/core/error.h>
#include <emend/editors/registry.h>

#include <iostream>

#include "../edit/inputs.h"
#include "../process_group.h"
#include "../run_directory.h"
#include "../statistics_options.h"

namespace emend::tools {

VerbRun setup_stats(CLI::App& command) {
  auto options = std::make_shared<EditOptions>();
  auto layers = std::make_shared<std::vector<int>>();
  add_model_options(command, options->model);
  command.add_option("--layers", *layers, "layers; default: those of the editor's preset")->delimiter(',');
  command.add_option("--editor", options->editor, "whose preset names the layers");
  command
      .add_option("--corpus", options->corpus,
                  "text file or JSON lines with \"text\"; default: text sampled from the model itself")
      ->type_name("FILE");
  add_stats_amount_options(command, options->stats_tokens, options->stats_import, "");
  command.add_option("--stats-length", options->stats_length, "longest document in tokens")->check(CLI::PositiveNumber);
  command.add_option("--stats-cache", options->stats_cache, "folder of cached statistics; default: <cache>/statistics")
      ->type_name("DIR");
  command.add_option("--cache", options->metrics.cache, "folder of caches")->type_name("DIR");
  command.add_option("--seed", options->seed, "random seed of sampled text and of the order of documents");
  return [options, layers](Common& common) {
    return run_together(common, [&] {
      const auto model = load_named(options->model, common);
      if (layers->empty()) {
        const auto raw = editor_hparams(options->editor, "", {}, model.checkpoint(), &model, common);
        *layers = editors::make_editor(options->editor, raw, model, common.log)->statistics_layers();
      }
      const auto statistics = statistics_provider(*options, common);
      statistics->prepare(model, *layers);
      nlohmann::ordered_json document = statistics->describe();
      if (common.sharing.first()) std::cout << dump_json(document) << '\n';
      return 0;
    });
  };
}

}  // namespace emend::tools
