// The fast engine beside the reference engine, in one run on one machine: seconds are only worth their ratio. With
// --quality editors beside each other, on the same facts (benchmarks.h).
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/devices/kernels.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/statistics.h>
#include <emend/models/config.h>
#include <emend/models/published_shapes.h>
#include <emend/workflow/preflight.h>
#include <emend/workflow/session.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <thread>

#include "../benchmarks.h"

namespace emend::tools {
namespace {

using nlohmann::ordered_json;

struct BenchArguments {
  RunOptions edit;
  QualityArguments quality;
  SyntheticOptions synthetic;       ///< with --shape; its growth and statistics tokens also without
  std::string shape;                ///< empty: a real model
  int64_t shape_layers = 0;         ///< 0: all
  std::vector<int64_t> widths;      ///< with --shape: hidden widths to time as well
  std::vector<std::string> phases;  ///< empty: all that there are
  std::vector<int64_t> neighbours, over_threads;

  [[nodiscard]] bool has(const char* phase) const {
    return phases.empty() || std::ranges::find(phases, phase) != phases.end();
  }
};

// So many programs, each of which keeps a core busy, while it lives.
class Neighbours {
 public:
  explicit Neighbours(int64_t busy) {
    while (std::ssize(threads_) < busy)
      threads_.emplace_back([](const std::stop_token& stop) {
        while (!stop.stop_requested()) {
        }
      });
  }

 private:
  std::vector<std::jthread> threads_;
};

class Bench {
 public:
  Bench(const BenchArguments& options, Common& common) : options_(options), common_(common) {}

  ordered_json run() {
    require_timed();
    if (!options_.shape.empty()) return run_shape();
    facts_ = options_.edit.facts.file.empty() ? datasets::load_bundled_facts(options_.edit.facts.read, common_.log)
                                              : workflow::load_named_facts(options_.edit.facts, common_);
    checkpoint_ = open_named(options_.edit.model);
    if (options_.has("targets")) (void)hparams();
    workflow::require_statistics(options_.edit, *checkpoint_);
    model_.emplace(load_named(checkpoint_, options_.edit.model, common_));
    describe(workflow::short_model_name(*checkpoint_));
    document_["editor"] = workflow::chosen_editor(options_.edit).name;
    document_["facts"] = facts_.facts.size();
    if (options_.has("targets")) edit();
    if (options_.has("statistics")) statistics();
    if (options_.has("evaluate")) evaluate();
    document_["peak_bytes"]["host"] = devices::device_memory_stats(c10::Device(c10::kCPU)).peak;
    return document_;
  }

 private:
  // What is asked for is timed, or refused.
  void require_timed() const {
    if (!options_.shape.empty() && !options_.phases.empty() && options_.has("evaluate"))
      refuse({"--phases", "evaluate with --shape", "targets, statistics",
              "random weights have no words to be judged by: time it with a model"});
    const bool asked = options_.has("targets"), solves = !options_.shape.empty() || solves_for_targets();
    if (asked && solves) return;
    for (const auto& [name, numbers] : {std::pair{"--growth", &options_.synthetic.growth},
                                        {"--neighbours", &options_.neighbours},
                                        {"--over-threads", &options_.over_threads}}) {
      if (numbers->empty()) continue;
      if (!asked) refuse({"--phases", "no targets, which " + std::string(name) + " times", "targets among them", ""});
      refuse({name, "an editor without targets, " + workflow::chosen_editor(options_.edit).name,
              "one that solves for targets, such as memit", ""});
    }
  }

  // An editor that optimises targets has a number of steps for them.
  [[nodiscard]] bool solves_for_targets() const {
    const auto fields = workflow::chosen_editor(options_.edit).fields();
    return std::ranges::find(fields, std::string("v_num_grad_steps"), &hparams::FieldInfo::name) != fields.end();
  }

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
    if (options_.edit.facts.read.limit < 1)
      refuse({setting("limit", std::to_string(options_.edit.facts.read.limit)), "no number of facts", "1 or more", ""});
    load_shape(0);
    describe(options_.shape);
    document_["parameters"] = model_->parameter_count();
    document_["facts"] = options_.edit.facts.read.limit;
    auto settings = options_.synthetic;
    settings.facts = options_.edit.facts.read.limit;
    settings.seed = options_.edit.seed;
    if (model_->placement().layers.front().is_cuda()) settings.solve_width = 16384;  // GPT-J's: minutes on a CPU
    settings.targets = options_.has("targets");
    settings.statistics = options_.has("statistics");
    settings.compute = editors::make_settings({.compute_dtype = options_.edit.compute_dtype}, *model_);
    document_.update(bench_synthetic(*model_, settings, common_, document_["machine"]));
    if (options_.has("targets")) in_company([&] { return synthetic_targets_s(settings); });
    for (const int64_t width : options_.widths) widen(width, settings);  // other models from here on
    return document_;
  }

  // In the arithmetic that was chosen, as with a model.
  double synthetic_targets_s(SyntheticOptions settings) {
    settings.targets = settings.statistics = false;
    settings.growth = {settings.facts};
    return bench_synthetic(*model_, settings, common_, document_["machine"])["growth"][0]["targets_s"];
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

  hparams::RawHparams hparams() const {
    const auto& edit = options_.edit;
    return workflow::find_hparams(workflow::chosen_editor(edit).name, edit.hparams, edit.set, *checkpoint_,
                                  common_.log);
  }
  std::unique_ptr<editors::Editor> make_editor() const {
    return workflow::chosen_editor(options_.edit).make(hparams(), *model_, common_.log);
  }

  struct Edited {
    Measure targets, insert;
    editors::Trace trace;
    nlohmann::json metrics;
  };

  // One edit of the unedited model, judged and taken back. `narrow`: in the arithmetic that was asked for.
  Edited edit_with(editors::Engine engine, bool narrow, std::span<const datasets::Fact> facts,
                   editors::StatisticsProvider& statistics, std::optional<editors::ContextTemplates>& contexts) {
    auto options = options_.edit;
    options.editor = workflow::chosen_editor(options_.edit).name;  // not what the model would be given
    options.engine = editors::to_string(engine);
    if (!narrow) options.compute_dtype = dtype_name(model_->dtype());
    options.watch = false;
    workflow::Handles lent = common_;
    lent.statistics = &statistics;
    workflow::Session session(*model_, options, lent);
    if (const auto layers = session.editor().statistics_layers(); !layers.empty()) statistics.prepare(*model_, layers);
    Edited edited;
    session.context().contexts = contexts;
    session.context().trace = &edited.trace;
    editors::EditResult result;
    const Measure all = measured(*model_, [&] { result = session.edit(facts); });
    if (result.contexts) contexts = result.contexts;
    edited.targets = {result.seconds["targets"], 1e-9 * static_cast<double>(result.flops["targets"]), all.peak_bytes};
    edited.insert = {result.seconds["insert"], 1e-9 * static_cast<double>(result.flops["insert"]), {}};
    if (facts.size() == facts_.facts.size())
      edited.metrics =
          evaluation::evaluate(*model_, facts_, {"counterfact"}, {.cancel = common_.cancel}).summary["counterfact"];
    session.undo();
    return edited;
  }

  void edit() {
    const auto statistics = workflow::statistics_provider(options_.edit, common_);
    std::optional<editors::ContextTemplates> contexts = workflow::named_contexts(options_.edit);
    const auto n = std::ssize(facts_.facts);
    const auto fast_with = [&](bool narrow) {
      return edit_with(editors::Engine::kFast, narrow, facts_.facts, *statistics, contexts);
    };
    const bool solves = solves_for_targets();
    const Edited fast = fast_with(false);
    if (solves)
      common_.log.info("bench.fast", "targets with the fast engine: " + std::to_string(fast.targets.seconds) + " s");
    std::optional<Edited> narrow;
    const auto& editor = workflow::chosen_editor(options_.edit);
    const auto compute =
        editors::make_settings({.compute_dtype = workflow::chosen_arithmetic(options_.edit, editor)}, *model_);
    const std::string arithmetic = compute.arithmetic_name(*model_);
    if (!compute.plain_arithmetic(*model_)) narrow = fast_with(true);
    const Edited reference = edit_with(editors::Engine::kReference, false, facts_.facts, *statistics, contexts);
    if (solves) document_["phases"]["targets"] = phase_document(reference.targets, fast.targets, peak_, n);
    if (solves && narrow)
      document_["phases"]["targets_" + arithmetic] =
          phase_document(reference.targets, narrow->targets, compute.tf32 ? peak_ : narrow_peak_, n);
    if (fast.insert.seconds > 0)
      document_["phases"]["keys_insert"] = phase_document(reference.insert, fast.insert, peak_, n);
    const auto difference = [&](const Edited& other) {
      return solves ? ordered_json(target_difference(reference.trace, other.trace)) : ordered_json();
    };
    document_["quality"] = {
        {"z_relative_difference", difference(fast)}, {"reference", reference.metrics}, {"fast", fast.metrics}};
    if (narrow) {
      document_["quality"]["z_relative_difference_" + arithmetic] = difference(*narrow);
      document_["quality"][arithmetic] = narrow->metrics;
    }
    for (const int64_t facts : options_.synthetic.growth) grow(facts, *statistics, contexts);
    in_company([&] { return fast_with(true).targets.seconds; });
  }

  // `seconds` of the targets beside busy programs, and on other numbers of threads.
  void in_company(const std::function<double()>& seconds) {
    for (const int64_t busy : options_.neighbours) beside(busy, seconds);
    if (!options_.over_threads.empty()) over_threads(seconds);
  }

  // The fast engine alone and beside busy neighbours, in turn. The best of each: what else the machine does only takes.
  void beside(int64_t busy, const std::function<double()>& seconds) {
    double alone = std::numeric_limits<double>::infinity(), beside = alone;
    for (int round = 0; round < 3; ++round) {
      alone = std::min(alone, seconds());
      const Neighbours neighbours(busy);
      beside = std::min(beside, seconds());
    }
    document_["neighbours"].push_back(
        {{"busy", busy}, {"targets_alone_s", alone}, {"targets_beside_s", beside}, {"ratio", beside / alone}});
  }

  void over_threads(const std::function<double()>& seconds) {
    const int before = at::get_num_threads();
    std::map<int64_t, double> best;
    for (int round = 0; round < 2; ++round)
      for (const int64_t threads : options_.over_threads) {
        at::set_num_threads(static_cast<int>(threads));
        const auto [found, is_new] = best.emplace(threads, std::numeric_limits<double>::infinity());
        found->second = std::min(found->second, seconds());
      }
    at::set_num_threads(before);
    for (const auto& [threads, taken] : best)
      document_["over_threads"].push_back({{"threads", threads}, {"targets_s", taken}});
  }

  // The fast engine on the first facts of the file.
  void grow(int64_t facts, editors::StatisticsProvider& statistics,
            std::optional<editors::ContextTemplates>& contexts) {
    const auto n = std::min(static_cast<size_t>(facts), facts_.facts.size());
    const Edited some = edit_with(editors::Engine::kFast, true, std::span(facts_.facts).first(n), statistics, contexts);
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
    const auto layers = make_editor()->statistics_layers();
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
    const devices::PlainOperators plain;
    const Measure reference = measured(*model_, [&] {
      for (const int layer : layers)
        for (const auto& row : rows) (void)editors::collect_second_moments(*model_, {row}, {layer}, settings);
    });
    document_["phases"]["statistics"] = phase_document(reference, fast, peak_);
    document_["phases"]["statistics"]["tokens"] = options_.synthetic.statistics_tokens;
  }

  void evaluate() {
    evaluation::EvaluateOptions settings{.bootstrap = 0, .cancel = common_.cancel};
    const auto judge = [&](bool reference) {
      settings.reference = reference;
      return measured(*model_, [&] { (void)evaluation::evaluate(*model_, facts_, {"counterfact"}, settings); });
    };
    const Measure fast = judge(false), reference = judge(true);
    document_["phases"]["evaluate"] = phase_document(reference, fast, peak_);
  }

  const BenchArguments& options_;
  Common& common_;
  ordered_json document_ = {{"machine", nullptr}, {"model", nullptr}};
  double peak_ = 1, narrow_peak_ = 1;
  datasets::FactSet facts_;
  std::shared_ptr<const models::Checkpoint> checkpoint_;
  std::optional<models::Model> model_;
};

std::string cell(const ordered_json& row, const char* key, int digits, double scale = 1, const char* unit = "") {
  if (!row.contains(key) || !row[key].is_number()) return "";
  return formatted("%.*f%s", digits, scale * row[key].get<double>(), unit);
}

std::string phases_text(const ordered_json& document) {
  const auto& peak = document["machine"]["gemm_peak_gflops"];
  const auto timed = document.value("phases", ordered_json::object());
  TextTable phases({"phase", "reference s", "fast s", "ratio", "of peak", "facts/s"});
  for (const auto& [name, phase] : timed.items())
    phases.add({name, cell(phase, "reference_s", 2), cell(phase, "fast_s", 2), cell(phase, "ratio", 1, 1, "x"),
                cell(phase, "fraction_of_peak", 0, 100, "%"), cell(phase, "facts_per_second", 2)});
  return document["model"].get<std::string>() + ", " + counted(document["facts"], "fact") + ", " +
         counted(document["machine"]["threads"], "thread") + "; products peak at " + cell(peak, "float32", 0) +
         " GFLOP/s in float32 (LibTorch's default: " + cell(peak, "float32_libtorch", 0) + "), " +
         cell(peak, "bfloat16", 0) + " in bfloat16\n" + phases.text("");
}

std::string growth_text(const ordered_json& document) {
  std::string text;
  const auto add = [&](const char* part, std::vector<std::string> heads, const auto& cells) {
    if (!document.contains(part)) return;
    TextTable table(std::move(heads));
    for (const auto& row : document[part]) table.add(cells(row));
    text += table.text("");
  };
  using Cells = std::vector<std::string>;
  add("growth", {"facts", "targets s", "targets s/fact"}, [](const ordered_json& row) {
    return Cells{row["facts"].dump(), cell(row, "targets_s", 2), cell(row, "targets_s_per_fact", 4)};
  });
  add("neighbours", {"busy neighbours", "targets s alone", "beside them", "ratio"}, [](const ordered_json& row) {
    return Cells{row["busy"].dump(), cell(row, "targets_alone_s", 2), cell(row, "targets_beside_s", 2),
                 cell(row, "ratio", 2, 1, "x")};
  });
  add("over_threads", {"threads", "targets s"}, [](const ordered_json& row) {
    return Cells{row["threads"].dump(), cell(row, "targets_s", 2)};
  });
  add("width_growth", {"width", "parameters", "targets s", "GFLOP a fact", "solve s"}, [](const ordered_json& row) {
    return Cells{row["width"].dump(), row["parameters"].dump(), cell(row, "targets_s", 2),
                 cell(row, "gflop_per_fact", 1), cell(row, "solve_s", 3)};
  });
  return text;
}

std::string quality_text(const ordered_json& quality) {
  // Null where the facts lack a part of it.
  const auto score = [&](const std::string& engine) {
    const auto text = cell(quality[engine], "score", 2);
    return text.empty() ? "–" : text;
  };
  // Null of an editor without targets.
  const auto difference = [&](const std::string& of) {
    const auto& value = quality["z_relative_difference" + of];
    return value.is_null() ? "–" : short_number(value);
  };
  std::string text = "largest relative difference of targets: " + difference("") + "; score reference " +
                     score("reference") + ", fast " + score("fast") + "\n";
  for (const std::string name : {"bfloat16", "tf32"})
    if (quality.contains(name))
      text += "with " + name + " arithmetic: difference " + difference("_" + name) + ", score " + score(name) + "\n";
  return text;
}

}  // namespace

VerbRun setup_bench(Options& o) {
  auto& options = o.arguments<BenchArguments>();
  auto& edit = options.edit;
  auto& synthetic = options.synthetic;
  edit.facts.read.limit = kFactsByPurpose;
  add_model_options(o, edit.model);
  add_fact_options(o, edit.facts, false);
  o.at("--limit").shown = "8; with --quality all";
  o.at("--limit").limits.min = kFactsByPurpose;
  add_method_options(o, edit);
  add_quality_options(o, options.quality, edit);
  o.group("Timing")
      .add("--shape", &options.shape,
           "random weights of a published size instead of a model: " + join(models::published_shape_names()),
           {.type = "NAME", .excludes = "--quality"})
      .add("--shape-layers", &options.shape_layers, "with so many layers only; 0: all",
           {.limits = kNonNegative, .needs = "--shape"})
      .add("--reference-facts", &synthetic.reference_facts,
           "with --shape: facts that the reference engine is measured on; 0: none",
           {.limits = kNonNegative, .needs = "--shape"})
      .add("--steps", &synthetic.steps, "with --shape: steps of the optimisation",
           {.limits = {2, 1000}, .needs = "--shape"})
      .add("--growth", &synthetic.growth, "numbers of facts for which the fast engine is timed as well",
           {.limits = kPositive, .list = true, .excludes = "--quality"})
      .add("--neighbours", &options.neighbours,
           "numbers of busy programs beside which the fast engine's targets are timed as well",
           {.limits = {1, 1024}, .list = true, .excludes = "--quality"})
      .add("--over-threads", &options.over_threads, "numbers of threads with which they are timed as well",
           {.limits = {1, 1024}, .list = true, .excludes = "--quality"})
      .add("--widths", &options.widths, "with --shape: hidden widths for which the fast engine is timed as well",
           {.limits = kPositive, .list = true, .needs = "--shape"})
      .add("--bench-tokens", &synthetic.statistics_tokens, "tokens of the statistics that are timed",
           {.limits = kCount, .excludes = "--quality"})
      .add("--phases", &options.phases, "what to time: targets (with insertion), statistics, evaluate",
           {.choices = {"targets", "statistics", "evaluate"},
            .shown = "targets,statistics,evaluate",
            .list = true,
            .excludes = "--quality"});
  o.footer =
      "Seconds depend on the machine and on what else it does; compare the ratio of one run.\n"
      "--batch-size, --protocol, --engine and the options of Evaluation and Guards go with --quality alone.\n"
      "Examples:\n"
      "  emend bench --limit 16\n"
      "  emend bench --quality --facts FILE --editors 'memit,latch,memit: v_lr=0.2' --out compared\n"
      "  emend bench --quality --out compared --resume    # goes on; with more --editors, adds them\n"
      "  emend bench --quality --out compared             # draws what is there";
  return [&o, &options](Common& common) {
    auto& limit = options.edit.facts.read.limit;
    if (limit == kFactsByPurpose) limit = options.quality.wanted ? -1 : 8;
    if (options.quality.wanted) return run_quality(o, options.quality, options.edit, common);
    const auto document = Bench(options, common).run();
    const bool judged = document.contains("quality");
    common.print(document,
                 phases_text(document) + growth_text(document) + (judged ? quality_text(document["quality"]) : ""));
    return 0;
  };
}

}  // namespace emend::tools
