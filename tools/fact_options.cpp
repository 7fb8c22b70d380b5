#include "fact_options.h"

#include <emend/core/cache_folder.h>
#include <emend/core/text.h>

namespace emend::tools {

void add_fact_options(Options& o, FactOptions& options, bool required, const std::string& unless) {
  o.group("Facts")
      .add("--facts", &options.file, "file of facts (JSON, JSON lines or CSV)",
           {.type = "FILE", .required = required, .unless = unless})
      .add("--format", &options.read.format, "facts file format: auto, " + fact_format_names(), {.type = "NAME"})
      .add("--limit", &options.read.limit, "facts to read; -1: all")
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
      .add("--free-limit", &options.free_limit, "facts of which --eval free reads texts; -1: all")
      .add("--health-limit", &options.health_limit, "items of each health task; -1: all")
      .add("--eval-batch-tokens", &options.batch_tokens, "tokens per forward pass of the evaluation",
           {.limits = kPositive})
      .add("--eval-engine", &options.engine,
           "fast, or reference: the published loop, a padded batch a case (the same numbers, slow)",
           {.choices = {"fast", "reference"}});
  add_cache_option(o.group("Evaluation"), options.cache, "folder of cached evaluations of unedited models");
}

void add_cache_option(OptionGroup group, std::string& cache, const std::string& meaning) {
  cache = user_cache().string();
  group.add("--cache", &cache, meaning, {.type = "DIR", .shown = "$EMEND_CACHE or ~/.cache/emend"});
}

}  // namespace emend::tools
