#include <emend/workflow/preflight.h>

#include <iostream>
#include <optional>

#include "../edit/options.h"
#include "../fact_options.h"

namespace emend::tools {
namespace {

struct StatsArguments {
  RunOptions edit;
  std::vector<int> layers;
};

int run_stats(const StatsArguments& options, const Common& common) {
  const auto& edit = options.edit;
  const auto checkpoint = open_named(edit.model);
  workflow::require_layers(options.layers, *checkpoint, "--layers");
  const auto& editor = workflow::chosen_editor(edit);
  std::optional<hparams::RawHparams> raw;
  if (options.layers.empty()) try {
      raw = workflow::find_hparams(editor.name, "", {}, *checkpoint, common.log);
    } catch (const Error& error) {
      if (error.error_class() != ErrorClass::kNotFound) throw;
      throw Error(ErrorClass::kNotFound, {"--layers", "no preset of " + editor.name + " fits this model",
                                          "the layers whose keys are to be read, such as 4,5,6", ""});
    }
  const auto model = load_named(checkpoint, edit.model, common);
  const auto layers = raw ? editor.make(*raw, model, common.log)->statistics_layers() : options.layers;
  workflow::require_same(common.sharing, workflow::statistics_settings(edit));
  const auto statistics = workflow::statistics_provider(edit, common);
  statistics->prepare(model, layers);
  if (common.sharing.first()) std::cout << dump_json(statistics->describe()) << '\n';
  return 0;
}

}  // namespace

VerbRun setup_stats(Options& o) {
  auto& options = o.arguments<StatsArguments>();
  auto& edit = options.edit;
  add_model_options(o, edit.model);
  o.add("--layers", &options.layers, "layers; default: those of the editor's preset",
        {.limits = kNonNegative, .list = true})
      .add("--editor", &edit.editor, "whose preset names the layers", {.type = "NAME", .shown = "memit"})
      .add("--corpus", &edit.corpus,
           "text file or JSON lines with \"text\"; default: text sampled from the model itself", {.type = "FILE"});
  add_stats_amount_options(o.group(""), edit);
  o.add("--stats-length", &edit.stats_length, "longest document in tokens", {.limits = kPositive})
      .add("--stats-cache", &edit.stats_cache, "folder of cached statistics; default: <cache>/statistics",
           {.type = "DIR"});
  add_cache_option(o.group(""), edit.metrics.cache, "folder of caches");
  o.add("--seed", &edit.seed, "random seed of sampled text and of the order of documents");
  o.footer =
      "Example:\n"
      "  emend stats --model DIR --corpus text.jsonl --stats-tokens auto";
  return [&options](Common& common) { return run_together(common, [&] { return run_stats(options, common); }); };
}

}  // namespace emend::tools
