// From options to what an edit needs: facts, hyper-parameters, contexts, statistics, arithmetic, placement.
#pragma once

#include <emend/datasets/lint.h>
#include <emend/devices/runtime.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/statistics.h>
#include <emend/evaluation/evaluation.h>
#include <emend/hparams/raw.h>
#include <emend/models/checkpoint.h>
#include <emend/models/placing.h>
#include <emend/workflow/handles.h>
#include <emend/workflow/options.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace emend::workflow {

/// Reads the facts and logs how many. Throws Error(kInvalidArgument) if there are none, Error(kCorruption) for a row
/// that is not a fact.
[[nodiscard]] datasets::FactSet load_named_facts(const FactOptions& options, const Handles& lent);

/// What check_request refuses and the facts alone show, for asking before a model is loaded.
void refuse_contradictions(const datasets::FactSet& facts, const RunOptions& options);

/// Lints the facts, also against the model (is the target already its answer?), and logs what was found. With
/// options.fix the facts come back with the clear fixes applied. `findings` gets all of it. Throws Error(kCorruption)
/// if a finding is an error that was not fixed, unless it is a contradiction and options.allow_conflicts is set.
[[nodiscard]] datasets::FactSet check_request(datasets::FactSet facts, const models::Model& model,
                                              const RunOptions& options, const Handles& lent,
                                              std::vector<datasets::Finding>& findings);

/// The families that the options name for these facts: `generation` with them where it is asked for, except where each
/// fact is judged alone, which it cannot do.
[[nodiscard]] std::vector<std::string> metric_names(const MetricOptions& options, const datasets::FactSet& facts,
                                                    bool alone = false);
/// Tokens of a forward pass of the evaluation: 2,048, and on GPUs, where launches cost most of a small pass, up to
/// eight times as many, as far as an eighth of the free memory goes. `machine` is where the layers are.
inline constexpr int64_t kPassTokens = 2048;
[[nodiscard]] int64_t pass_tokens(const models::ModelConfig& config, const std::vector<c10::Device>& layers,
                                  size_t element_bytes, const std::vector<devices::DeviceInfo>& machine);
/// What is lent goes with it.
[[nodiscard]] evaluation::EvaluateOptions evaluate_options(const models::Model& model, const MetricOptions& options,
                                                           const Handles& lent, uint64_t seed);

/// --device-map, --max-memory and --dtype as models/placing.h takes them.
[[nodiscard]] models::PlaceOptions place_options(const ModelOptions& options, const Log& log = {});

/// The editor of the options, or the one that their file of hyper-parameters is for (alg_name), or the default: latch
/// for a model that it has a preset for, else memit. Throws Error(kInvalidArgument) if both are named and differ
/// ("ft-m" is a form of FT), or for a name that is no editor's. `checkpoint` may be null where none is known yet.
[[nodiscard]] const editors::EditorInfo& chosen_editor(const RunOptions& options,
                                                       const models::Checkpoint* checkpoint = nullptr);
/// options.compute_dtype, or the editor's own where none is chosen.
[[nodiscard]] const std::string& chosen_arithmetic(const RunOptions& options, const editors::EditorInfo& editor);

/// The hyper-parameters that a program uses: a file, a preset by name, or (empty) the preset that fits the model; then
/// `set`, assignments "v_lr=0.1".
/// Throws Error(kNotFound) listing the editor's presets if nothing was named and none fits, and what the readers throw.
[[nodiscard]] hparams::RawHparams find_hparams(const std::string& editor, const std::string& file_or_name,
                                               const std::vector<std::string>& set,
                                               const models::Checkpoint& checkpoint, const Log& log = {});

/// The options' templates, or those of the file they name; nothing if they name none.
[[nodiscard]] std::optional<editors::ContextTemplates> named_contexts(const RunOptions& options);

/// Throws Error(kInvalidArgument) in every process, naming the first setting in which one differs from the first
/// process, unless all were given the same: what decides a result must not depend on who computed which part.
void require_same(const devices::WorkSharing& sharing, const nlohmann::json& settings);
/// What decides key statistics.
[[nodiscard]] nlohmann::json statistics_settings(const RunOptions& options);

/// Computed by all processes of a group together. `cache_is_output`: as StatisticsOptions has it.
[[nodiscard]] std::unique_ptr<editors::StatisticsProvider> statistics_provider(const RunOptions& options,
                                                                               const Handles& lent,
                                                                               bool cache_is_output = false);

/// A short name for files and reports: the folder's or file's name.
[[nodiscard]] std::string short_model_name(const models::Checkpoint& checkpoint);

}  // namespace emend::workflow
