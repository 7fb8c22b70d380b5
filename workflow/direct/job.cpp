#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/core/setting.h>
#include <emend/core/sha256.h>
#include <emend/core/staged.h>
#include <emend/core/text.h>
#include <emend/editors/packs/ledger.h>
#include <emend/editors/packs/runtime.h>
#include <emend/evaluation/report.h>
#include <emend/models/checkpoint.h>
#include <emend/models/config.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/workflow/changes.h>
#include <emend/workflow/direct/job.h>
#include <emend/workflow/inputs.h>
#include <emend/workflow/packs.h>
#include <emend/workflow/preflight.h>
#include <emend/workflow/run_directory.h>
#include <emend/workflow/save_formats.h>

#include <algorithm>
#include <map>
#include <set>

namespace emend::workflow {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

// What the answers are asked and scored by; the preset's unless files are named.
void settle_effect(DirectOptions& options, const DirectPreset& preset) {
  auto& effect = options.effect;
  effect.chat = options.search.chat = options.fit.chat = !options.no_chat;
  effect.health_data = options.health_data;
  effect.prompts = options.prompts.empty() ? preset.test_prompts : read_prompts(options.prompts);
  for (const auto& file : options.scorers) effect.scorers.push_back(read_scorer(file));
  if (effect.scorers.empty() && !preset.name.empty()) effect.scorers.push_back(preset.scorer);
  std::set<std::string> names;
  for (const auto& one : effect.scorers)
    if (!names.insert(one.name).second)
      refuse({setting("scorer"), "two scorers called \"" + one.name + "\"", "a name each", "rename one"});
  for (const char* kind : {"length", "loops", "entropy"}) {
    const std::string name = kind == std::string("length") ? "words" : kind;
    const auto same = std::ranges::find(effect.scorers, name, &Scorer::name);
    if (same == effect.scorers.end())
      effect.scorers.push_back({.name = name, .kind = kind});
    else if (same->kind != kind)
      refuse({setting("scorer"), "a scorer of kind " + same->kind + " called \"" + name + "\"",
              "another name: this one is the figure of kind " + std::string(kind) + ", which is always shown",
              "rename it"});
  }
}

std::string content_of(const std::vector<ContrastPrompt>& prompts) {
  auto all = ordered_json::array();
  for (const auto& one : prompts) all.push_back({one.system, one.prompt, one.reply});
  return sha256_hex(all.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
}

// What a change writes, so that an earlier one's does not stay beside it. The direction, which it may read, does.
bool is_product(const std::string& name) {
  return name == "report.html" || name == "trials.jsonl" ||
         std::ranges::any_of(save_formats(), [&](const SaveFormat& format) { return format.file == name; });
}

std::string layers_text(const Directions& directions) {
  TextTable table({"layer", "accuracy", "auc", "distance", "size"});
  for (size_t l = 0; l < directions.separation.size(); ++l) {
    const auto& s = directions.separation[l];
    table.add({std::to_string(l), percent(s.accuracy / 100), percent(s.auc / 100), short_number(s.effect),
               short_number(s.size)});
  }
  return table.text() + "best layer " + std::to_string(directions.best) + "\n";
}

std::string front_text(const ordered_json& search) {
  if (search.is_null()) return "";
  TextTable table({"trial", "by", "strength", "layer", "reach", "divergence", search["scorer"].get<std::string>()});
  for (const int number : search["front"]) {
    const auto& one = search["trials"][number];
    table.add({std::to_string(number) + (number == search["chosen"] ? " *" : ""), one["by"].get<std::string>(),
               short_number(one["strength"]), short_number(one["layer"]), short_number(one["reach"]),
               short_number(one["kl"]), short_number(one["score"])});
  }
  return counted(search["trials"].size(), "trial") +
         ", the best of them (* taken); before: " + short_number(search["before"]) + "\n" + table.text();
}

void write_page(const fs::path& folder, const ordered_json& document, const std::string& title, const Handles& lent) {
  ordered_json page = document;
  page["title"] = title;
  page["command"] = command_text(lent.command_line);
  write_file(folder / "report.html", evaluation::direction_page(nlohmann::json(page)));
}

// A figure that sums the change up, and says what it is.
std::string describe(ordered_json& document, const DirectChange& change) {
  const bool ablated = change.pack.editor == "ablate";
  document["change"] = ordered_json::array();
  if (!change.figures.empty()) document["left"] = ablated ? "left of the direction" : "spread of the share";
  double largest = 0;
  for (const auto& f : change.figures) {
    document["change"].push_back(
        {{"layer", f.layer}, {"weight", f.weight}, {"relative_norm", f.relative_norm}, {"left", f.left}});
    largest = std::max(largest, f.left);
  }
  if (!change.pack.runtime.empty()) return counted(change.pack.runtime.size(), "direction") + " beside the weights\n";
  return counted(change.figures.size(), "weight") + " changed" +
         (document.contains("search")
              ? "\n"
              : ", " + document["left"].get<std::string>() + " at most " + short_number(largest) + "\n");
}

// For people; to add is the plain way.
std::string steering_text(const models::SteerOptions& steer) {
  std::string how = steer.by == "add" ? "" : steer.by;
  if (steer.decay > 0)
    append_item(how, "falling to nothing over " + counted(static_cast<size_t>(steer.decay), "token"));
  return "steering with strength " + short_number(steer.strength) + (how.empty() ? "" : " (" + how + ")");
}

const std::map<std::string, std::string> kTitles = {{"steer", "A direction to steer by"},
                                                    {"ablate", "A direction taken out"},
                                                    {"bake", "A direction written in"},
                                                    {"optimise", "How strongly, and where"}};

}  // namespace

DirectJob::DirectJob(DirectOptions options) : options_(std::move(options)) {
  const auto trials = fs::path(options_.out) / "trials.jsonl";
  if (!options_.force && !options_.resume && fs::exists(trials) && !fs::exists(fs::path(options_.out) / "report.html"))
    refuse(search_has_ended(trials)
               ? ErrorParts{options_.out, "a search that ended without a result", "a new path",
                            "choose another, or replace it with " + setting("force") +
                                "; if it was stopped after its last trial, " + setting("resume") + " finishes it"}
               : ErrorParts{options_.out, "a search that was interrupted", "a new path",
                            "go on with it (" + setting("resume") + "), or choose another"});
  require_new(options_.out, options_.force || options_.resume);
  remove_abandoned(options_.out, std::chrono::seconds(0));
  if (options_.resume && !fs::exists(trials))
    refuse(
        {options_.out, "no search that was begun", "one to go on with", "begin one: leave out " + setting("resume")});
  options_.change.layers = models::LayerRange::parse(options_.layers);
  options_.change.answer_start = options_.where == kAnswerStart;
  if (options_.change.answer_start && options_.spare.empty()) options_.spare = "own";
  if (options_.spare.empty() && options_.change.spare_weight != DirectChangeOptions().spare_weight)
    refuse({setting("spare_weight"), "no texts of that weight", setting("spare") + " with it", "or leave it out"});
  if (options_.change.preserve_norm && !options_.spare.empty())
    refuse({setting("preserve_norm"), "texts to spare", "one of both: a column is stretched whatever its key",
            "leave out " + setting("preserve_norm") + ", or " + setting("spare") + " and " + setting("where")});
  options_.steer.strength = options_.change.strength;
  options_.steer.layers = options_.change.layers;
  const std::string& action = options_.action;
  if (action == "optimise" && options_.change.strength <= 0)
    refuse({setting("strength"), short_number(options_.change.strength), "above 0: the largest that is tried",
            "bake is tried in both directions"});
  if (options_.change.strength == 0 && options_.steer.by == "add")
    refuse({setting("strength"), "0, with which nothing changes", "another", ""});
  const bool pair = !options_.positive.empty() && !options_.negative.empty();
  if (action == "fit" && (pair == !options_.preset.empty() || options_.positive.empty() != options_.negative.empty()))
    refuse({"fit", "no pair of prompt files, or more",
            setting("positive", "FILE") + " and " + setting("negative", "FILE") + ", or " + setting("preset", "NAME"),
            ""});
  if (action == "fit" && options_.change.layers.last == 0)
    refuse({setting("layers"), "layer 0 alone", "one from 1 on",
            "a control vector (direction.gguf) has no direction behind block 0"});
  if (action != "fit" && options_.directions.empty())
    refuse({action, "no directions", "a folder that emend direct fit wrote", ""});
  if (action == "ablate" && !options_.texts.empty() && options_.spare.empty())
    refuse({setting("texts"), "nothing to tell them from", setting("spare") + " with it", ""});
  for (const auto& name : options_.save)
    if (action == "steer" && !save_format(name).beside)
      throw Error(ErrorClass::kUnsupported, {setting("save", name), "a direction beside the weights", "pack or model",
                                             "generate, chat, eval and serve load it as a pack"});
  options_.fit.apart_from = mapped(options_.apart_from, load_directions);
  std::set<fs::path> named;
  for (const auto& path : options_.directions) {
    if (!named.insert(fs::weakly_canonical(path)).second) refuse({path, "named twice", "each direction once", ""});
    auto one = load_directions(path);
    for (size_t i = 0; i < directions_.size(); ++i)
      if (same_direction(directions_[i], one))
        refuse({path, "the direction that " + options_.directions[i] + " is", "each direction once",
                "leave one of them out"});
    directions_.push_back(std::move(one));
  }
  preset_ = direct_preset(action == "fit" ? options_.preset : directions_[0].about.value("preset", ""));
  if (pair) {
    preset_.positive = read_prompts(options_.positive);
    preset_.negative = read_prompts(options_.negative);
  }
  if (action == "optimise" && options_.scorers.empty() && preset_.name.empty())
    refuse({"optimise", "no scorer: the direction is of no preset that has one", setting("scorer", "FILE"),
            "docs/directions.md shows scorers"});
  settle_effect(options_, preset_);
  if (!options_.texts.empty()) texts_ = read_prompts(options_.texts);
  if (!options_.spare.empty() && options_.spare != "own") spare_ = read_prompts(options_.spare);
  if (!options_.neutral.empty()) options_.search.neutral = read_prompts(options_.neutral);
  options_.search.prompts = options_.search_prompts.empty() ? preset_.questions : read_prompts(options_.search_prompts);
}

void DirectJob::check(const models::Checkpoint& checkpoint) const {
  require_layers(options_.change.layers.last, checkpoint, setting("layers"));
  require_layers(options_.change.from_layer, checkpoint, setting("from_layer"));
  const std::string& action = options_.action;
  if (action == "fit" || action == "steer") return;
  std::optional<models::ModelConfig> config;
  try {
    config = models::parse_config(checkpoint.config(), checkpoint.path().string());
  } catch (const Error&) {  // said where it is loaded
  }
  const bool bakes =
      action == "bake" || (action == "optimise" && std::ranges::find(options_.by, "bake") != options_.by.end());
  if (config) require_one_mlp(*config, action, bakes, !options_.spare.empty());
}

// Directions of another model point anywhere in this one.
void DirectJob::warn_of_others(const models::Model& model, const Log& log) const {
  const auto base = editors::lineage_of(model.checkpoint().path()).base;
  const auto look_at = [&](const Directions& one, const std::string& name) {
    if (one.fingerprint.empty()) {
      if (const auto other = models::other_kind(one.about.value("model_hint", ""), model); !other.empty())
        log.warning("direct.model", name + " was " + other);
    } else if (one.fingerprint != model.fingerprint() && one.fingerprint != base) {
      log.warning("direct.model", "a direction was fitted on " + one.model + " (" + one.fingerprint.substr(0, 12) +
                                      "), this model is " + model.fingerprint().substr(0, 12) +
                                      ": it is right only for the same model in another form, or a slight edit");
    }
  };
  for (size_t i = 0; i < directions_.size(); ++i) look_at(directions_[i], options_.directions[i]);
  const auto& others = options_.fit.apart_from;
  for (size_t i = 0; i < others.size(); ++i) look_at(others[i], options_.apart_from[i]);
}

DirectResult DirectJob::run(models::Model& model, const Handles& lent) const {
  models::require_apart(options_.out, model.checkpoint().path());
  warn_of_others(model, lent.log);
  check(model.checkpoint());
  warn_of_edits_beside(model.checkpoint(), "direct.beside", lent.log);
  return options_.action == "fit" ? fit(model, lent) : change(model, lent);
}

// Before, and after while what `change` returns lives.
ordered_json DirectJob::measured(const models::Model& model, const Handles& lent,
                                 const std::function<std::shared_ptr<void>()>& change) const {
  const auto before = read_effect(model, options_.effect, lent);
  auto changed = change();
  const auto after = read_effect(model, options_.effect, lent, &before);
  changed.reset();
  auto effect = compare_effects(before, after, options_.effect, model, lent);
  // A model that has lost so much of what it writes anyway is hardly what was wanted.
  constexpr double kMuch = 0.5;
  if (const double divergence = effect["neutral_kl"].get<double>(); divergence > kMuch)
    lent.log.warning(
        "direct.effect",
        "neutral texts are " + short_number(divergence) +
            " nat a token away from those of the unchanged model: fewer layers or a smaller strength help");
  return effect;
}

DirectResult DirectJob::fit(models::Model& model, const Handles& lent) const {
  if (Changes::any_in(model))
    lent.log.warning("direct.edited", "an edit is in force in this model: the directions are those of the edited one");
  auto directions = fit_directions(model, preset_.positive, preset_.negative, options_.fit, lent);
  directions.about["preset"] = options_.preset;
  auto vector = directions.control_vector(options_.change.layers);
  vector.layers.erase(0);  // the format has none
  auto steer = options_.steer;
  const int best = std::max(1, directions.best);
  if (options_.layers.empty()) steer.layers = {best, best};
  ordered_json document = {{"model", directions.model}, {"fit", directions.to_json()}};
  if (!options_.no_effect) {
    auto& effect = document["effect"] = measured(model, lent, [&] {
      return std::make_shared<std::vector<hooks::HookHandle>>(models::attach_steering(model, vector, steer));
    });
    effect["of"] = steering_text(steer) +
                   (options_.layers.empty() ? " behind layer " + std::to_string(best) : " behind the layers named");
  }
  write_whole(
      options_.out,
      [&](const fs::path& staged) {
        fs::create_directory(staged);
        models::write_control_vector(staged / "direction.gguf", vector);
        save_directions(staged / "direction.safetensors", directions);
        write_page(staged, document, "A direction of behaviour", lent);
      },
      is_product);
  document["files"] = {options_.out + "/direction.gguf", options_.out + "/direction.safetensors",
                       options_.out + "/report.html"};
  return {document, layers_text(directions) + effect_text(document.value("effect", ordered_json())) + "wrote " +
                        options_.out + "\n"};
}

// With the texts that the changes are fitted to, where they are to any. `own`: answers of the model, if they are known.
DirectChangeOptions DirectJob::change_options(const models::Model& model, bool bakes, const Handles& lent,
                                              const std::vector<std::vector<int64_t>>& own) const {
  auto change = options_.change;
  if (change.answer_start && (options_.no_chat || model.tokenizer().chat_template().empty()))
    lent.log.warning("direct.where",
                     "without a chat template a prompt's last token can hardly be told from those of other texts");
  const auto ids_of = [&](const std::vector<ContrastPrompt>& prompts, std::vector<std::vector<int64_t>>& texts,
                          bool chat) {
    for (auto& row : prompt_rows(model, prompts, chat && !options_.no_chat)) texts.push_back(std::move(row));
  };
  if (options_.spare == "own") change.spared = own_writing(model, 0, lent, 48, change.answer_start ? 4 : 2);
  // In the template every text has the token where an answer begins, and that one is to change.
  std::vector<ContrastPrompt> chats, plain;
  for (const auto& one : spare_)
    (change.answer_start && one.system.empty() && one.reply.empty() ? plain : chats).push_back(one);
  ids_of(chats, change.spared, true);
  ids_of(plain, change.spared, false);
  ids_of(texts_, change.texts, true);
  if (texts_.empty() && (bakes || !change.spared.empty())) {
    if (change.answer_start)
      ids_of(preset_.questions, change.texts, true);
    else
      change.texts = own.empty() ? answered(model, preset_.questions, !options_.no_chat, lent) : own;
    if (change.spared.empty()) {
      const auto more = own_writing(model, 0, lent);
      change.texts.insert(change.texts.end(), more.begin(), more.end());
    }
  }
  return change;
}

// As data beside the weights.
DirectChange DirectJob::steered(const models::Model& model) const {
  editors::EditResult result;
  result.editor = "steer";
  DirectChange change{editors::EditPack::from_results(model, {&result, 1}, {}), {}};
  for (const auto& one : directions_) {
    models::require_steering(model, one.control_vector(), options_.steer, "control vector");
    change.pack.runtime.push_back(editors::steer_part(one.control_vector(), options_.steer));
    change.pack.extra["directions"].push_back(
        {{"method", one.method}, {"fingerprint", one.fingerprint}, {"about", one.about}});
  }
  change.pack.hparams = change.pack.runtime[0].values;
  return change;
}

DirectChange DirectJob::changed_by(const std::string& way, models::Model& model, const DirectChangeOptions& options,
                                   const Handles& lent) const {
  if (way == "steer") return steered(model);
  return way == "ablate" ? ablate_directions(model, directions_, options, lent)
                         : bake_directions(model, directions_, options, lent);
}

DirectChange DirectJob::optimised(models::Model& model, const Handles& lent, ordered_json& document) const {
  auto search = options_.search;
  search.scorer = options_.effect.scorers[0];
  search.max_new_tokens = options_.effect.max_new_tokens;
  search.answered = answered(model, search.prompts, search.chat, lent, search.max_new_tokens);
  auto how = change_options(model, true, lent, search.answered);
  how.strength = 1;
  how.unchanged_keys = make_direct_keys();
  std::vector<DirectChange> changes;  // every way with each layer's own direction, and with that of the best everywhere
  for (const auto& way : options_.by)
    for (const int from : {-1, directions_[0].best}) {
      if (options_.change.from_layer < 0) how.from_layer = from;
      changes.push_back(changed_by(way, model, how, lent));
      if (options_.change.from_layer >= 0) break;
    }
  search.most = options_.change.strength;
  search.journal = fs::path(options_.out) / "trials.jsonl";
  for (const auto& one : directions_) search.about.push_back({one.to_json(), content_of(one)});
  search.about.push_back({options_.by, options_.layers, options_.where,
                          spare_.empty() ? options_.spare : content_of(spare_), content_of(texts_),
                          options_.change.from_layer, options_.change.spare_weight});
  if (!options_.resume) fs::remove(search.journal);
  const auto best = optimise_strengths(model, changes, search, lent);
  if (best.at_best)
    throw Error(ErrorClass::kNumeric,
                {"optimise",
                 "answers that score " + short_number(best.score_before) + " (" + search.scorer.name +
                     ") as they are, the best there is",
                 "something to gain",
                 "there is nothing to change, or search with other prompts (" + setting("search_prompts") +
                     ") or another scorer (" + setting("scorer") + ")"});
  auto& found = document["search"] = {{"scorer", search.scorer.name},
                                      {"before", best.score_before},
                                      {"max_kl", search.max_kl},
                                      {"trials", ordered_json::array()},
                                      {"front", best.front}};
  for (const auto& trial : best.trials) {
    const auto& made = changes[trial.change].pack;
    ordered_json one = trial.to_json();
    one["by"] = made.editor;
    one["from_layer"] = made.hparams["from_layer"];
    found["trials"].push_back(one);
  }
  if (!best.chosen)
    throw Error(ErrorClass::kNumeric,
                {"optimise", "no trial whose answers score better at a divergence of " + short_number(search.max_kl),
                 "one at least",
                 "in another folder, allow more (" + setting("max_kl") + ") or try more (" + setting("trials") +
                     "); or take another direction"});
  const auto& chosen = best.trials[*best.chosen];
  found["chosen"] = chosen.number;
  auto change = scaled(changes[chosen.change], [&](const DirectFigures& weight) { return chosen.at(weight); });
  measure_left(model, change);
  change.pack.extra["trial"] = chosen.to_json();
  for (const auto& weight : change.figures)
    if (weight.part != models::Part::kAttnOut)
      found["strengths"].push_back({{"layer", weight.layer}, {"strength", chosen.at(weight)}});
  return change;
}

// Before the work: forms that the model or this change of it does not have.
void DirectJob::check_save(const models::Model& model) const {
  for (const auto& name : options_.save) {
    const auto& format = save_format(name);
    if (format.check) format.check(model, setting("save"));
    if (!format.adapter) continue;
    for (const auto& way : options_.action == "optimise" ? options_.by : std::vector<std::string>{options_.action})
      require_adapter(name, model, way, options_.change.layers, !options_.spare.empty());
  }
}

DirectResult DirectJob::change(models::Model& model, const Handles& lent) const {
  if (options_.action != "steer" && Changes::any_in(model))  // a direction beside the weights reads none
    refuse({options_.action, "a model with an edit in force, or with hooks attached",
            "the model as it was loaded, which the change is bound to",
            "take the edit out and detach the hooks first, or save the edited model and load that"});
  check_save(model);
  ordered_json document = {{"model", short_model_name(model.checkpoint())}};
  const std::string& action = options_.action;
  const auto change = action == "optimise"
                          ? optimised(model, lent, document)
                          : changed_by(action, model, change_options(model, action == "bake", lent), lent);
  const std::string summary = describe(document, change);
  if (!options_.no_effect)
    document["effect"] = measured(model, lent, [&] {
      auto scope = std::make_shared<PackScope>(model);
      scope->add(change.pack, "directions");
      return scope;
    });
  auto written = ordered_json::array();
  write_whole(
      options_.out,
      [&](const fs::path& staged) {
        fs::create_directory(staged);
        for (const auto& name : options_.save) {
          const auto& format = save_format(name);
          (void)format.write({.model = model, .pack = change.pack, .out = staged / format.file, .lent = lent});
          written.push_back((fs::path(options_.out) / format.file).string());
        }
        write_page(staged, document, kTitles.at(action), lent);
      },
      [&](const std::string& name) { return is_product(name) && (action != "optimise" || name != "trials.jsonl"); });
  document["files"] = written;
  return {document, front_text(document.value("search", ordered_json())) + summary +
                        effect_text(document.value("effect", ordered_json())) + "wrote " +
                        join(written, ", ", [](const ordered_json& file) { return file.get<std::string>(); }) + "\n"};
}

}  // namespace emend::workflow
