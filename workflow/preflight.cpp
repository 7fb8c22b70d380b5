#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/devices/memory_model.h>
#include <emend/devices/runtime.h>
#include <emend/devices/units.h>
#include <emend/editors/registry.h>
#include <emend/evaluation/evaluation.h>
#include <emend/evaluation/free_text.h>
#include <emend/evaluation/health.h>
#include <emend/models/compute_copy.h>
#include <emend/models/config.h>
#include <emend/models/placing.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/workflow/inputs.h>
#include <emend/workflow/preflight.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

namespace emend::workflow {
namespace {

// One phase: what the planner is to count, and what may help if it does not fit.
struct EditPhase {
  std::string name;
  devices::WorkShape work = {};
  std::string advice = {};
  // The setting that makes it smaller, its present value, and the phase with another value; empty where there is none.
  std::string setting = {};
  int64_t value = 0;
  std::function<EditPhase(int64_t)> with = {};
  // Hidden states of all rows of a batch, and their keys, kept on the device of this layer while keys are collected.
  int64_t held_tokens = 0, held_keys = 0, held_at_layer = 0;
  bool may_be_cached = false;  // its result may be there already: a shortage is a warning
  bool copies = false;         // beside a copy of the frozen layers, where that computes in another dtype
};

constexpr int64_t kKeyTokens = 4096;     // of a pass that collects keys or second moments
constexpr int64_t kProjectedRows = 256;  // rows that an evaluation projects to the vocabulary at once

// Tokens of the facts' own prompts with their new targets.
struct FactTokens {
  int64_t longest = 1, suffix = 1, target = 1, sum = 0;  ///< suffix: from the subject's last token on
  int64_t prompts = 1;                                   ///< of all facts, of every kind
};

FactTokens count_tokens(const models::Tokenizer& tokenizer, const datasets::FactSet& facts) {
  const auto length = [&](const std::string& text) { return std::ssize(tokenizer.encode_ids(text)); };
  FactTokens count;
  for (const auto& fact : facts.facts) {
    const int64_t whole = length(fact.full_prompt() + " " + fact.target_new), target = length(" " + fact.target_new);
    const int64_t to_subject = length(fact.prompt.substr(0, fact.prompt.find("{}")) + fact.subject);
    count.longest = std::max(count.longest, whole);
    count.target = std::max(count.target, target);
    count.suffix = std::max(count.suffix, whole - to_subject + 1);
    count.sum += whole;
    int64_t prompts = 1 + static_cast<int64_t>(fact.paraphrase_prompts.size() + fact.neighborhood_prompts.size() +
                                               fact.attribute_prompts.size());
    for (const auto* probes : {&fact.locality, &fact.portability})
      for (const auto& [name, list] : *probes) prompts += std::ssize(list);
    count.prompts += prompts;
  }
  return count;
}

// Rows of one fact, the plain prompt among them, and tokens that the longest context puts before it.
std::pair<int64_t, int64_t> contexts_of(const nlohmann::json& hparams) {
  int64_t rows = 1, longest = 0;
  const auto pairs = hparams.value("context_template_length_params", nlohmann::json::array());
  for (const auto& pair : pairs) {
    if (!pair.is_array() || pair.size() != 2) continue;
    rows += 5 * std::max<int64_t>(1, pair[1].get<int64_t>() / 5);
    longest = std::max(longest, pair[0].get<int64_t>());
  }
  return {rows, longest};
}

std::vector<int64_t> layers_of(const nlohmann::json& hparams) {
  const auto found = hparams.find("layers");
  return found != hparams.end() && found->is_array() ? found->get<std::vector<int64_t>>() : std::vector<int64_t>{};
}

devices::WorkShape pass_of(int64_t tokens, int64_t scored) {
  devices::WorkShape work;
  work.rows = 1;
  work.tokens = std::max<int64_t>(1, tokens);
  work.scored_tokens = std::max<int64_t>(1, scored);
  return work;
}

EditPhase evaluation_phase(int64_t batch_tokens, const FactTokens& count, size_t facts) {
  const int64_t all =
      count.prompts * std::max<int64_t>(1, count.sum / static_cast<int64_t>(std::max<size_t>(1, facts)));
  const int64_t tokens = std::min(batch_tokens, all);
  EditPhase phase{"evaluation", pass_of(tokens, std::min(kProjectedRows, tokens)), "shorter facts"};
  phase.setting = "eval_batch_tokens";
  phase.value = tokens;
  phase.with = [=](int64_t value) { return evaluation_phase(value, count, facts); };
  return phase;
}

// The probe prompts in one pass.
EditPhase guard_phase(const models::Tokenizer& tokenizer) {
  const auto& prompts = evaluation::probe_prompts();
  int64_t tokens = 0;
  for (const auto& prompt : prompts) tokens += std::ssize(tokenizer.encode_ids(prompt));
  return {"the collapse guard's probe prompts", pass_of(tokens, std::ssize(prompts)), "a model in fewer bytes"};
}

// Texts that are written together, with their keys and values: the answers of the verdicts, or what the family "free"
// asks besides: a question, a text in front, a negation and a doubt.
EditPhase writing_phase(bool free, const FactTokens& count, int64_t facts) {
  constexpr int64_t kFurther = 4, kBehind = 4;
  const evaluation::FreeTextOptions options;
  const int64_t rows = std::min(options.rows, free ? count.prompts + kFurther * facts : facts);
  EditPhase phase{"written answers", pass_of(rows * count.sum / std::max<int64_t>(1, facts), rows), "shorter facts"};
  phase.work.cached_tokens = rows * (count.longest + (free ? options.max_tokens : kBehind));
  return phase;
}

// One fact at least: the engine takes as many at once as there is room for.
EditPhase target_phase(const RunOptions& options, const nlohmann::json& hparams, const models::ModelConfig& config,
                       const FactTokens& count) {
  const auto layers = layers_of(hparams);
  const auto [rows, before] = contexts_of(hparams);
  EditPhase phase{"targets of one fact", {}, "shorter facts or contexts"};
  auto& work = phase.work;
  work.rows = rows;
  work.tokens = before + count.longest;
  work.gradients = true;
  work.first_gradient_layer = std::min<int64_t>(layers.back() + 1, config.n_layers);
  const bool whole = options.engine == "reference";
  work.suffix_tokens = whole ? work.tokens : count.suffix;
  work.scored_tokens = whole ? work.tokens : count.target;
  if (!whole) work.cached_tokens = rows * work.tokens;
  work.facts = 1;
  work.editing_layers = layers;
  phase.copies = true;
  return phase;
}

EditPhase training_phase(const nlohmann::json& hparams, const FactTokens& count, int64_t facts, int64_t n_layers) {
  auto layers = layers_of(hparams);
  for (int64_t layer = 0; layers_of(hparams).empty() && layer < n_layers; ++layer) layers.push_back(layer);
  EditPhase phase{"training", {}, "fewer layers or a smaller batch_size in the hyper-parameters"};
  auto& work = phase.work;
  work.rows = std::clamp<int64_t>(hparams.value("batch_size", 1), 1, std::max<int64_t>(1, facts));
  work.tokens = count.longest;
  work.scored_tokens = count.target;
  work.gradients = true;
  work.first_gradient_layer = *std::ranges::min_element(layers);
  work.editing_layers = layers;
  return phase;
}

EditPhase insert_phase(int64_t batch, const nlohmann::json& hparams, const FactTokens& count,
                       const editors::EditorInfo& editor) {
  const auto layers = layers_of(hparams);
  const auto [rows, before] = contexts_of(hparams);
  const int64_t tokens = batch * rows * (before + count.longest);
  EditPhase phase{"keys and solve of " + std::to_string(batch) + " facts", pass_of(std::min(kKeyTokens, tokens), 1),
                  "shorter facts or contexts"};
  phase.setting = "batch_size";
  phase.value = batch;
  phase.with = [=](int64_t value) { return insert_phase(value, hparams, count, editor); };
  phase.work.facts = batch;
  phase.work.editing_layers = layers;
  phase.work.statistics = phase.work.statistics_on_host = phase.work.solve = !editor.neurons;  // F×F
  phase.held_tokens = tokens;
  phase.held_keys = batch * rows;
  phase.held_at_layer = layers.front();
  phase.copies = editor.copies_model;
  return phase;
}

EditPhase statistics_phase(const nlohmann::json& hparams) {
  EditPhase phase{"second moments", pass_of(kKeyTokens, 1),
                  "compute them first with `emend stats` under a map that has room: the cache serves this run"};
  phase.work.editing_layers = layers_of(hparams);
  phase.work.statistics = true;
  phase.may_be_cached = true;
  return phase;
}

std::string figures_text(const devices::Figures& figures) {
  std::string text;
  for (const auto& [name, bytes] :
       std::initializer_list<std::pair<const char*, int64_t>>{{"weights", figures.weights},
                                                              {"activations", figures.activations},
                                                              {"statistics", figures.statistics},
                                                              {"solve", figures.solve},
                                                              {"keys and values", figures.kv_cache},
                                                              {"optimiser", figures.optimiser},
                                                              {"CUDA", figures.reserved}})
    if (bytes > 0) append_item(text, std::string(name) + " " + devices::format_bytes(bytes));
  return text;
}

class Preflight {
 public:
  Preflight(const RunOptions& options, const models::ModelConfig& config, const Log& log)
      : place_(place_options(options.model, log)),
        config_(config),
        plan_(models::plan_model(place_, config)),
        shape_(models::model_shape(config, place_.dtype)) {
    const auto& editor = editors::find_editor(options.editor);
    const auto arithmetic = editors::arithmetic_of(
        {.engine = editors::parse_engine(options.engine), .compute_dtype = chosen_arithmetic(options, editor)},
        place_.dtype, plan_.placement.devices());
    if (arithmetic.value_or(place_.dtype) == place_.dtype) return;
    copy_bytes_ = static_cast<int64_t>(c10::elementSize(*arithmetic));
    const int64_t bytes = std::reduce(shape_.layer_bytes.begin(), shape_.layer_bytes.end(),
                                      shape_.embedding_bytes + shape_.position_bytes + shape_.head_bytes);
    copies_all_ = editor.copies_model && models::copied_whole(bytes / shape_.weight_bytes);
  }

  [[nodiscard]] bool weights_fit() const { return plan_.fits; }

  /// "sim:0 needs 3 MiB (weights 1 MiB, …) and has 2 MiB", or nothing if the phase fits.
  [[nodiscard]] std::string shortage(const EditPhase& phase) const {
    std::string text;
    for (const auto& [device, needed] : figures_of(phase))
      if (const int64_t has = room(device); has > 0 && needed.total() > has)
        append_item(text,
                    devices::to_string(device) + " needs " + devices::format_bytes(needed.total()) + " (" +
                        figures_text(needed) + ") and has " + devices::format_bytes(has),
                    "; ");
    return text;
  }

  [[nodiscard]] bool fits(const std::vector<EditPhase>& phases) const {
    return plan_.fits && std::ranges::all_of(
                             phases, [&](const auto& phase) { return phase.may_be_cached || shortage(phase).empty(); });
  }

  /// Limits under which all phases fit on this placement, with room for what a plan does not count: intermediate
  /// results of sums into the weights, allocators. "sim:0=3MiB,sim:1=5MiB".
  [[nodiscard]] std::string limits(const std::vector<EditPhase>& phases) const {
    std::map<std::string, int64_t> most;
    for (const auto& [device, figures] : plan_.devices) most[devices::to_string(device)] = figures.limit;
    for (const auto& phase : phases)
      for (const auto& [device, needed] : figures_of(phase)) {
        if (device.is_cpu() && !most.contains("cpu")) continue;
        auto& bytes = most[devices::to_string(device)];
        bytes = std::max(bytes, needed.total() + needed.total() / 8 + (1 << 20));
      }
    std::string text;
    for (const auto& [device, bytes] : most)
      append_item(text, device + "=" + std::to_string((bytes + 1023) / 1024) + "KiB", ",");
    return text;
  }

 private:
  [[nodiscard]] std::vector<std::pair<c10::Device, devices::Figures>> figures_of(const EditPhase& phase) const {
    auto work = phase.work;
    if (phase.copies) {
      work.copy_bytes = copy_bytes_, work.copies_all = copies_all_;
      work.copies_above = !std::ranges::all_of(plan_.placement.devices(), devices::in_host_memory);
    }
    auto all = devices::MemoryModel(shape_, work).account(plan_.placement);
    if (phase.held_tokens == 0) return all;
    const auto home = plan_.placement.layers.at(phase.held_at_layer);
    for (auto& [device, figures] : all)
      if (device == home)
        figures.activations +=
            (phase.held_tokens * shape_.hidden + phase.held_keys * shape_.mlp_width) * shape_.compute_bytes;
    return all;
  }

  /// 0 if it cannot be told.
  [[nodiscard]] int64_t room(c10::Device device) const {
    for (const auto& [known, figures] : plan_.devices)
      if (known == device) return figures.limit;
    if (!place_.max_memory.empty()) return 0;
    for (const auto& info : devices::visible_devices())
      if (info.device == device) return info.free_bytes;
    return 0;
  }

  models::PlaceOptions place_;
  const models::ModelConfig& config_;
  devices::Plan plan_;
  devices::ModelShape shape_;
  int64_t copy_bytes_ = 0;  // of an element of the copy that computes; 0: the model does
  bool copies_all_ = false;
};

// What was tried and makes all phases fit; the phase's own advice if nothing does.
std::string suggestions(const RunOptions& options, const models::ModelConfig& config,
                        const std::vector<EditPhase>& phases, const EditPhase& short_one) {
  const auto fits = [&](const auto& change) {
    RunOptions other = options;
    change(other);
    try {
      return Preflight(other, config, Log()).fits(phases);
    } catch (const Error&) {
      return false;  // no such map on this machine
    }
  };
  std::vector<std::string> found;
  const Preflight here(options, config, Log());
  for (int64_t value = short_one.value / 2; short_one.with && value > 0; value /= 2)
    if (here.shortage(short_one.with(value)).empty()) {
      found.push_back(setting(short_one.setting, std::to_string(value)) + " fits");
      break;
    }
  for (const char* map : {"balanced", "sequential"})
    if (options.model.device_map != map && fits([map](RunOptions& other) { other.model.device_map = map; }))
      found.push_back(setting("device_map", map) + " fits");
  if (options.model.dtype == "float32" && fits([](RunOptions& other) { other.model.dtype = "bfloat16"; }))
    found.push_back(setting("dtype", "bfloat16") + " fits");
  if (options.model.dtype == "float32" && fits([](RunOptions& other) { other.compute_dtype = "float32"; }))
    found.push_back(setting("compute_dtype", "float32") + " fits");
  const std::string limits = here.limits(phases);
  if (!options.model.max_memory.empty() && fits([&](RunOptions& other) { other.model.max_memory = limits; }))
    found.push_back(setting("max_memory", limits) + " fits");
  return found.empty() ? short_one.advice : join(found, "; ");
}

// The phases of an edit with these effective hyper-parameters. An editor without layers (IKE) has only the evaluation.
std::vector<EditPhase> edit_phases(const RunOptions& options, const nlohmann::json& hparams,
                                   const editors::EditorInfo& editor, const models::ModelConfig& config,
                                   const models::Tokenizer& tokenizer, const datasets::FactSet& facts) {
  const FactTokens count = count_tokens(tokenizer, facts);
  const bool solves = editor.solves();
  std::vector<EditPhase> phases;
  const auto all = std::ssize(facts.facts);
  const bool alone = !editor.batch || (options.single() && options.batch_size == 0);
  const int64_t together = alone ? 1 : options.batch_size > 0 ? std::min(options.batch_size, all) : all;
  if (!layers_of(hparams).empty() || editor.trains) {
    phases.push_back(solves ? target_phase(options, hparams, config, count)
                            : training_phase(hparams, count, together, config.n_layers));
    if (solves) phases.push_back(insert_phase(together, hparams, count, editor));
    if (editor.reads_moments(hparams)) phases.push_back(statistics_phase(hparams));
  }
  phases.push_back(evaluation_phase(options.metrics.batch_tokens > 0 ? options.metrics.batch_tokens : kPassTokens,
                                    count, facts.facts.size()));
  const auto metrics = metric_names(options.metrics, facts, options.single());
  phases.push_back(
      writing_phase(std::ranges::find(metrics, "free") != metrics.end(), count, options.single() ? together : all));
  if (options.watch) phases.push_back(guard_phase(tokenizer));
  return phases;
}

}  // namespace

void require_room(const RunOptions& options, const models::Checkpoint& checkpoint, const datasets::FactSet& facts,
                  const Handles& lent) {
  std::vector<EditPhase> phases;
  std::optional<Preflight> preflight;
  models::ModelConfig config;
  try {
    config = models::parse_config(checkpoint.config(), checkpoint.path().string());
    const auto raw = find_hparams(options.editor, options.hparams, options.set, checkpoint);
    const auto tokenizer = checkpoint.load_tokenizer();
    if (!tokenizer) return;
    const auto& editor = editors::find_editor(options.editor);
    phases = edit_phases(options, editor.effective(raw, Log()), editor, config, *tokenizer, facts);
    preflight.emplace(options, config, Log());
    if (!preflight->weights_fit()) return;
    for (const auto& phase : phases) (void)devices::MemoryModel(models::model_shape(config, at::kFloat), phase.work);
  } catch (const Error&) {
    return;  // said where it is read, with its place
  }
  for (const auto& phase : phases) {
    const std::string shortage = preflight->shortage(phase);
    if (shortage.empty()) continue;
    if (phase.may_be_cached) {
      lent.log.warning("plan.room", phase.name + ": " + shortage + ", unless they are cached; " + phase.advice);
      continue;
    }
    throw Error(ErrorClass::kDevice, {"plan", phase.name + ": " + shortage, "work that fits beside the weights",
                                      suggestions(options, config, phases, phase)});
  }
}

}  // namespace emend::workflow
