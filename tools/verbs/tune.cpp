#include <emend/core/atomic_file.h>
#include <emend/core/text.h>
#include <emend/editors/packs/pack.h>
#include <emend/editors/packs/peft.h>
#include <emend/editors/steps/tuning.h>
#include <emend/evaluation/report.h>
#include <emend/models/config.h>
#include <emend/models/family.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/workflow/preflight.h>
#include <emend/workflow/run_directory.h>
#include <emend/workflow/save_formats.h>

#include <sstream>

#include "../options.h"

namespace emend::tools {
namespace {

struct TuneArguments {
  ModelOptions model;
  std::string data, format, out;
  int64_t limit = -1, max_length = 512;
  editors::TuneOptions tune;
  bool checkpointing = false, merge = false;
};

void add_data_options(Options& o, TuneArguments& options) {
  o.group("Data")
      .add("--data", &options.data,
           "instructions: JSON or JSON lines with instruction, input, output; or messages; or conversations",
           {.type = "FILE", .required = true})
      .add("--limit", &options.limit, "rows to read; -1: all", {.limits = kCountOrAll})
      .add("--max-length", &options.max_length, "tokens of a row; what is longer is cut", {.limits = {.min = 2}})
      .add("--chat-format", &options.format, "how turns are written; default: told by the model's template",
           {.type = "NAME", .choices = models::chat_format_names()});
}

void add_adapter_options(Options& o, editors::LoraShape& lora) {
  o.group("Adapter")
      .add("-r,--rank", &lora.rank, "rank of the adapters", {.limits = kCount})
      .add("--alpha", &lora.alpha, "lora_alpha: the change is (alpha/rank) B A", {.limits = kPositive})
      .add("--dropout", &lora.dropout, "share of the inputs left out in training",
           {.limits = {.min = 0, .max = 1, .below = true}})
      .add("--target-modules", &lora.target_modules,
           "modules with an adapter (q_proj,v_proj or all-linear); default: queries and values",
           {.type = "LIST", .list = true})
      .add("--layers", &lora.layers, "blocks with adapters; default: all",
           {.type = "LIST", .limits = kNonNegative, .list = true});
}

void add_training_options(Options& o, TuneArguments& options) {
  auto& tune = options.tune;
  o.group("Training")
      .add("--lr", &tune.lr, "learning rate of AdamW", {.limits = kPositive})
      .add("--weight-decay", &tune.weight_decay, "weight decay of AdamW", {.limits = kNonNegative})
      .add("--warmup", &tune.warmup_steps, "steps over which the learning rate rises", {.limits = kNonNegative})
      .add("--schedule", &tune.schedule, "learning rate after the warm-up: linear, cosine or constant",
           {.choices = {"linear", "cosine", "constant"}})
      .add("--batch-size", &tune.batch_size, "rows of one pass", {.limits = kCount})
      .add("--accumulate", &tune.accumulation, "passes of one optimiser step", {.limits = kCount})
      .add("--epochs", &tune.epochs, "times through the rows", {.limits = kNonNegative})
      .add("--steps", &tune.steps, "optimiser steps instead of --epochs; 0: by epochs", {.limits = kNonNegative})
      .add("--max-grad-norm", &tune.max_grad_norm, "gradients are cut to this norm; 0: never", {.limits = kNonNegative})
      .add("--gradient-checkpointing", &options.checkpointing,
           "keep the activations of a few layers at a time: less memory, about a third more time")
      .add("--seed", &tune.seed, "random seed of adapters, order and dropout");
  o.group("Run")
      .add("--out", &options.out, "run folder; default: runs/<time>-tune-<model>", {.type = "DIR"})
      .add("--merge", &options.merge, "also write the model with the adapter merged in");
}

nlohmann::ordered_json results_document(const TuneArguments& options, const models::Model& model,
                                        const editors::TuningRows& rows, const editors::TuneResult& result) {
  nlohmann::ordered_json document;
  document["schema"] = 1;
  document["model"] = {{"path", model.checkpoint().path().string()},
                       {"family", model.family().name},
                       {"fingerprint", model.fingerprint()},
                       {"parameters", model.parameter_count()}};
  const auto& tune = options.tune;
  document["tune"] = {
      {"data", options.data},
      {"rank", tune.lora.rank},
      {"alpha", tune.lora.alpha},
      {"dropout", tune.lora.dropout},
      {"lr", tune.lr},
      {"weight_decay", tune.weight_decay},
      {"warmup", tune.warmup_steps},
      {"schedule", tune.schedule},
      {"batch_size", tune.batch_size},
      {"accumulate", tune.accumulation},
      {"epochs", tune.steps > 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(tune.epochs)},
      {"target_modules", tune.lora.target_modules},
      {"layers", tune.lora.layers},
      {"max_grad_norm", tune.max_grad_norm},
      {"chat_format", options.format.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(options.format)},
      {"seed", tune.seed},
      {"max_length", options.max_length}};
  document["rows"] = {
      {"used", rows.rows.size()}, {"cut", rows.cut}, {"dropped", rows.dropped}, {"labels", rows.labels}};
  document["trained_parameters"] = result.parameters;
  auto& weights = document["weights_changed"] = nlohmann::ordered_json::array();
  for (const auto& delta : result.deltas) weights.push_back(delta.weight);
  auto& steps = document["steps"] = nlohmann::ordered_json::array();
  for (const auto& step : result.steps)
    steps.push_back({{"loss", step.loss}, {"lr", step.lr}, {"grad_norm", step.grad_norm}, {"labels", step.labels}});
  document["device_map"] = model.placement().to_json(models::device_module_names(model.family(), model.config()));
  document["dtype"] = options.model.dtype;
  document["seconds"] = {{"tune", result.seconds}};
  return document;
}

// The adapter in PEFT's form, and with --merge the whole model; returns what → path.
nlohmann::ordered_json save(const TuneArguments& options, const workflow::RunDirectory& folder, models::Model& model,
                            const editors::TuneResult& result, const Common& common) {
  editors::EditResult edit;
  edit.editor = "tune";
  edit.hparams = nlohmann::json::object();
  edit.deltas = result.deltas;
  edit.seed = options.tune.seed;
  const auto pack = editors::EditPack::from_results(model, std::span<const editors::EditResult>(&edit, 1), {});
  nlohmann::ordered_json files;
  editors::export_peft(folder / "adapter", pack, model);
  files["adapter"] = (folder / "adapter").string();
  if (options.merge) try {
      (void)workflow::save_format("model").write(
          {.model = model, .pack = pack, .out = folder / "model", .lent = common});
      files["merged model"] = (folder / "model").string();
    } catch (...) {
      common.log.warning("tune.adapter", "the adapter is whole: " + files["adapter"].get<std::string>());
      throw;
    }
  return files;
}

void write_report(const workflow::RunDirectory& folder, const nlohmann::ordered_json& results,
                  const editors::TuneResult& result, const Common& common) {
  evaluation::RunReport report;
  report.results = results;
  nlohmann::json losses = nlohmann::json::array();
  for (const auto& step : result.steps) losses.push_back(step.loss);
  report.extras["training_loss"] = losses;
  report.extras["command"] = command_text(common.command_line);
  report.extras["directory"] = folder.path().string();
  folder.write_json("report.json", report.extras);
  write_file(folder / "report.html", evaluation::render_report(report));
}

int run_tune(const TuneArguments& given, Common& common) {
  TuneArguments options = given;
  options.tune.lora.seed = options.tune.seed;
  options.tune.checkpoint_layers = options.checkpointing ? 4 : 0;
  if (options.tune.steps > 0 && options.tune.epochs != editors::TuneOptions().epochs)
    refuse({"--steps", "--epochs beside it", "one of them", ""});
  options.tune.cancel = common.cancel;
  options.tune.progress = common.progress;
  const auto instructions = datasets::load_instructions(options.data, options.limit);
  const auto checkpoint = open_named(options.model);
  workflow::require_layers(options.tune.lora.layers, *checkpoint, "--layers");
  const auto width = models::parse_config(checkpoint->config(), checkpoint->path().string()).hidden_size;
  if (options.tune.lora.rank > width)
    refuse({"--rank", std::to_string(options.tune.lora.rank), "a rank from 1 to " + std::to_string(width),
            "no layer of the model is wider"});
  const workflow::RunDirectory folder(
      options.out.empty() ? workflow::RunDirectory::default_name("tune", workflow::short_model_name(*checkpoint))
                          : std::filesystem::path(options.out),
      workflow::Earlier::kNone);
  folder.require_free({"adapter", "model", "report.html", "report.json"});
  workflow::warn_of_edits_beside(*checkpoint, "tune.runtime", common.log);
  auto model = load_named(checkpoint, options.model, common);
  const auto format = models::chat_format_of(model.tokenizer(), options.format);
  const int64_t max_length = std::min(options.max_length, model.max_positions());
  const auto rows = editors::tuning_rows(model, instructions, format, max_length, options.data);
  common.log.info("tune.rows", counted(rows.rows.size(), "row") + " with " + std::to_string(rows.labels) +
                                   " tokens to learn, written as " + format.name);
  if (rows.cut > 0)
    common.log.warning(
        "tune.cut", "cut at " + std::to_string(max_length) + " tokens (--max-length, or all that the model takes): " +
                        counted(rows.cut, "row") + ", of which " + std::to_string(rows.dropped) + " were left out");
  const auto result = editors::tune(model, rows.rows, options.tune);
  auto document = results_document(options, model, rows, result);
  document["files"] = save(options, folder, model, result, common);
  document["command"] = common.command_line;
  write_report(folder, document, result, common);
  document["files"]["report"] = (folder / "report.html").string();
  folder.write_json("results.json", document);
  std::ostringstream text;
  text << "Trained " << result.parameters << " parameters in " << counted(result.deltas.size(), "weight") << ", "
       << counted(result.steps.size(), "step") << ", " << result.seconds << " s\n"
       << "Loss: first step " << result.steps.front().loss << ", last step " << result.steps.back().loss << '\n';
  for (const auto& [what, where] : document["files"].items()) text << what << ": " << where.get<std::string>() << '\n';
  common.print(document, text.str());
  return 0;
}

}  // namespace

VerbRun setup_tune(Options& o) {
  auto& options = o.arguments<TuneArguments>();
  add_model_options(o, options.model);
  add_data_options(o, options);
  add_adapter_options(o, options.tune.lora);
  add_training_options(o, options);
  o.footer =
      "Example\n"
      "  emend tune --data instructions.json --steps 50 --out runs/tuned --merge\n"
      "  emend generate --model runs/tuned/model --prompt \"…\"";
  return [&options](Common& common) { return run_tune(options, common); };
}

}  // namespace emend::tools
