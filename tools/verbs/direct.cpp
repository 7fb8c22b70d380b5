// Directions of behaviour: fitted, taken out of weights, written into them.
#include <emend/core/atomic_file.h>
#include <emend/core/staged.h>
#include <emend/core/text.h>
#include <emend/core/text_table.h>
#include <emend/evaluation/report.h>
#include <emend/workflow/direct/change.h>
#include <emend/workflow/direct/optimise.h>
#include <emend/workflow/save_formats.h>

#include "../packs.h"

namespace emend::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

struct DirectArguments {
  ModelOptions model;
  std::string action, positive, negative, preset, layers, prompts, texts, spare, search_prompts, neutral, out;
  std::vector<std::string> directions, apart_from, scorers, save = {"pack"}, by = {"bake", "ablate"};
  workflow::FitOptions fit;
  workflow::DirectChangeOptions change;
  workflow::EffectOptions effect;
  workflow::OptimiseOptions search;
  std::string health_data;
  bool no_chat = false, no_effect = false, force = false, resume = false;
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
  for (const char* kind : {"length", "loops"}) {
    const std::string name = kind == std::string("length") ? "words" : kind;
    if (std::none_of(effect.scorers.begin(), effect.scorers.end(), [&](const auto& one) { return one.name == name; }))
      effect.scorers.push_back({.name = name, .kind = kind});
  }
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

std::vector<std::vector<int64_t>> texts_of(const std::string& file, const models::Model& model,
                                           const DirectArguments& options) {
  std::vector<std::vector<int64_t>> texts;
  for (const auto& prompt : workflow::read_prompts(file))
    texts.push_back(workflow::prompt_ids(model, prompt, !options.no_chat));
  return texts;
}

// With the texts that the changes are fitted to, where they are to any.
workflow::DirectChangeOptions change_options(const DirectArguments& options, const models::Model& model, bool bakes,
                                             const Common& common) {
  auto change = options.change;
  if (options.spare == "own")
    change.spared = workflow::own_writing(model, 0, common);
  else if (!options.spare.empty())
    change.spared = texts_of(options.spare, model, options);
  if (!options.texts.empty()) {
    change.texts = texts_of(options.texts, model, options);
  } else if (bakes || !change.spared.empty()) {
    change.texts = workflow::answered(model, {}, !options.no_chat, common);
    if (change.spared.empty()) {
      const auto more = workflow::own_writing(model, 0, common);
      change.texts.insert(change.texts.end(), more.begin(), more.end());
    }
  }
  return change;
}

using Many = std::vector<workflow::Directions>;

workflow::DirectChange change_by(const std::string& way, models::Model& model, const Many& directions,
                                 const workflow::DirectChangeOptions& options, const Common& common) {
  return way == "ablate" ? workflow::ablate_directions(model, directions, options, common)
                         : workflow::bake_directions(model, directions, options, common);
}

// Every way with each layer's own direction, and with that of the best layer everywhere.
std::vector<workflow::DirectChange> candidates(const DirectArguments& options, models::Model& model,
                                               const Many& directions, const Common& common) {
  auto change = change_options(options, model, true, common);
  change.strength = 1;
  change.unchanged_keys = workflow::make_direct_keys();
  std::vector<workflow::DirectChange> all;
  for (const auto& way : options.by)
    for (const int from : {-1, directions[0].best}) {
      if (options.change.from_layer < 0) change.from_layer = from;
      all.push_back(change_by(way, model, directions, change, common));
      if (options.change.from_layer >= 0) break;
    }
  return all;
}

workflow::DirectChange optimised(const DirectArguments& options, models::Model& model, const Many& directions,
                                 const workflow::Scorer& scorer, const Common& common, ordered_json& document) {
  const auto changes = candidates(options, model, directions, common);
  auto search = options.search;
  search.scorer = scorer;
  search.prompts =
      options.search_prompts.empty() ? workflow::direct_questions() : workflow::read_prompts(options.search_prompts);
  if (!options.neutral.empty()) search.neutral = workflow::read_prompts(options.neutral);
  search.max_new_tokens = options.effect.max_new_tokens;
  search.chat = !options.no_chat;
  search.most = options.change.strength;
  search.journal = fs::path(options.out) / "trials.jsonl";
  for (const auto& one : directions) search.about.push_back(one.to_json());
  search.about.push_back({options.by, options.layers, options.spare, options.texts, options.change.from_layer,
                          options.change.spare_weight, options.change.preserve_norm});
  fs::create_directories(options.out);
  const auto best = workflow::optimise_strengths(model, changes, search, common);
  auto& found = document["search"] = {{"scorer", scorer.name},
                                      {"before", best.score_before},
                                      {"max_kl", search.max_kl},
                                      {"trials", ordered_json::array()},
                                      {"front", best.front}};
  for (const auto& trial : best.trials) {
    const auto& made = changes[static_cast<size_t>(trial.change)].pack;
    ordered_json one = trial.to_json();
    one["by"] = made.editor;
    one["from_layer"] = made.hparams["from_layer"];
    found["trials"].push_back(one);
  }
  if (!best.chosen)
    throw Error(ErrorClass::kNumeric,
                {"optimise", "no trial whose answers score better at a divergence of " + short_number(search.max_kl),
                 "one at least", "allow more (--max-kl), try more (--trials), or another direction"});
  const auto& chosen = best.trials[static_cast<size_t>(*best.chosen)];
  found["chosen"] = chosen.number;
  auto change = workflow::scaled(changes[static_cast<size_t>(chosen.change)],
                                 [&](const workflow::DirectFigures& weight) { return chosen.at(weight); });
  change.pack.extra["trial"] = chosen.to_json();
  for (const auto& weight : change.figures)
    if (weight.part != models::Part::kAttnOut)
      found["strengths"].push_back({{"layer", weight.layer}, {"strength", chosen.at(weight)}});
  return change;
}

std::string front_text(const ordered_json& search) {
  if (search.is_null()) return "";
  TextTable table({"trial", "by", "strength", "layer", "reach", "divergence", search["scorer"].get<std::string>()});
  for (const int number : search["front"]) {
    const auto& one = search["trials"][static_cast<size_t>(number)];
    table.add({std::to_string(number) + (number == search["chosen"] ? " *" : ""), one["by"].get<std::string>(),
               short_number(one["strength"]), short_number(one["layer"]), short_number(one["reach"]),
               short_number(one["kl"]), short_number(one["score"])});
  }
  return counted(search["trials"].size(), "trial") +
         ", the best of them (* taken); before: " + short_number(search["before"]) + "\n" + table.text();
}

void describe(ordered_json& document, const workflow::DirectChange& change, bool ablated) {
  document["change"] = ordered_json::array();
  document["left"] = ablated ? "left of the direction" : "spread of the share";
  for (const auto& f : change.figures)
    document["change"].push_back(
        {{"layer", f.layer}, {"weight", f.weight}, {"relative_norm", f.relative_norm}, {"left", f.left}});
}

int run_change(const DirectArguments& options, const Common& common) {
  if (options.directions.empty()) refuse(options.action, "no directions", "a folder that emend direct fit wrote");
  Many directions;
  for (const auto& path : options.directions) directions.push_back(workflow::load_directions(path));
  const auto effect = effect_options(options, directions[0].about.value("preset", std::string()));
  auto model = load_named(options.model, common);
  for (const auto& name : options.save)
    if (const auto& format = workflow::save_format(name); format.check) format.check(model, "--save");
  ordered_json document = {{"model", workflow::short_model_name(model.checkpoint())}};
  const bool searched = options.action == "optimise";
  const auto change = searched ? optimised(options, model, directions, effect.scorers[0], common, document)
                               : change_by(options.action, model, directions,
                                           change_options(options, model, options.action == "bake", common), common);
  const bool ablated = change.pack.editor == "ablate";
  describe(document, change, ablated);
  if (!options.no_effect)
    document["effect"] = measured(model, effect, common, [&] {
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
    write_page(staged, document,
               searched  ? "How strongly, and where"
               : ablated ? "A direction taken out"
                         : "A direction written in",
               common);
  });
  document["files"] = written;
  double largest = 0;
  for (const auto& f : change.figures) largest = std::max(largest, f.left);
  common.print(
      document,
      front_text(document.value("search", ordered_json())) + counted(change.figures.size(), "weight") + " changed" +
          (searched ? "\n" : ", " + document["left"].get<std::string>() + " at most " + short_number(largest) + "\n") +
          effect_text(document.value("effect", ordered_json())) + "wrote " +
          join(written, ", ", [](const ordered_json& file) { return file.get<std::string>(); }) + "\n");
  return 0;
}

}  // namespace

VerbRun setup_direct(Options& o) {
  auto& options = o.arguments<DirectArguments>();
  std::vector<std::string> forms;
  for (const auto& format : workflow::save_formats()) forms.push_back(format.name);
  o.add("ACTION", &options.action,
        "fit (find the direction between two sets of prompts), ablate (take it out of what layers write), bake (write "
        "it in), optimise (search how strongly and where)",
        {.choices = {"fit", "ablate", "bake", "optimise"}, .required = true})
      .add("DIR", &options.directions, "ablate, bake, optimise: folders of fit, or control vectors (.gguf), together",
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
           "times the direction; fit: of the steering that is measured; ablate: share taken out; optimise: the most")
      .add("--from-layer", &options.change.from_layer, "ablate, bake: this layer's direction everywhere; -1: its own",
           {.limits = kCountOrAll})
      .add("--preserve-norm", &options.change.preserve_norm, "ablate: columns keep their lengths (full rank)")
      .add("--texts", &options.texts, "bake, --spare: texts whose keys count; default: the model's own answers",
           {.type = "FILE"})
      .add("--spare", &options.spare, "texts that stay as they are (least squares on keys); own: what the model writes",
           {.type = "FILE|own"})
      .add("--spare-weight", &options.change.spare_weight, "of these texts", {.limits = kNonNegative})
      .add("--save", &options.save, join(forms), {.type = "LIST", .choices = forms, .list = true});
  o.group("Optimise")
      .add("--trials", &options.search.trials, "how many", {.limits = {1, 100000}})
      .add("--max-kl", &options.search.max_kl, "of the one that is taken: divergence on neutral texts, nat a token",
           {.limits = kPositive})
      .add("--by", &options.by, "what is tried", {.type = "LIST", .choices = {"bake", "ablate"}, .list = true})
      .add("--raise", &options.search.raise, "a higher score is better")
      .add("--search-prompts", &options.search_prompts,
           "asked in every trial; default: the questions of the presets (--prompts judge what was found)",
           {.type = "FILE"})
      .add("--neutral", &options.neutral, "prompts that are to stay; default: beginnings of what the model writes",
           {.type = "FILE"})
      .add("--seed", &options.search.seed, "of the trials")
      .add("--resume", &options.resume, "go on with the search in --out");
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
      "  emend direct ablate slop --layers 10-20 --out plain --save pack,lora\n"
      "  emend direct optimise slop --spare own --out plain";
  return [&options](Common& common) {
    if (options.resume && options.action != "optimise") refuse("--resume", options.action, "optimise");
    require_new(options.out, options.force || options.resume);
    if (options.action == "optimise" && !options.resume) fs::remove(fs::path(options.out) / "trials.jsonl");
    options.change.layers = parse_layers(options.layers);
    return options.action == "fit" ? run_fit(options, common) : run_change(options, common);
  };
}

}  // namespace emend::tools
