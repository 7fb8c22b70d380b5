#include "packs.h"

#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/editors/packs/ledger.h>
#include <emend/editors/packs/merge.h>

#include <algorithm>

namespace emend::tools {
namespace {

namespace fs = std::filesystem;

void read_model(EditSource& source) {
  source.kind = "model";
  source.checkpoint = models::open_checkpoint(source.name);
  const fs::path folder = source.checkpoint->path();
  source.pack.facts = nlohmann::json::array();
  for (const auto& [name, edit] : editors::described_edits(folder)) {
    append_item(source.pack.editor, edit.editor, "+");
    source.pack.facts.insert(source.pack.facts.end(), edit.facts.begin(), edit.facts.end());
  }
  const auto packs = editors::packs_in_force(folder);
  for (const auto& [name, pack] : packs) source.ids.push_back(pack.id);
  if (!packs.empty()) source.pack = editors::merge_packs(packs, editors::OnConflict::kSum).pack;
  const auto base = editors::lineage_of(folder).base;
  source.pack.base_fingerprint = base.empty() ? models::model_fingerprint(*source.checkpoint) : base;
}

// "98.7 % of the change survived" of the weight that kept least, or nothing if no rounding was recorded.
std::string survival_text(const nlohmann::json& extra) {
  const auto survived = extra.is_object() ? extra.value("survived", nlohmann::json()) : nlohmann::json();
  double least = 1;
  if (!survived.is_object() || survived.empty()) return "";
  for (const auto& [weight, share] : survived.items())
    if (share.is_number()) least = std::min(least, share.get<double>());
  const auto dtype = extra.find("dtype");
  return percent(least) + " of the change survived " +
         (dtype != extra.end() && dtype->is_string() ? dtype->get<std::string>() : "rounding");
}

}  // namespace

void add_pack_option(Options& o, std::vector<std::string>& packs, const std::string& what) {
  o.group("Model").add("--pack", &packs, what, {.type = "FILE"});
}

void warn_of_replaced(const std::string& folder, const Log& log) {
  if (const auto gone = editors::lineage_of(folder).edits; !gone.empty())
    log.warning("model.replaced", folder + " is replaced, and with it its edits " + join(gone));
}

void add_steer_options(Options& o, SteerArguments& options) {
  const std::string needs = "--control-vector";
  o.group("Steering")
      .add("--control-vector", &options.vector,
           "control vector (GGUF), as emend direct fit, repeng, EasySteer and llama.cpp write them", {.type = "FILE"})
      .add("--strength", &options.how.strength, "times the vector; negative: the other way", {.needs = needs})
      .add("--layers", &options.layers, "A-B: only behind these blocks, from 0; default: all of the vector's",
           {.type = "A-B", .needs = needs})
      .add("--steer", &options.how.by,
           "add, or set the coordinate along the vector to the strength: clamp; at-least, at-most: where it is below, "
           "above",
           {.choices = {"add", "clamp", "at-least", "at-most"}, .needs = needs})
      .add("--decay", &options.how.decay, "the effect falls to nothing over so many tokens of an answer; 0: it stays",
           {.limits = kNonNegative, .needs = needs});
}

std::function<std::unique_ptr<models::Steering>(const models::Model&)> SteerArguments::read(const Log& log) const {
  if (vector.empty()) return [](const models::Model&) { return nullptr; };
  auto options = how;
  options.layers = models::LayerRange::parse(layers);
  auto read = models::read_control_vector(vector);
  models::require_directions(read, options.layers, vector);
  return [read = std::move(read), options, name = vector, log](const models::Model& model) {
    if (const auto other = models::other_kind(read.model_hint, model); !other.empty())
      log.warning("steer.model", name + " was " + other);
    return std::make_unique<models::Steering>(model, read, options, name);
  };
}

void add_base_options(Options& o, editors::ApplyPackOptions& options, const std::string& force_help) {
  o.add("--force", &options.force, force_help)
      .add("--accept-base", &options.accepted_bases,
           "accept packs for the model with this fingerprint (8 digits or more): the same model in another form",
           {.type = "FINGERPRINT", .digits = 8})
      .add("--allow-conflicts", &options.allow_conflicts,
           "put packs together that do not go together (one question with two answers, a fact in both, …)");
}

std::string EditSource::summary() const {
  if (pack.editor.empty()) return "no edits";
  const size_t facts = pack.facts.size();
  std::string text = pack.editor + ", " + counted(facts, "fact");
  if (ids.size() > 1) text += " in " + std::to_string(ids.size()) + " packs";
  if (const auto survived = survival_text(pack.extra); !survived.empty()) text += ", " + survived;
  return text;
}

EditSource open_edit_source(const std::string& name) {
  EditSource source;
  source.name = name;
  const fs::path path(name);
  if (fs::is_directory(path) && fs::exists(path / "edit.safetensors") && !fs::exists(path / "config.json")) {
    source.kind = "run";
    source.pack = editors::load_pack(path / "edit.safetensors");
  } else if (fs::is_directory(path) && fs::exists(path / "results.json")) {
    throw Error(ErrorClass::kNotFound, {name, "a run folder without edit.safetensors", "a run that saved its pack",
                                        "repeat the run with --save pack"});
  } else if (fs::is_regular_file(path) && path.extension() != ".gguf") {
    source.kind = "pack";
    source.pack = editors::load_pack(path);
  } else {
    read_model(source);
  }
  return source;
}

}  // namespace emend::tools
