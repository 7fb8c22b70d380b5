// What is refused before anything is loaded, and whether the work of an edit fits on the devices.
//
// The weights are checked when they are placed (models::place_model). Here the phases of an edit are counted on that
// same placement: evaluation, targets (or training), keys and the solve, and the second moments. They come one after
// the other, so each must fit beside the weights alone.
#pragma once

#include <emend/datasets/fact.h>
#include <emend/models/checkpoint.h>
#include <emend/models/model.h>
#include <emend/workflow/handles.h>
#include <emend/workflow/options.h>
#include <emend/workflow/save_formats.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::workflow {

/// Refuses outputs and measurements that the protocol or the editor of the options cannot have, and files that are not
/// there. `options.editor` is named; `metrics` are families. Throws Error(kInvalidArgument), Error(kUnsupported),
/// Error(kNotFound), Error(kIo).
void check_outputs(const RunOptions& options, const std::vector<std::string>& metrics);

/// Refuses an adapter of an edit of the model by this editor, with these effective values, that has no place in one.
/// Throws Error(kUnsupported).
void check_adapter(const SaveFormat& format, const models::Model& model, const std::string& editor,
                   const nlohmann::json& hparams);

/// Refuses files for metrics that are not measured, and metrics whose files are missing. `metrics` are families;
/// `lifelong`: the protocol of that name, which measures health wherever there are files for it. Throws
/// Error(kInvalidArgument).
void check_metrics(const MetricOptions& options, const std::vector<std::string>& metrics, bool lifelong = false);

/// Refuses hyper-parameters of options.editor that cannot be read or that this model cannot have, and statistics to
/// import that are not there. Throws Error(kInvalidArgument), Error(kNotFound) and what find_hparams throws.
void check_hparams(const RunOptions& options, const models::Checkpoint& checkpoint);

/// Neurons of zeros that every MLP gets before the edit: options.spare_neurons, or as many as the editor takes beyond
/// those that are idle, a multiple of 32 (whole blocks of quantised types). Throws Error(kInvalidArgument) where the
/// edit is saved in a form that keeps the model's shapes, and for a folder with edits in force.
[[nodiscard]] int64_t room_to_add(const RunOptions& options, const models::Checkpoint& checkpoint,
                                  std::span<const datasets::Fact> facts);

/// Refuses layers (one number or several) beyond those of the model, as its configuration counts them. `where` names
/// them in the message, `advice` ends it. Throws Error(kInvalidArgument).
void require_layers(const nlohmann::json& layers, const models::Checkpoint& checkpoint, const std::string& where,
                    const std::string& advice = "");

/// Refuses options.stats_import, if there is one, unless it names a file for each of the layers, or for any of the
/// model's where they are not known yet (null). Throws Error(kInvalidArgument), Error(kNotFound).
void require_statistics(const RunOptions& options, const models::Checkpoint& checkpoint, nlohmann::json layers = {});

/// Plans every phase on the placement that the model will get. Throws Error(kDevice) naming the phase, what each device
/// needs and has, and what was tried and fits; logs a warning for a phase whose result may be cached. Leaves everything
/// that is wrong otherwise (hyper-parameters, maps, weights that do not fit) to those who read it.
void require_room(const RunOptions& options, const models::Checkpoint& checkpoint, const datasets::FactSet& facts,
                  const Handles& lent);

}  // namespace emend::workflow
