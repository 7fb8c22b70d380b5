#include <emend/editors/registry.h>

#include <iostream>

#include "../edit/options.h"

namespace emend::tools {
namespace {

struct StatsArguments {
  RunOptions edit;
  std::vector<int> layers;
};

int run_stats(const StatsArguments& options, const Common& common) {
  const auto& edit = options.edit;
  const auto model = load_named(edit.model, common);
  auto layers = options.layers;
  if (layers.empty()) {
    const auto raw = workflow::find_hparams(edit.editor, "", {}, model.checkpoint(), &model, common.log);
    layers = editors::make_editor(edit.editor, raw, model, common.log)->statistics_layers();
  }
  const auto statistics = workflow::statistics_provider(edit, common);
  statistics->prepare(model, layers);
  if (common.sharing.first()) std::cout << dump_json(statistics->describe()) << '\n';
  return 0;
}

}  // namespace

VerbRun setup_stats(Options& o) {
  auto& options = o.arguments<StatsArguments>();
  auto& edit = options.edit;
  edit.metrics.cache = kCacheFolder;
  add_model_options(o, edit.model);
  o.add("--layers", &options.layers, "layers; default: those of the editor's preset", {.list = true})
      .add("--editor", &edit.editor, "whose preset names the layers")
      .add("--corpus", &edit.corpus,
           "text file or JSON lines with \"text\"; default: text sampled from the model itself", {.type = "FILE"});
  add_stats_amount_options(o.group(""), edit);
  o.add("--stats-length", &edit.stats_length, "longest document in tokens", {.limits = kPositive})
      .add("--stats-cache", &edit.stats_cache, "folder of cached statistics; default: <cache>/statistics",
           {.type = "DIR"})
      .add("--cache", &edit.metrics.cache, "folder of caches", {.type = "DIR"})
      .add("--seed", &edit.seed, "random seed of sampled text and of the order of documents");
  return [&options](Common& common) { return run_together(common, [&] { return run_stats(options, common); }); };
}

}  // namespace emend::tools
