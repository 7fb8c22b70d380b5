// Whether the work of an edit fits on the devices, asked before anything is loaded.
//
// The weights are checked when they are placed (models::place_model). Here the phases of an edit are counted on that
// same placement: evaluation, targets (or training), keys and the solve, and the second moments. They come one after
// the other, so each must fit beside the weights alone.
#pragma once

#include <emend/datasets/fact.h>
#include <emend/devices/memory_model.h>
#include <emend/models/checkpoint.h>
#include <emend/models/config.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "options.h"

namespace emend::tools {

/// One phase: what the planner is to count, and what may help if it does not fit.
struct EditPhase {
  std::string name;
  devices::WorkShape work = {};
  std::string advice = {};
  /// The option that makes it smaller, its present value, and the phase with another value; empty where there is none.
  std::string option = {};
  int64_t value = 0;
  std::function<EditPhase(int64_t)> with = {};
  /// Hidden states of all rows of a batch, kept on the device of this layer while keys are collected.
  int64_t held_tokens = 0, held_at_layer = 0;
  bool may_be_cached = false;  ///< its result may be there already: a shortage is a warning
};

/// The phases of an edit. `hparams`: effective values of the editor; `batch`: whether it solves for facts together. An
/// editor without layers (IKE) has only the evaluation.
[[nodiscard]] std::vector<EditPhase> edit_phases(const EditOptions& options, const nlohmann::json& hparams, bool batch,
                                                 const models::ModelConfig& config, const models::Tokenizer& tokenizer,
                                                 const datasets::FactSet& facts);

/// Plans every phase on the placement that the model will get. Throws Error(kDevice) naming the phase, what each device
/// needs and has, and what was tried and fits; logs a warning for a phase whose result may be cached. Leaves everything
/// that is wrong otherwise (hyper-parameters, maps, weights that do not fit) to those who read it.
void require_room(const EditOptions& options, const models::Checkpoint& checkpoint, const datasets::FactSet& facts,
                  const Common& common);

}  // namespace emend::tools
