// Directions of behaviour: fitted, taken out of weights, written into them.
#include <emend/core/atomic_file.h>
#include <emend/core/staged.h>
#include <emend/core/text.h>
#include <emend/core/text_table.h>
#include <emend/evaluation/report.h>
#include <emend/workflow/direct/change.h>
#include <emend/workflow/direct/effect.h>
#include <emend/workflow/save_formats.h>

#include "../packs.h"

namespace emend::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

struct DirectArguments {
  ModelOptions model;
  std::string action, positive, negative, preset, layers, prompts, texts, out;
  std::vector<std::string> directions, apart_from, scorers, save = {"pack"};
  workflow::FitOptions fit;
  workflow::DirectChangeOptions change;
  workflow::EffectOptions effect;
  std::string health_data;
  bool no_chat = false, no_effect = false, force = false;
};

[[noreturn]] void refuse(const std::string& where, const std::string& got, const std::string& expected) {
  throw Error(ErrorClass::kInvalidArgument, {where, got, expected, ""});
}

// What the answers are asked and scored by; the preset's unless files are named.
workflow::EffectOptions effect_options(const DirectArguments& options, const std::string& preset) {
  auto effect = options.effect;
  effect.chat = !options.no_chat;
  effect.health_data = options.health_data;
  effect.prompts = options.prompts.empty() ? workflow::direct_test_prompts() : workflow::read_prompts(options.prompts);
  for (const auto& file : options.scorers) effect.scorers.push_back(workflow::read_scorer(file));
  if (effect.scorers.empty() && !preset.empty()) effect.scorers.push_back(workflow::direct_preset(preset).scorer);
  if (effect.scorers.empty()) effect.scorers.push_back({.name = "words", .kind = "length"});
  return effect;
}

// Before, and after while what `change` returns lives.
ordered_json measured(const models::Model& model, const workflow::EffectOptions& options, const Common& common,
                      const std::function<std::shared_ptr<void>()>& change) {
  const auto before = workflow::read_effect(model, options, common);
  const auto changed = change();
  return workflow::compare_effects(before, workflow::read_effect(model, options, common), options);
}

std::string effect_text(const ordered_json& effect) {
  if (effect.is_null()) return "";
  TextTable table({"effect", "before", "after"});
  for (const auto& [name, one] : effect["scores"].items())
    table.add({name, short_number(one["before"]), short_number(one["after"])});
  if (effect.contains("health"))
    for (const auto& [name, value] : effect["health"]["before"].items())
      if (value.is_number()) table.add({name, short_number(value), short_number(effect["health"]["after"][name])});
  return table.text() + "neutral texts: divergence " + short_number(effect["neutral_kl"]) + " nat a token, " +
         percent(effect["neutral_tokens_kept"].get<double>() / 100) + " of the tokens kept\n";
}

void write_page(const fs::path& folder, const ordered_json& document, const std::string& title, const Common& common) {
  ordered_json page = document;
  page["title"] = title;
  page["command"] = command_text(common.command_line);
  write_file(folder / "report.html", evaluation::direction_page(nlohmann::json(page)));
}

int run_fit(const DirectArguments& options, const Common& common) {
  const bool files = !options.positive.empty() && !options.negative.empty();
  if (!options.directions.empty()) refuse("fit", "a folder of directions", "prompts");
  if (files == !options.preset.empty() || options.positive.empty() != options.negative.empty())
    refuse("fit", "no pair of prompt files, or more", "--positive FILE and --negative FILE, or --preset NAME");
  auto fit = options.fit;
  fit.chat = !options.no_chat;
  for (const auto& path : options.apart_from) fit.apart_from.push_back(workflow::load_directions(path));
  const auto preset = files ? workflow::DirectPreset{.positive = workflow::read_prompts(options.positive),
                                                     .negative = workflow::read_prompts(options.negative)}
                            : workflow::direct_preset(options.preset);
  const auto model = load_named(options.model, common);
  auto directions = workflow::fit_directions(model, preset.positive, preset.negative, fit, common);
  directions.about["preset"] = options.preset;
  auto vector = directions.control_vector(options.change.layers);
  vector.layers.erase(0);  // the format has none
  const int best = std::max(1, directions.best);
  const auto steered = options.layers.empty() ? models::LayerRange{best, best} : options.change.layers;
  ordered_json document = {{"model", directions.model}, {"fit", directions.to_json()}};
  if (!options.no_effect)
    document["effect"] = measured(model, effect_options(options, options.preset), common, [&] {
      return std::make_shared<models::Steering>(model, vector, options.change.strength, steered);
    });
  write_whole(options.out, [&](const fs::path& staged) {
    fs::create_directory(staged);
    models::write_control_vector(staged / "direction.gguf", vector);
    workflow::save_directions(staged / "direction.safetensors", directions);
    write_page(staged, document, "A direction of behaviour", common);
  });
  TextTable table({"layer", "accuracy", "auc", "distance", "size"});
  for (size_t l = 0; l < directions.separation.size(); ++l) {
    const auto& s = directions.separation[l];
    table.add({std::to_string(l), percent(s.accuracy / 100), percent(s.auc / 100), short_number(s.effect),
               short_number(s.size)});
  }
  document["files"] = {options.out + "/direction.gguf", options.out + "/direction.safetensors",
                       options.out + "/report.html"};
  common.print(document, table.text() + "best layer " + std::to_string(directions.best) + "\n" +
                             effect_text(document.value("effect", ordered_json())) + "wrote " + options.out + "\n");
  return 0;
}

workflow::DirectChange change_of(const DirectArguments& options, models::Model& model,
                                 const std::vector<workflow::Directions>& directions, const Common& common) {
  auto change = options.change;
  if (options.action == "ablate") return workflow::ablate_directions(model, directions, change, common);
  if (options.texts.empty()) {
    change.texts = workflow::neutral_texts(model, common);
  } else {
    for (const auto& prompt : workflow::read_prompts(options.texts))
      change.texts.push_back(workflow::prompt_ids(model, prompt, !options.no_chat));
  }
  return workflow::bake_directions(model, directions, change, common);
}

int run_change(const DirectArguments& options, const Common& common) {
  if (options.directions.empty()) refuse(options.action, "no directions", "a folder that emend direct fit wrote");
  std::vector<workflow::Directions> directions;
  for (const auto& path : options.directions) directions.push_back(workflow::load_directions(path));
  auto model = load_named(options.model, common);
  for (const auto& name : options.save)
    if (const auto& format = workflow::save_format(name); format.check) format.check(model, "--save");
  const auto change = change_of(options, model, directions, common);
  ordered_json document = {{"model", workflow::short_model_name(model.checkpoint())},
                           {"change", ordered_json::array()},
                           {"left", options.action == "ablate" ? "left of the direction" : "spread of the share"}};
  for (const auto& f : change.figures)
    document["change"].push_back(
        {{"layer", f.layer}, {"weight", f.weight}, {"relative_norm", f.relative_norm}, {"left", f.left}});
  const std::string preset = directions[0].about.value("preset", std::string());
  if (!options.no_effect)
    document["effect"] = measured(model, effect_options(options, preset), common, [&] {
      return std::shared_ptr<editors::EditTransaction>(editors::apply_pack(model, change.pack));
    });
  auto written = ordered_json::array();
  write_whole(options.out, [&](const fs::path& staged) {
    fs::create_directory(staged);
    for (const auto& name : options.save) {
      const auto& format = workflow::save_format(name);
      (void)format.write({.model = model, .pack = change.pack, .out = staged / format.file, .lent = common});
      written.push_back((fs::path(options.out) / format.file).string());
    }
    write_page(staged, document, options.action == "ablate" ? "A direction taken out" : "A direction written in",
               common);
  });
  document["files"] = written;
  double largest = 0;
  for (const auto& f : change.figures) largest = std::max(largest, f.left);
  common.print(document, counted(change.figures.size(), "weight") + " changed, " + document["left"].get<std::string>() +
                             " at most " + short_number(largest) + "\n" +
                             effect_text(document.value("effect", ordered_json())) + "wrote " +
                             join(written, ", ", [](const ordered_json& file) { return file.get<std::string>(); }) +
                             "\n");
  return 0;
}

}  // namespace

VerbRun setup_direct(Options& o) {
  auto& options = o.arguments<DirectArguments>();
  std::vector<std::string> forms;
  for (const auto& format : workflow::save_formats()) forms.push_back(format.name);
  o.add("ACTION", &options.action,
        "fit (find the direction between two sets of prompts), ablate (take it out of what layers write), bake (write "
        "it in)",
        {.choices = {"fit", "ablate", "bake"}, .required = true})
      .add("DIR", &options.directions, "ablate, bake: folders of fit, or control vectors (.gguf), together",
           {.type = "DIR"})
      .add("--out", &options.out, "folder to write", {.type = "DIR", .required = true})
      .add("--force", &options.force, "replace --out");
  add_model_options(o, options.model);
  o.group("Fit")
      .add("--positive", &options.positive, "prompts with the behaviour: one a line, or JSON lines", {.type = "FILE"})
      .add("--negative", &options.negative, "prompts without it", {.type = "FILE"})
      .add("--preset", &options.preset, "a contrast that comes with emend: " + join(workflow::direct_preset_names()),
           {.type = "NAME"})
      .add("--method", &options.fit.method, "difference of means, first principal component, logistic probe",
           {.choices = {"mean", "pca", "probe"}})
      .add("--folds", &options.fit.folds, "of the cross-validation", {.limits = {2, 100}})
      .add("--apart-from", &options.apart_from, "folder of a direction that the new one gets no share of (repeatable)",
           {.type = "DIR"})
      .add("--no-chat", &options.no_chat, "prompts as they are, without the chat template");
  add_layers_option(o.group("Strength"), options.layers,
                    "A-B, both included, from 0; default: all (fit measures the best)")
      .add("--strength", &options.change.strength,
           "times the direction; fit: of the steering that is measured; ablate: share taken out")
      .add("--from-layer", &options.change.from_layer, "ablate, bake: this layer's direction everywhere; -1: its own")
      .add("--preserve-norm", &options.change.preserve_norm, "ablate: columns keep their lengths (full rank)")
      .add("--texts", &options.texts, "bake: texts whose keys count; default: the model's own continuations",
           {.type = "FILE"})
      .add("--save", &options.save, join(forms), {.type = "LIST", .choices = forms, .list = true});
  o.group("Effect")
      .add("--prompts", &options.prompts, "asked before and after; default: questions that come with emend",
           {.type = "FILE"})
      .add("--scorer", &options.scorers, "scorer of the answers (docs/directions.md); default: the preset's",
           {.type = "FILE"})
      .add("--max-new-tokens", &options.effect.max_new_tokens, "of an answer", {.limits = kPositive})
      .add("--health-data", &options.health_data, "folder of the health metric's files", {.type = "DIR"})
      .add("--no-effect", &options.no_effect, "measure nothing");
  o.footer =
      "Examples\n"
      "  emend direct fit --preset slop --out slop\n"
      "  emend generate --control-vector slop/direction.gguf --strength -0.2 --layers 10-20 --prompt 'The old town'\n"
      "  emend direct ablate slop --layers 10-20 --out plain --save pack,lora";
  return [&options](Common& common) {
    require_new(options.out, options.force);
    options.change.layers = parse_layers(options.layers);
    return options.action == "fit" ? run_fit(options, common) : run_change(options, common);
  };
}

}  // namespace emend::tools
