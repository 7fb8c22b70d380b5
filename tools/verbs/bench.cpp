// The fast engine beside the reference engine, in one run on one machine: seconds are only worth their ratio.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/editors/registry.h>
#include <emend/editors/statistics.h>
#include <emend/editors/transaction.h>
#include <emend/models/config.h>
#include <emend/models/family.h>
#include <emend/models/products.h>
#include <emend/models/published_shapes.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <random>

#include "../compute_options.h"
#include "../edit/inputs.h"
#include "../run_directory.h"
#include "../statistics_options.h"
#include "bench_measure.h"
#include "bench_synthetic.h"

namespace emend::tools {
namespace {

using nlohmann::ordered_json;

struct Options {
  EditOptions edit;
  SyntheticOptions synthetic;   ///< with --shape; its growth and statistics tokens also without
  std::string shape;            ///< empty: a real model
  int64_t shape_layers = 0;     ///< 0: all
  std::vector<int64_t> widths;  ///< with --shape: hidden widths to time as well
  std::vector<std::string> phases = {"targets", "statistics", "evaluate"};

  [[nodiscard]] bool has(const char* phase) const {
    return std::find(phases.begin(), phases.end(), phase) != phases.end();
  }
};

class Bench {
 public:
  Bench(const Options& options, Common& common) : options_(options), common_(common) {}

  ordered_json run() {
    if (!options_.shape.empty()) return run_shape();
    facts_ = options_.edit.facts.file.empty() ? datasets::load_bundled_facts(options_.edit.facts.read, common_.log)
                                              : load_named_facts(options_.edit.facts, common_);
    checkpoint_ = open_named(options_.edit.model);
    model_.emplace(load_named(checkpoint_, options_.edit.model, common_));
    describe(checkpoint_->path().filename().string());
    document_["editor"] = editors::find_editor(options_.edit.editor).name;
    document_["facts"] = facts_.facts.size();
    if (options_.has("targets")) edit();
    if (options_.has("statistics")) statistics();
    if (options_.has("evaluate")) evaluate();
    document_["peak_bytes"]["host"] = devices::device_memory_stats(c10::Device(c10::kCPU)).peak;
    return document_;
  }

 private:
  void describe(const std::string& name) {
    document_["machine"] = describe_machine(*model_);
    document_["model"] = name;
    document_["dtype"] = options_.edit.model.dtype;
    peak_ = document_["machine"]["gemm_peak_gflops"][model_->dtype() == at::kBFloat16 ? "bfloat16" : "float32"];
    narrow_peak_ = document_["machine"]["gemm_peak_gflops"]["bfloat16"];
  }

  // width 0: as published.
  void load_shape(int64_t width) {
    model_.reset();
    const auto config = models::published_shape(options_.shape, options_.shape_layers, width);
    model_.emplace(
        load_named(models::random_weights(config, options_.shape, options_.edit.seed), options_.edit.model, common_));
  }

  // Random weights of a published size.
  ordered_json run_shape() {
    load_shape(0);
    describe(options_.shape);
    document_["parameters"] = model_->parameter_count();
    document_["facts"] = options_.edit.facts.read.limit;
    auto settings = options_.synthetic;
    settings.facts = options_.edit.facts.read.limit;
    settings.seed = options_.edit.seed;
    settings.compute = chosen_compute(options_.edit.compute_dtype, editors::Engine::kFast, *model_);
    document_.update(bench_synthetic(*model_, settings, common_, document_["machine"]));
    for (const int64_t width : options_.widths) widen(width, settings);
    return document_;
  }

  // The same layers with other widths.
  void widen(int64_t width, SyntheticOptions settings) {
    load_shape(width);
    settings.reference_facts = 0;
    settings.growth.clear();
    const auto phases = bench_synthetic(*model_, settings, common_, document_["machine"])["phases"];
    ordered_json row = {{"width", width}, {"parameters", model_->parameter_count()}};
    for (const auto& [name, phase] : phases.items()) {
      row[name + "_s"] = phase["fast_s"];
      if (name == "targets") row["gflop_per_fact"] = phase["gflop"].get<double>() / static_cast<double>(settings.facts);
    }
    document_["width_growth"].push_back(std::move(row));
  }

  struct Edited {
    Measure targets, insert;
    editors::Trace trace;
    nlohmann::json metrics;
  };

  // One edit of the unedited model, judged and taken back.
  Edited edit_with(editors::Engine engine, const ComputeChoice& compute, std::span<const datasets::Fact> facts,
                   editors::StatisticsProvider& statistics, std::optional<editors::ContextTemplates>& contexts) {
    const auto raw =
        editor_hparams(options_.edit.editor, options_.edit.hparams, options_.edit.set, *checkpoint_, &*model_, common_);
    const auto editor = editors::make_editor(options_.edit.editor, raw, *model_, common_.log);
    if (const auto layers = editor->statistics_layers(); !layers.empty()) statistics.prepare(*model_, layers);
    Edited edited;
    editors::EditTransaction transaction(*model_);
    editors::EditContext context;
    context.seed = options_.edit.seed;
    context.engine = engine;
    context.compute_dtype = compute.dtype;
    context.tf32 = compute.tf32;
    context.contexts = contexts;
    context.statistics = &statistics;
    context.transaction = &transaction;
    context.cancel = common_.cancel;
    context.progress = common_.progress;
    context.log = common_.log;
    context.trace = &edited.trace;
    editors::EditResult result;
    const Measure all = measured(*model_, [&] { result = editor->edit(*model_, facts, context); });
    contexts = context.contexts;
    edited.targets = {result.seconds["targets"], all.gflop, all.peak_bytes};
    edited.insert.seconds = result.seconds["insert"];
    if (facts.size() == facts_.facts.size()) {
      evaluation::EvaluateOptions evaluate;
      evaluate.cancel = common_.cancel;
      edited.metrics = evaluation::evaluate(*model_, facts_, {"counterfact"}, evaluate).summary["counterfact"];
    }
    transaction.restore();
    return edited;
  }

  void edit() {
    const auto statistics = statistics_provider(options_.edit, common_);
    std::optional<editors::ContextTemplates> contexts = named_contexts(options_.edit.contexts);
    const auto n = static_cast<int64_t>(facts_.facts.size());
    const auto fast_with = [&](const ComputeChoice& compute) {
      return edit_with(editors::Engine::kFast, compute, facts_.facts, *statistics, contexts);
    };
    const Edited fast = fast_with({});
    common_.log.info("bench.fast", "targets with the fast engine: " + std::to_string(fast.targets.seconds) + " s");
    std::optional<Edited> narrow;
    const auto compute = chosen_compute(options_.edit.compute_dtype, editors::Engine::kFast, *model_);
    if (!compute.plain) narrow = fast_with(compute);
    const Edited reference = edit_with(editors::Engine::kReference, {}, facts_.facts, *statistics, contexts);
    document_["phases"]["targets"] = phase_document(reference.targets, fast.targets, peak_, n);
    if (narrow)
      document_["phases"]["targets_" + compute.name] =
          phase_document(reference.targets, narrow->targets, compute.tf32 ? peak_ : narrow_peak_, n);
    document_["phases"]["keys_insert"] = phase_document(reference.insert, fast.insert, peak_, n);
    document_["quality"] = {{"z_relative_difference", target_difference(reference.trace, fast.trace)},
                            {"reference", reference.metrics},
                            {"fast", fast.metrics}};
    if (narrow) {
      document_["quality"]["z_relative_difference_" + compute.name] = target_difference(reference.trace, narrow->trace);
      document_["quality"][compute.name] = narrow->metrics;
    }
    for (const int64_t facts : options_.synthetic.growth) grow(facts, compute, *statistics, contexts);
  }

  // The fast engine on the first facts of the file.
  void grow(int64_t facts, const ComputeChoice& compute, editors::StatisticsProvider& statistics,
            std::optional<editors::ContextTemplates>& contexts) {
    const auto n = std::min(static_cast<size_t>(facts), facts_.facts.size());
    const Edited some =
        edit_with(editors::Engine::kFast, compute, std::span(facts_.facts).first(n), statistics, contexts);
    document_["growth"].push_back({{"facts", n},
                                   {"targets_s", some.targets.seconds},
                                   {"targets_s_per_fact", some.targets.seconds / static_cast<double>(n)},
                                   {"insert_s", some.insert.seconds},
                                   {"peak_bytes", some.targets.peak_bytes}});
  }

  // Largest ‖z_fast − z_reference‖/‖z_reference‖ over the facts.
  static double target_difference(const editors::Trace& reference, const editors::Trace& fast) {
    double most = 0;
    for (const auto& [name, value] : reference) {
      if (!name.ends_with(".target")) continue;
      const auto other = fast.find(name);
      if (other == fast.end())
        throw Error(ErrorClass::kNumeric,
                    {name, "found by the reference engine alone", "a target from both engines", ""});
      const at::Tensor a = value.to(at::kDouble), b = other->second.to(at::kDouble);
      most = std::max(most, ((a - b).norm() / a.norm()).item<double>());
    }
    return most;
  }

  // A pass over the text for each layer, one document after the other, as published; and one packed pass for all.
  void statistics() {
    const auto raw =
        editor_hparams(options_.edit.editor, options_.edit.hparams, options_.edit.set, *checkpoint_, &*model_, common_);
    const auto layers = editors::make_editor(options_.edit.editor, raw, *model_, common_.log)->statistics_layers();
    if (layers.empty()) return;
    std::mt19937_64 random(options_.edit.seed);
    std::vector<std::vector<int64_t>> rows;
    for (int64_t left = options_.synthetic.statistics_tokens; left > 0;) {
      const auto length = std::min<int64_t>({left, model_->max_positions(), 32 + static_cast<int64_t>(random() % 225)});
      auto& row = rows.emplace_back();
      for (int64_t t = 0; t < length; ++t)
        row.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(model_->vocab_size())));
      left -= length;
    }
    editors::StatisticsOptions settings;
    settings.cancel = common_.cancel;
    const Measure fast =
        measured(*model_, [&] { (void)editors::collect_second_moments(*model_, rows, layers, settings); });
    const models::PlainProducts plain;
    const Measure reference = measured(*model_, [&] {
      for (const int layer : layers)
        for (const auto& row : rows) (void)editors::collect_second_moments(*model_, {row}, {layer}, settings);
    });
    document_["phases"]["statistics"] = phase_document(reference, fast, peak_);
    document_["phases"]["statistics"]["tokens"] = options_.synthetic.statistics_tokens;
  }

  void evaluate() {
    evaluation::EvaluateOptions settings;
    settings.cancel = common_.cancel;
    settings.bootstrap = 0;
    const auto judge = [&](bool reference) {
      settings.reference = reference;
      return measured(*model_, [&] { (void)evaluation::evaluate(*model_, facts_, {"counterfact"}, settings); });
    };
    const Measure fast = judge(false), reference = judge(true);
    document_["phases"]["evaluate"] = phase_document(reference, fast, peak_);
  }

  const Options& options_;
  Common& common_;
  ordered_json document_ = {{"machine", nullptr}, {"model", nullptr}};
  double peak_ = 1, narrow_peak_ = 1;
  datasets::FactSet facts_;
  std::shared_ptr<const models::Checkpoint> checkpoint_;
  std::optional<models::Model> model_;
};

void print(const ordered_json& document) {
  std::printf(
      "%s, %s facts, %s threads; products peak at %.0f GFLOP/s in float32 (LibTorch's default: %.0f), %.0f in "
      "bfloat16\n",
      document["model"].get<std::string>().c_str(), document["facts"].dump().c_str(),
      document["machine"]["threads"].dump().c_str(), document["machine"]["gemm_peak_gflops"]["float32"].get<double>(),
      document["machine"]["gemm_peak_gflops"]["float32_libtorch"].get<double>(),
      document["machine"]["gemm_peak_gflops"]["bfloat16"].get<double>());
  std::printf("%-18s %12s %12s %8s %10s %10s\n", "phase", "reference s", "fast s", "ratio", "of peak", "facts/s");
  for (const auto& entry : document["phases"].items()) {
    const auto& phase = entry.value();
    const auto cell = [&](const char* key, int width, int digits, double scale, const char* unit) {
      if (phase.contains(key)) {
        std::printf(" %*.*f%s", width, digits, scale * phase[key].get<double>(), unit);
      } else {
        std::printf(" %*s%s", width, "", std::string(std::strlen(unit), ' ').c_str());
      }
    };
    std::printf("%-18s", entry.key().c_str());
    cell("reference_s", 12, 2, 1, "");
    cell("fast_s", 12, 2, 1, "");
    cell("ratio", 7, 1, 1, "x");
    cell("fraction_of_peak", 9, 0, 100, "%");
    cell("facts_per_second", 10, 2, 1, "");
    std::printf("\n");
  }
  if (document.contains("growth")) {
    std::printf("%-12s %12s %16s\n", "facts", "targets s", "targets s/fact");
    for (const auto& row : document["growth"])
      std::printf("%-12s %12.2f %16.4f\n", row["facts"].dump().c_str(), row["targets_s"].get<double>(),
                  row["targets_s_per_fact"].get<double>());
  }
  if (document.contains("width_growth")) {
    std::printf("%-12s %12s %12s %14s %12s\n", "width", "parameters", "targets s", "GFLOP a fact", "solve s");
    for (const auto& row : document["width_growth"])
      std::printf("%-12s %12s %12.2f %14.1f %12.3f\n", row["width"].dump().c_str(), row["parameters"].dump().c_str(),
                  row["targets_s"].get<double>(), row["gflop_per_fact"].get<double>(), row.value("solve_s", 0.0));
  }
  if (document.contains("quality"))
    std::printf("largest relative difference of targets: %.2g; score reference %.2f, fast %.2f\n",
                document["quality"]["z_relative_difference"].get<double>(),
                document["quality"]["reference"].value("score", 0.0), document["quality"]["fast"].value("score", 0.0));
  for (const std::string name : {"bfloat16", "tf32"})
    if (document.contains("quality") && document["quality"].contains(name))
      std::printf("with %s arithmetic: difference %.2g, score %.2f\n", name.c_str(),
                  document["quality"]["z_relative_difference_" + name].get<double>(),
                  document["quality"][name].value("score", 0.0));
}

}  // namespace

VerbRun setup_bench(CLI::App& command) {
  auto options = std::make_shared<Options>();
  auto& edit = options->edit;
  edit.facts.read.limit = 8;
  add_model_options(command, edit.model);
  add_fact_options(command, edit.facts, false);
  command.add_option("--editor", edit.editor, "locate-then-edit method")->group("Bench")->type_name("NAME");
  command.add_option("--hparams", edit.hparams, "hyper-parameters; default: the preset for the model")
      ->group("Bench")
      ->type_name("FILE|NAME");
  command.add_option("--set", edit.set, "override one hyper-parameter, KEY=VALUE (repeatable)")->group("Bench");
  command.add_option("--corpus", edit.corpus, "text for the key statistics; default: sampled from the model")
      ->group("Bench")
      ->type_name("FILE");
  add_stats_amount_options(command, edit.stats_tokens, edit.stats_import, "Bench");
  add_compute_option(command, edit.compute_dtype, "Bench");
  std::string shapes;
  for (const auto& name : models::published_shape_names()) shapes += (shapes.empty() ? "" : ", ") + name;
  command.add_option("--shape", options->shape, "random weights of a published size instead of a model: " + shapes)
      ->group("Bench")
      ->type_name("NAME");
  command.add_option("--shape-layers", options->shape_layers, "with so many layers only; 0: all")
      ->group("Bench")
      ->needs("--shape")
      ->check(CLI::NonNegativeNumber);
  command
      .add_option("--reference-facts", options->synthetic.reference_facts,
                  "with --shape: facts that the reference engine is measured on; 0: none")
      ->group("Bench")
      ->needs("--shape")
      ->check(CLI::NonNegativeNumber);
  command.add_option("--steps", options->synthetic.steps, "with --shape: steps of the optimisation")
      ->group("Bench")
      ->needs("--shape")
      ->check(CLI::Range(2, 1000));
  command
      .add_option("--growth", options->synthetic.growth, "numbers of facts for which the fast engine is timed as well")
      ->group("Bench")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  command
      .add_option("--widths", options->widths, "with --shape: hidden widths for which the fast engine is timed as well")
      ->group("Bench")
      ->needs("--shape")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  command.add_option("--cache", edit.metrics.cache, "folder of cached statistics")->group("Bench")->type_name("DIR");
  command.add_option("--bench-tokens", options->synthetic.statistics_tokens, "tokens of the statistics that are timed")
      ->group("Bench");
  command.add_option("--phases", options->phases, "what to time: targets (with insertion), statistics, evaluate")
      ->group("Bench")
      ->delimiter(',')
      ->check(CLI::IsMember({"targets", "statistics", "evaluate"}));
  command.add_option("--seed", edit.seed, "random seed")->group("Bench");
  command.footer("Seconds depend on the machine and on what else it does; compare the ratio of one run.");
  return [options](Common& common) {
    const auto document = Bench(*options, common).run();
    if (common.json) {
      std::cout << dump_json(document) << '\n';
    } else {
      print(document);
    }
    return 0;
  };
}

}  // namespace emend::tools
