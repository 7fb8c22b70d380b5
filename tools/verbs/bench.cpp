// The fast engine beside the reference engine, in one run on one machine: seconds are only worth their ratio.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/editors/registry.h>
#include <emend/editors/statistics.h>
#include <emend/editors/transaction.h>
#include <emend/models/config.h>
#include <emend/models/family.h>
#include <emend/models/flops.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <random>
#include <thread>

#include "../edit/inputs.h"
#include "../run_directory.h"

namespace emend::tools {
namespace {

using nlohmann::ordered_json;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Options {
  EditOptions edit;
  int64_t statistics_tokens = 4096;
  std::vector<std::string> phases = {"targets", "statistics", "evaluate"};

  [[nodiscard]] bool has(const char* phase) const {
    return std::find(phases.begin(), phases.end(), phase) != phases.end();
  }
};

/// Seconds and arithmetic of one way to do a phase.
struct Measure {
  double seconds = 0;
  double gflop = 0;
};

// Runs `work` and measures it.
template <class Work>
Measure measured(const Work& work) {
  const int64_t flops = models::linear_flops();
  const double begin = now();
  work();
  return {now() - begin, 1e-9 * static_cast<double>(models::linear_flops() - flops)};
}

// Best of several products of square matrices, in 10⁹ operations a second.
double gemm_peak(at::ScalarType dtype, int64_t size = 1536) {
  const at::Tensor a = at::rand({size, size}, at::kFloat).to(dtype), b = at::rand({size, size}, at::kFloat).to(dtype);
  double best = 0;
  for (int i = 0; i < 8; ++i) {
    const double begin = now();
    (void)at::mm(a, b);
    best = std::max(best, 2e-9 * static_cast<double>(size * size * size) / (now() - begin));
  }
  return best;
}

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

ordered_json machine() {
  return {{"cpu", processor()},
          {"cores", static_cast<int64_t>(std::thread::hardware_concurrency())},
          {"threads", at::get_num_threads()},
          {"gemm_peak_gflops", {{"float32", gemm_peak(at::kFloat)}, {"bfloat16", gemm_peak(at::kBFloat16)}}}};
}

ordered_json phase(const Measure& reference, const Measure& fast, double peak) {
  ordered_json document = {
      {"reference_s", reference.seconds}, {"fast_s", fast.seconds}, {"ratio", reference.seconds / fast.seconds}};
  if (fast.gflop > 0) {
    document["gflop"] = fast.gflop;
    document["reference_gflop"] = reference.gflop;
    document["fraction_of_peak"] = fast.gflop / fast.seconds / peak;
  }
  return document;
}

class Bench {
 public:
  Bench(const Options& options, Common& common) : options_(options), common_(common) {}

  ordered_json run() {
    document_["machine"] = machine();
    peak_ = document_["machine"]["gemm_peak_gflops"]["float32"];
    facts_ = options_.edit.facts.file.empty() ? datasets::load_bundled_facts(options_.edit.facts.read, common_.log)
                                              : load_named_facts(options_.edit.facts, common_);
    checkpoint_ = open_named(options_.edit.model);
    model_.emplace(load_named(checkpoint_, options_.edit.model, common_));
    document_["model"] = checkpoint_->path().filename().string();
    document_["editor"] = editors::find_editor(options_.edit.editor).name;
    document_["facts"] = facts_.facts.size();
    document_["dtype"] = options_.edit.model.dtype;
    if (options_.has("targets")) edit();
    if (options_.has("statistics")) statistics();
    if (options_.has("evaluate")) evaluate();
    document_["peak_bytes"]["host"] = devices::device_memory_stats(c10::Device(c10::kCPU)).peak;
    return document_;
  }

 private:
  struct Edited {
    Measure targets, insert;
    editors::Trace trace;
    nlohmann::json metrics;
  };

  // One edit of the unedited model, judged and taken back.
  Edited edit_with(editors::Engine engine, editors::StatisticsProvider& statistics,
                   std::optional<editors::ContextTemplates>& contexts) {
    const auto raw =
        editor_hparams(options_.edit.editor, options_.edit.hparams, options_.edit.set, *checkpoint_, &*model_, common_);
    const auto editor = editors::make_editor(options_.edit.editor, raw, *model_, common_.log);
    if (const auto layers = editor->statistics_layers(); !layers.empty()) statistics.prepare(*model_, layers);
    Edited edited;
    editors::EditTransaction transaction(*model_);
    editors::EditContext context;
    context.seed = options_.edit.seed;
    context.engine = engine;
    context.contexts = contexts;
    context.statistics = &statistics;
    context.transaction = &transaction;
    context.cancel = common_.cancel;
    context.progress = common_.progress;
    context.log = common_.log;
    context.trace = &edited.trace;
    editors::EditResult result;
    const Measure all = measured([&] { result = editor->edit(*model_, facts_.facts, context); });
    contexts = context.contexts;
    edited.targets = {result.seconds["targets"], all.gflop};
    edited.insert.seconds = result.seconds["insert"];
    evaluation::EvaluateOptions evaluate;
    evaluate.cancel = common_.cancel;
    edited.metrics = evaluation::evaluate(*model_, facts_, {"counterfact"}, evaluate).summary["counterfact"];
    transaction.restore();
    return edited;
  }

  void edit() {
    const auto statistics = statistics_provider(options_.edit, common_);
    std::optional<editors::ContextTemplates> contexts = named_contexts(options_.edit.contexts);
    const Edited fast = edit_with(editors::Engine::kFast, *statistics, contexts);
    common_.log.info("bench.fast", "targets with the fast engine: " + std::to_string(fast.targets.seconds) + " s");
    const Edited reference = edit_with(editors::Engine::kReference, *statistics, contexts);
    document_["phases"]["targets"] = phase(reference.targets, fast.targets, peak_);
    document_["phases"]["keys_insert"] = phase(reference.insert, fast.insert, peak_);
    document_["quality"] = {{"z_relative_difference", target_difference(reference.trace, fast.trace)},
                            {"reference", reference.metrics},
                            {"fast", fast.metrics}};
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
    for (int64_t left = options_.statistics_tokens; left > 0;) {
      const auto length = std::min<int64_t>({left, model_->max_positions(), 32 + static_cast<int64_t>(random() % 225)});
      auto& row = rows.emplace_back();
      for (int64_t t = 0; t < length; ++t)
        row.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(model_->vocab_size())));
      left -= length;
    }
    editors::StatisticsOptions settings;
    settings.cancel = common_.cancel;
    const Measure fast = measured([&] { (void)editors::collect_second_moments(*model_, rows, layers, settings); });
    const Measure reference = measured([&] {
      for (const int layer : layers)
        for (const auto& row : rows) (void)editors::collect_second_moments(*model_, {row}, {layer}, settings);
    });
    document_["phases"]["statistics"] = phase(reference, fast, peak_);
    document_["phases"]["statistics"]["tokens"] = options_.statistics_tokens;
  }

  void evaluate() {
    evaluation::EvaluateOptions settings;
    settings.cancel = common_.cancel;
    settings.bootstrap = 0;
    const auto judge = [&](bool reference) {
      settings.reference = reference;
      return measured([&] { (void)evaluation::evaluate(*model_, facts_, {"counterfact"}, settings); });
    };
    const Measure fast = judge(false), reference = judge(true);
    document_["phases"]["evaluate"] = phase(reference, fast, peak_);
  }

  const Options& options_;
  Common& common_;
  ordered_json document_ = {{"machine", nullptr}, {"model", nullptr}};
  double peak_ = 1;
  datasets::FactSet facts_;
  std::shared_ptr<const models::Checkpoint> checkpoint_;
  std::optional<models::Model> model_;
};

void print(const ordered_json& document) {
  std::printf("%s, %s facts, %s threads; float32 products peak at %.0f GFLOP/s\n",
              document["model"].get<std::string>().c_str(), document["facts"].dump().c_str(),
              document["machine"]["threads"].dump().c_str(),
              document["machine"]["gemm_peak_gflops"]["float32"].get<double>());
  std::printf("%-12s %12s %12s %8s %10s\n", "phase", "reference s", "fast s", "ratio", "of peak");
  for (const auto& [name, phase] : document["phases"].items()) {
    std::printf("%-12s %12.2f %12.2f %7.1fx", name.c_str(), phase["reference_s"].get<double>(),
                phase["fast_s"].get<double>(), phase["ratio"].get<double>());
    if (phase.contains("fraction_of_peak")) std::printf(" %9.0f%%", 100 * phase["fraction_of_peak"].get<double>());
    std::printf("\n");
  }
  if (document.contains("quality"))
    std::printf("largest relative difference of targets: %.2g; score reference %.2f, fast %.2f\n",
                document["quality"]["z_relative_difference"].get<double>(),
                document["quality"]["reference"].value("score", 0.0), document["quality"]["fast"].value("score", 0.0));
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
  command.add_option("--stats-tokens", edit.stats_tokens, "tokens of the statistics that the edit uses")
      ->group("Bench");
  command.add_option("--cache", edit.metrics.cache, "folder of cached statistics")->group("Bench")->type_name("DIR");
  command.add_option("--bench-tokens", options->statistics_tokens, "tokens of the statistics that are timed")
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
